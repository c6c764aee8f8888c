"""An engine in this process, as the service runs it, without the service: turns are timed here.

`TurnTimes` is what one turn took, and says whether its history was where it should have been.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
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

# Where a turn's history is to come from: its KV, kvd, kvd if it pays, nowhere, wherever it is.
Source = Literal["resident", "kvd", "auto", "none", "any"]
SSD_SHARE = 0.95  # of the history that must come from SSD where a case says so


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One turn; times are of one monotonic clock.

    Attributes:
        token_s: seconds after the submission at which each token of the answer was there.
        reused_tokens: tokens of the prompt that were not computed.
        tier_tokens: reused tokens by the tier they came from.
        stall_s: how long computing waited for layers.
        buffer_layers: see Request.
        output_ids: the answer.
        drafted_tokens, accepted_tokens: guessed ahead of it, and right.
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
        """From submission to the first token."""
        return self.token_s[0] - self.submitted_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 without any."""
        num_more = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / num_more if num_more else 0.0

    @property
    def end_s(self) -> float:
        """When the answer was complete."""
        return self.token_s[-1]


def is_from(times: TurnTimes, tier: str, history_tokens: int) -> bool:
    """Whether all of the history came from the tier; tier "" means that nothing was reused."""
    if not tier:
        return not times.reused_tokens
    least = SSD_SHARE * history_tokens if tier == "ssd" else history_tokens
    return times.reused_tokens == history_tokens and times.tier_tokens.get(tier, 0) >= least


def whole_blocks(history_tokens: int, new_tokens: int, block_tokens: int) -> tuple[int, int]:
    """Make the history whole blocks, one at least, and count what that takes from it as new.

    A partial block would be replaced as soon as a longer one is stored: the history would not stay
    as it is.
    """
    whole = max(block_tokens, history_tokens - history_tokens % block_tokens)
    return whole, max(1, history_tokens + new_tokens - whole)


ATTACH_S = 60.0
STORE_WAIT_S = 120.0  # for kvd, in one load or save: a slow disk is to be measured
TENANT = "bench"
POLICIES: Mapping[Source, LoadPolicy | None] = {
    "resident": LoadPolicy.NEVER,  # what the session's KV has not is computed, and then noticed
    "kvd": LoadPolicy.ALWAYS,
    "auto": LoadPolicy.AUTO,
    "none": LoadPolicy.NEVER,
    "any": None,
}
KEEPS_RESIDENT = frozenset({"resident", "any"})


class _Sink:
    """Records when each token comes; ends the answer at its length, or by `window_full`."""

    def __init__(self, max_tokens: int, is_over: Callable[[], bool] | None) -> None:
        self.token_s: list[float] = []
        self._max_tokens = max_tokens
        self._is_over = is_over

    def on_start(self, request: EngineRequest) -> None:
        """Do nothing: the outcome is read at the end."""

    def on_window_full(self) -> None:
        """Do nothing: the answer has ended."""

    def on_token(self, token: Sampled) -> bool:
        """Note the time."""
        del token
        self.token_s.append(time.perf_counter())
        is_over = self._is_over is not None and self._is_over()
        return is_over or len(self.token_s) == self._max_tokens


class LocalEngine:
    """An engine in this process, as the service runs it, without the service.

    Attributes:
        parts: the engine's parts.
        kvd: beside it; None if there is none.
        has_states: whether the model has states; then no part of a sequence stays resident.
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
        """Time that the model has computed so far."""
        return self.parts.engine.gauges()["compute_busy_s"]

    def key(self, name: str) -> SessionKey:
        """Return the key of a session of the measured model."""
        return SessionKey(TENANT, self._model.loaded.fingerprint, name)

    def new_tokens(self, num_tokens: int) -> list[int]:
        """Draw token ids that nobody has seen."""
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
            source: where the history is to come from; a resident sequence that it is not to come
                from is released first.
            keep_tokens: tokens of prompt and answer that the session keeps afterwards, up to which
                a load is possible then; 0: all of it is given up, and the session stays as kvd has
                it.
            history_tokens: history as kvd's look-ahead is told of it; by default `keep_tokens`.
            is_over: ends the answer before its length.
            is_final: whether the session ends with this turn, which is reported to kvd.
            grammar: of the answer, which does not end before `max_tokens`.
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
        """Return when engine and kvd have nothing to do: what is timed next is timed alone."""
        await self.parts.engine.idle.wait()
        if self.kvd is not None:
            await self.kvd.until_quiet()

    async def run(self) -> None:
        """Run until cancelled; turns fail when this does."""
        self._life = asyncio.current_task()
        await self.parts.engine.run()

    async def _generate(self, request: EngineRequest) -> None:
        """Compute the request, or raise what ended the engine."""
        assert self._life is not None, "an engine that runs"  # noqa: S101
        answer = asyncio.ensure_future(self.parts.engine.generate(request))
        try:
            await asyncio.wait((answer, self._life), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._life.result()
                raise EngineFailedError("the engine has ended", "report it")
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
) -> AsyncIterator[LocalEngine]:
    """Run an engine inside the block, attached to kvd; without a kvd it recomputes.

    A step is a token of each answer: nothing is drafted, unless `scheduler` says so.

    Args:
        model: the model that it computes with.
        kvd: None: none.
        kv_tokens: value of the setting scheduler.kv_tokens.
        cache: more settings of that section, by key.
        scheduler: the same.
    """
    mode: dict[str, Any] = {"mode": "recompute"}
    if kvd is not None:
        mode = {"kvd_runtime_dir": kvd.runtime_dir, "deadline_s": STORE_WAIT_S}
    check_room(kv_tokens * model.calibration.layout.token_bytes, "working KV")
    settings = InferenceSettings.model_validate(
        {
            "model": {"device": str(model.loaded.device)},
            "cache": {**mode, **(cache or {})},
            "scheduler": {"kv_tokens": kv_tokens, "draft_tokens": 0, **(scheduler or {})},
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
