"""A request as the engine computes it: the scheduler's request, its memory and its sink.

`Engine` is what the makers of requests need of the engine; `EngineLoop` (engine_loop.py) is it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from inference_svc.core.ranges import Range
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.core.retention import NO_RETENTION, Retention
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.start_gate import HBM
from inference_svc.core.scheduling.step_plan import Admission
from inference_svc.core.scheduling.waiting_queue import WaitingQueue
from inference_svc.core.speculation.prompt_lookup import PromptLookup
from inference_svc.core.turn_record import Discard, Graft
from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.pooler import Pooler
from inference_svc.runtime.compute.sampling import Sampled, Sampler
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.store.saves import SaveStream
from inference_svc.runtime.store.session_store import BegunLoad
from shared.types.block_key import TOKEN_BYTES
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


@dataclass(eq=False)
class LoadOutcome:
    """How much of a turn's history was reused, and from which tiers; filled in while it loads.

    Attributes:
        tokens: number of tokens in the sequence's KV that need not be computed.
        tier_tokens: how many of them came from each tier: "hbm", "dram", "ssd".
        load_s: seconds from admission to the last token's arrival.
        stall_s: seconds of `load_s` during which steps waited for a layer.
        reason: slug that says why it is not more; "" if the whole history was reused.
    """

    tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    load_s: float = 0.0
    stall_s: float = 0.0
    reason: str = ""


class TurnSink(Protocol):
    """Receives the answer of a request, token by token; called on the event loop."""

    def on_start(self, request: "EngineRequest") -> None:
        """Receive how much of the history was found.

        Called once, when the request may start. `request.outcome` may still change after that.
        """

    def on_token(self, token: Sampled) -> bool:
        """Receive the next token; return whether the answer ends with it."""

    def on_window_full(self) -> None:
        """End the answer: the window is full, and nothing may be dropped."""


@dataclass(frozen=True)
class ContextCut:
    """Tokens that are dropped from a session's context.

    Attributes:
        token_ids: the computed tokens of the context before the cut.
        ranges: positions in `token_ids` that are dropped.
        lineage: the lineage of `token_ids`; None: not known.
    """

    token_ids: Sequence[int]
    ranges: Sequence[Range]
    lineage: Lineage | None = None

    @property
    def token_bytes(self) -> bytes:
        """`token_ids` as kvd takes them: little-endian uint32."""
        return as_token_bytes(self.token_ids)

    @property
    def lineage_after(self) -> Lineage | None:
        """The lineage of the tokens that are left; `ranges` have to be merged."""
        return None if self.lineage is None else self.lineage.after(self.token_bytes, self.ranges)


@dataclass(eq=False)
class Load:
    """A load under way, from its request's admission to the last token.

    Attributes:
        admission: the scheduler's admission of the request.
        begun: the store's load, to be copied; None: there is none, or it is not known yet.
        gate: the gate of the sequence's KV, once it is known that KV is copied to it.
        source: another sequence's KV, to be copied; None: there is none.
        boundary: position of a token at which a stored block begins.
        window_from: first token of which layers with a window will have KV.
        held: the holds on the memory of `source` and on its token slots until the load is over:
            its session may be deleted meanwhile.
    """

    admission: Admission
    begun: BegunLoad | None = None
    gate: LayerGate | None = None
    source: SequenceKv | None = None
    boundary: int = 0
    window_from: int = 0
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def tier(self) -> str | None:
        """The slowest tier that KV is copied from; None: from none."""
        if self.gate is None:
            return None
        # The alphabet orders the two by speed: "ssd" > "dram".
        return HBM if self.begun is None else max(self.begun.tier_tokens, default=None)


@dataclass(eq=False, kw_only=True)
class EngineRequest(Request):
    """A request as the engine computes it.

    Attributes:
        sink: receives the answer.
        sampler: chooses the answer's tokens; None: its tokens are pooled.
        pooler: makes an embedding of its tokens, and ends it where an answer would begin; None: it
            has an answer.
        is_final: whether the session ends with this turn.
        retention: for how long its KV is to be kept at least.
        prefix_tokens: how many of its first tokens are tools and system message.
        load_ends: positions in its prompt, ascending, at which later loads have to be able to end,
            for layers that attend to the last tokens only; (): at the prompt's end.
        done: set when the answer is complete; its exception says why there is none.
        load_policy: the turn's own load policy; None: the engine's.
        truncate: takes the context that has filled the window and returns the ranges to drop of
            it; () ends the answer. None: the answer never fills its window.
        scores: keeps the attention scores of its tokens, for compression; None: nothing needs them.
        input_tokens: number of the prompt's tokens that are the turn's own, not its history.
        discards: the discards that `truncate` made, in order.
        to_drop: ranges that it is about to drop, merged.
        kv: the sequence's KV, from the start of loading until released or made a resident.
        write_buffer: the write buffer of this admission; None if nothing is saved.
        saves: the stream that stores the write buffer.
        load: the load of its last admission, while that uses or provides the request's memory.
        outcome: how much of its history was reused.
        in_batch: set when its first step is planned.
        is_kept: whether its answer was accepted; the save then releases its memory.
        is_started: whether `sink.on_start` was called.
        num_failed_loads: number of its loads that failed after they were announced.
        predicted_ids: the client's prediction of most of the answer.
        num_drafted, num_accepted: tokens of its drafts so far, and those that were right.
        grafts: grafts of another session's KV into its prompt, in order.
        ahead_tokens: tokens of its prompt that were computed for the grafts, before it was queued.
        ahead_s: seconds that this took.
        lookup: drafts its next tokens; None: it has not begun to answer, or its context was cut.
        context: the contextvars of the task that made it: work for it in other tasks belongs to its
            trace, and is logged with its session.
    """

    sink: TurnSink
    sampler: Sampler | None = None
    pooler: Pooler | None = None
    is_final: bool = False
    retention: Retention = NO_RETENTION
    prefix_tokens: int = 0
    load_ends: tuple[int, ...] = ()
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    load_policy: LoadPolicy | None = None
    truncate: Callable[[Sequence[int]], tuple[Range, ...]] | None = None
    scores: ScoreKeeper | None = None
    input_tokens: int = 0
    discards: list[Discard] = field(default_factory=list)
    to_drop: tuple[Range, ...] = ()
    kv: SequenceKv | None = None
    write_buffer: WriteBuffer | None = None
    saves: SaveStream | None = None
    load: Load | None = None
    outcome: LoadOutcome = field(default_factory=LoadOutcome)
    in_batch: asyncio.Event = field(default_factory=asyncio.Event)
    is_kept: bool = False
    is_started: bool = False
    num_failed_loads: int = 0
    predicted_ids: Sequence[int] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    grafts: list[Graft] = field(default_factory=list)
    ahead_tokens: int = 0
    ahead_s: float = 0.0
    lookup: PromptLookup | None = None
    context: Context = field(default_factory=copy_context)
    _token_bytes: bytearray = field(default_factory=bytearray)

    @property
    def found_tokens(self) -> int:
        """Number of tokens of its prompt that were reused, not computed for this turn."""
        return max(0, self.outcome.tokens - self.ahead_tokens)

    @property
    def paged_kv(self) -> PagedKv:
        """The sequence's KV, which is on pages."""
        assert isinstance(self.kv, PagedKv), "only KV on pages grows"  # noqa: S101
        return self.kv

    def token_bytes(self, num_tokens: int) -> bytes:
        """Return its first tokens as kvd takes them: little-endian uint32."""
        num_cached = len(self._token_bytes) // TOKEN_BYTES
        self._token_bytes += as_token_bytes(self.token_ids[num_cached:])
        return bytes(self._token_bytes[: num_tokens * TOKEN_BYTES])

    def discard(self, ranges: Sequence[Range]) -> None:
        """Drop computed tokens of its context; its lineage changes.

        Args:
            ranges: merged ranges of computed tokens.
        """
        if self.lineage is not None:
            computed = self.token_bytes(self.computed_tokens)
            self.lineage = self.lineage.after(computed, ranges)
        if self.scores is not None:
            self.scores.discard(ranges)
        self._token_bytes.clear()
        self.lookup = None
        self.load_ends = ()
        super().discard(ranges)

    def note_state(self) -> None:
        """Keep the model's state behind the computed tokens for the save, if there are both."""
        if self.kv is not None and self.write_buffer is not None:
            self.write_buffer.note_state(self.kv)

    def detach(self) -> None:
        """Forget the memory, which its caller has handed on; the request waits for admission."""
        self.kv = self.write_buffer = self.saves = None
        self.in_batch.clear()

    def end(self, error: Exception | None = None) -> None:
        """Complete `done`, unless its waiter has been cancelled."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def as_token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as kvd takes them: little-endian uint32."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


class Engine(Protocol):
    """Computes requests, and keeps their sessions' KV; used on the event loop.

    Attributes:
        queue: the requests that wait to be computed.
    """

    queue: WaitingQueue

    async def generate(self, request: EngineRequest, cut: ContextCut | None = None) -> None:
        """Compute a request's answer; on return the caller owes `keep` or `drop`.

        Args:
            request: the request, not queued yet.
            cut: tokens of the session's context that are dropped once the request is queued; the
                request continues what is left. They stay dropped if the request fails.

        Raises:
            QueueFullError: the queue is full; the request was not queued.
            ReportedError: the request failed; nothing is owed.
        """

    def keep(self, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """Save the request's KV in the background, and keep it in memory while there is room.

        Args:
            request: a request that is done.
            token_ids: the first of its tokens, which are kept; all of them are computed.
        """

    def drop(self, request: EngineRequest) -> None:
        """Cancel the request wherever it is; do nothing if it is kept or released."""

    async def discard(self, key: SessionKey, cut: ContextCut) -> None:
        """Drop tokens of a session that has no request; its other tokens keep their KV.

        Returns once the KV in memory is compacted. The store is notified after the session's saves
        and before its next load and save; if that fails, a later load misses. A discard that is
        repeated changes nothing.

        Raises:
            InvalidDiscardError: for a range that is empty or outside the context.
        """

    async def forget(self, key: SessionKey, token_ids: Sequence[int]) -> None:
        """Drop the KV of a session that is deleted, in memory and in the store."""

    async def end_session(self, key: SessionKey) -> None:
        """Report a session's end to the store, after the save of its last turn."""

    async def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> None:
        """Report to the store how soon a session is likely to return, after its turn's save.

        If the session's next turn has arrived by then, there is nothing to expect any more, and
        nothing is reported.

        Args:
            key: the session's key.
            tools: names of tools that its last answer calls.
            superseded: whether another session continues the conversation in its place.
        """
