"""Adapter of this engine as the service runs it, with its kvd, which outlives it.

The store is kvd's runtime directory; without one, history that is not resident is recomputed. The
environment's COMPILE is the setting `model.compile`.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from adapter import OnToken, serve

from inference_svc.assembly import Model
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.core.answers import SamplingParams
from inference_svc.runtime.calibration.remembered_proofs import calibrate_once
from inference_svc.runtime.compute.sampling import Sampled, Sampler
from inference_svc.runtime.engine.engine_request import EngineRequest
from inference_svc.runtime.model.model_loader import load_model


@dataclass(frozen=True)
class _Kvd:
    """The engine's view of its kvd, which the measurement owns."""

    runtime_dir: Path

    async def until_quiet(self) -> None:
        """Do nothing: the engine waits for its own work."""


class _Sink:
    """Records tokens as they come, and ends the answer at its length."""

    def __init__(self, num_tokens: int, on_token: Callable[[int], None]) -> None:
        self._num_left = num_tokens
        self._on_token = on_token

    def on_start(self, request: EngineRequest) -> None:
        """Do nothing."""

    def on_window_full(self) -> None:
        """Do nothing: the answer has ended."""

    def on_token(self, token: Sampled) -> bool:
        """Record a token; return whether it was the last."""
        self._on_token(token.token_id)
        self._num_left -= 1
        return self._num_left == 0


class Ours:
    """See `adapter.Engine`."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        torch.set_num_threads(1)
        loaded = load_model(Path(model), dtype)
        proofs = Path(store) / "proofs.json"
        calibration, _, _ = calibrate_once(loaded, "auto", proofs, "auto")
        self._numbers = count(1)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._running = running_engine(
            Model(loaded, calibration),
            _Kvd(Path(store)),
            kv_tokens=kv_tokens,
            compiling=os.environ.get("COMPILE", "off"),
        )
        self._engine: LocalEngine = self._await(self._running.__aenter__())

    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        keep = keep_tokens if len(prompts) == 1 else 0
        self._await(self._turns(names, prompts, num_tokens, keep, on_token))

    def settle(self) -> None:
        self._await(self._engine.settle())

    async def _turns(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        async with asyncio.TaskGroup() as tasks:
            for index, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
                tasks.create_task(
                    self._turn(index, name, prompt, num_tokens, keep_tokens, on_token)
                )

    async def _turn(
        self,
        index: int,
        name: str,
        prompt: list[int],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        engine = self._engine.parts.engine
        marks = (len(prompt),) if keep_tokens else ()  # as the service does: before the answer
        request = EngineRequest(
            number=next(self._numbers),
            key=self._engine.key(name),
            token_ids=list(prompt),
            max_tokens=num_tokens,
            arrived_ns=time.monotonic_ns(),
            history_tokens=0,
            load_ends=marks,
            marks=marks if self._engine.has_states else (),
            sampler=Sampler(SamplingParams(max_tokens=num_tokens, ignore_eos=True)),
            sink=_Sink(num_tokens, lambda token_id: on_token(index, token_id)),
        )
        await engine.generate(request)
        if keep_tokens:
            computed = request.token_ids[:-1]  # the last token is not, before the next turn
            engine.keep(request, computed[:keep_tokens])
        else:
            engine.drop(request)

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


serve(Ours())
