"""An engine in this process, as the service runs it but without the service, to time turns.

`TurnTimes` has the times of one turn, and shows whether its history was where it should have been.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from inference_svc.assembly import EngineParts, Model, assemble_engine
from inference_svc.bench.workspace import check_room
from inference_svc.config import InferenceSettings
from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import EngineFailedError
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar, CallGrammar
from inference_svc.runtime.compute.sampling import Sampled, Sampler
from inference_svc.runtime.engine.engine_request import EngineRequest
from shared.children.child_kvd import ChildKvd
from shared.types.session_key import SessionKey

# Where a turn's history has to come from: resident KV, kvd, kvd if that pays, nowhere, anywhere.
Source = Literal["resident", "kvd", "auto", "none", "any"]
SSD_SHARE = 0.95  # least share of the history that has to come from SSD, where a case requires it


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One turn; all times are of one monotonic clock.

    Attributes:
        submitted_s: when it was submitted.
        token_s: when each token of the answer was sampled.
        reused_tokens: tokens of the prompt that were not computed.
        tier_tokens: reused tokens by the tier they came from.
        load_s: seconds that loading the history took.
        stall_s: seconds that computing waited for layers.
        buffer_layers: see Request.
        output_ids: the answer.
        drafted_tokens, accepted_tokens: numbers of drafted tokens, and of right ones.
    """

    submitted_s: float
    token_s: tuple[float, ...]
    reused_tokens: int
    tier_tokens: Mapping[str, int]
    load_s: float
    stall_s: float
    buffer_layers: float | None
    output_ids: tuple[int, ...]
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.token_s[0] - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 if there are none."""
        num_more = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / num_more if num_more else 0.0

    @property
    def end_s(self) -> float:
        """When the answer was complete."""
        return self.token_s[-1]


def is_from(times: TurnTimes, tier: str, history_tokens: int) -> bool:
    """Return whether all history came from a tier; tier "" means that nothing was reused."""
    if not tier:
        return not times.reused_tokens
    least = SSD_SHARE * history_tokens if tier == "ssd" else history_tokens
    return times.reused_tokens == history_tokens and times.tier_tokens.get(tier, 0) >= least


def whole_blocks(history_tokens: int, new_tokens: int, block_tokens: int) -> tuple[int, int]:
    """Round the history down to whole blocks, at least one, and count the remainder as new.

    A partial block would be replaced as soon as a longer one is stored, so that the history would
    change.
    """
    whole = max(block_tokens, history_tokens - history_tokens % block_tokens)
    return whole, max(1, history_tokens + new_tokens - whole)


ATTACH_S = 60.0
STORE_WAIT_S = 120.0  # for kvd, in one load or save: slow disks are measured, too
TENANT = "bench"
POLICIES: Mapping[Source, LoadPolicy | None] = {
    "resident": LoadPolicy.NEVER,  # missing history is computed, which the caller notices
    "kvd": LoadPolicy.ALWAYS,
    "auto": LoadPolicy.AUTO,
    "none": LoadPolicy.NEVER,
    "any": None,
}
KEEPS_RESIDENT = frozenset({"resident", "any"})


class _Sink:
    """Records when each token is sampled, and ends the answer."""

    def __init__(self, max_tokens: int, is_over: Callable[[], bool] | None) -> None:
        self.token_s: list[float] = []
        self._max_tokens = max_tokens
        self._is_over = is_over

    def on_start(self, request: EngineRequest) -> None:
        """Do nothing: the outcome is read at the end."""

    def on_window_full(self) -> None:
        """Do nothing: the answer has ended."""

    def on_token(self, token: Sampled) -> bool:
        """Record the time; return whether the answer ends."""
        del token
        self.token_s.append(time.perf_counter())
        is_over = self._is_over is not None and self._is_over()
        return is_over or len(self.token_s) == self._max_tokens


class LocalEngine:
    """An engine in this process, as the service runs it but without the service.

    Attributes:
        parts: the engine's parts.
        kvd: the kvd that it uses; None if there is none.
        has_states: whether the model has recurrent states; then no part of a sequence stays
            resident.
    """

    def __init__(self, parts: EngineParts, model: Model, kvd: ChildKvd | None) -> None:
        self.parts = parts
        self.kvd = kvd
        self.block_tokens = model.calibration.layout.block_tokens
        self.num_layers = len(model.calibration.layers)
        self.has_states = bool(model.calibration.state_shapes)
        self.device = model.loaded.device
        self._model = model
        self._numbers = count(1)
        self._random = np.random.default_rng()  # every engine draws other tokens
        self._life: asyncio.Task[None] | None = None

    @property
    def busy_s(self) -> float:
        """Seconds that the model has computed so far."""
        return self.parts.engine.gauges()["compute_busy_s"]

    def key(self, name: str) -> SessionKey:
        """Return the key of a session of the measured model."""
        return SessionKey(TENANT, self._model.loaded.fingerprint, name)

    def new_tokens(self, num_tokens: int) -> list[int]:
        """Draw random token ids, which no cache contains."""
        drawn = self._random.integers(0, self._model.loaded.vocab_size, num_tokens)
        return [int(token_id) for token_id in drawn]

    async def turn(
        self,
        key: SessionKey,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        source: Source,
        keep_tokens: int = 0,
        history_tokens: int | None = None,
        is_over: Callable[[], bool] | None = None,
        is_final: bool = False,
        grammar: AnswerGrammar | CallGrammar | None = None,
    ) -> TurnTimes:
        """Answer one turn.

        Args:
            key: the session's key.
            prompt_ids: history and new tokens.
            max_tokens: length of the answer.
            source: where the history has to come from; a resident sequence is released first,
                unless it is the source.
            keep_tokens: number of tokens of prompt and answer that the session keeps afterwards,
                and that can be loaded then. 0: nothing is kept, and kvd's part of the session stays
                as it is.
            history_tokens: length of the history as reported to kvd's look-ahead; by default
                `keep_tokens`.
            is_over: returns whether to end the answer before its length.
            is_final: whether the session ends with this turn, which is reported to kvd.
            grammar: the answer's grammar, which does not end before `max_tokens`.
        """
        engine = self.parts.engine
        if source not in KEEPS_RESIDENT:
            engine.memory.release_resident(key)
        sink = _Sink(max_tokens, is_over)
        history = keep_tokens if history_tokens is None else history_tokens
        marks = (keep_tokens,) if keep_tokens else ()
        request = EngineRequest(
            number=next(self._numbers),
            key=key,
            token_ids=list(prompt_ids),
            max_tokens=max_tokens,
            arrived_ns=time.monotonic_ns(),
            history_tokens=min(history, len(prompt_ids)),
            is_final=is_final,
            load_ends=marks,
            marks=marks if self.has_states else (),
            sampler=Sampler(
                SamplingParams(max_tokens=max_tokens, ignore_eos=True), grammar=grammar
            ),
            sink=sink,
            load_policy=POLICIES[source],
            may_share=source in KEEPS_RESIDENT,
        )
        submitted_s = time.perf_counter()
        await self._generate(request)
        if keep_tokens:
            engine.keep(request, request.token_ids[:keep_tokens])
        else:
            engine.drop(request)
        return _times(request, sink, submitted_s)

    async def settle(self) -> None:
        """Wait until engine and kvd are idle, so that the next turn is timed alone."""
        await self.parts.engine.idle.wait()
        if self.kvd is not None:
            await self.kvd.until_quiet()

    async def run(self) -> None:
        """Run until cancelled; turns fail when it ends."""
        self._life = asyncio.current_task()
        await self.parts.engine.run()

    async def _generate(self, request: EngineRequest) -> None:
        """Compute the request, or raise the error that ended the engine."""
        assert self._life is not None, "an engine that runs"  # noqa: S101
        answer = asyncio.ensure_future(self.parts.engine.generate(request))
        try:
            await asyncio.wait((answer, self._life), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._life.result()
                raise EngineFailedError(
                    "the engine has ended unexpectedly", "this is a bug: report it"
                )
        finally:
            if not answer.done():
                answer.cancel()
        answer.result()


@asynccontextmanager
async def running_engine(
    model: Model,
    kvd: ChildKvd | None,
    *,
    kv_tokens: int,
    cache: Mapping[str, Any] | None = None,
    scheduler: Mapping[str, Any] | None = None,
    compiling: Literal["off", "step"] = "off",
) -> AsyncIterator[LocalEngine]:
    """Run an engine inside the block, attached to kvd; without a kvd it recomputes.

    A step computes one token of each answer: nothing is drafted, unless `scheduler` enables it.

    Args:
        model: the model that it computes with.
        kvd: the kvd to attach to; None: none.
        kv_tokens: value of the setting scheduler.kv_tokens.
        cache: more settings of the section cache, by key.
        scheduler: more settings of the section scheduler, by key.
        compiling: value of the setting model.compile.
    """
    mode: dict[str, Any] = {"mode": "recompute"}
    if kvd is not None:
        mode = {"kvd_runtime_dir": kvd.runtime_dir, "deadline_s": STORE_WAIT_S}
    check_room(kv_tokens * model.calibration.layout.token_bytes, "working KV")
    with TemporaryDirectory(prefix="inference-bench-") as state_dir:
        settings = InferenceSettings.model_validate(
            {
                "model": {"device": str(model.loaded.device), "compile": compiling},
                "cache": {**mode, **(cache or {})},
                "scheduler": {"kv_tokens": kv_tokens, "draft_tokens": 0, **(scheduler or {})},
                "server": {"state_dir": state_dir},
            }
        )
        parts = assemble_engine(settings, model)
        local = LocalEngine(parts, model, kvd)
        tasks = [asyncio.create_task(local.run())]
        if parts.client is not None:
            tasks.append(asyncio.create_task(parts.client.run()))
        try:
            if parts.client is not None:
                await parts.client.wait_attached(ATTACH_S)
            await asyncio.to_thread(parts.pool.prefault)
            yield local
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            parts.close()


def _times(request: EngineRequest, sink: _Sink, submitted_s: float) -> TurnTimes:
    outcome = request.outcome
    return TurnTimes(
        submitted_s=submitted_s,
        token_s=tuple(sink.token_s),
        reused_tokens=request.loaded_tokens,
        tier_tokens=dict(outcome.tier_tokens),
        load_s=outcome.load_s,
        stall_s=outcome.stall_s,
        buffer_layers=request.buffer_layers,
        output_ids=tuple(request.output_ids),
        drafted_tokens=request.num_drafted,
        accepted_tokens=request.num_accepted,
    )
