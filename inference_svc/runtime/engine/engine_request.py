"""A turn inside the engine: the scheduler's request, its memory, and where its tokens go."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from inference_svc.core.discards import Discard, Range
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.step_plan import Admission
from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.compute.sampling import Sampled, Sampler
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.store.saves import SaveStream
from inference_svc.runtime.store.session_store import BegunLoad
from shared.types.block_key import TOKEN_BYTES
from shared.types.lineage import Lineage


@dataclass(eq=False)
class LoadOutcome:
    """What a turn found of its history; filled in as it is known.

    Attributes:
        tokens: in the sequence's KV, that need not be computed.
        tier_tokens: of them, by the tier where they were: "hbm", "dram", "ssd".
        load_s: from asking to the last token's arrival.
        stall_s: of that, how long the model waited for a layer.
        reason: slug, why it is not more; "" if all that was asked for is there.
    """

    tokens: int = 0
    tier_tokens: Mapping[str, int] = field(default_factory=dict)
    load_s: float = 0.0
    stall_s: float = 0.0
    reason: str = ""


class TurnSink(Protocol):
    """Receives what the engine makes of a request; called on the event loop."""

    def started(self, request: "EngineRequest") -> None:
        """History is found as far as it was kept; called once, its `outcome` grows afterwards."""

    def sampled(self, token: Sampled) -> bool:
        """Take the next token; return whether the answer ends with it."""

    def window_full(self) -> None:
        """No token comes any more: the window is full, and nothing may be dropped."""


@dataclass(frozen=True)
class ContextCut:
    """What a session's context gives up.

    Attributes:
        token_ids: of the context before, those that were computed.
        ranges: positions in these.
        lineage: of these; None: not named.
    """

    token_ids: Sequence[int]
    ranges: Sequence[Range]
    lineage: Lineage | None = None

    @property
    def token_bytes(self) -> bytes:
        """The tokens as kvd takes them."""
        return as_token_bytes(self.token_ids)

    @property
    def lineage_after(self) -> Lineage | None:
        """Of what is left; `ranges` are merged."""
        return None if self.lineage is None else self.lineage.after(self.token_bytes, self.ranges)


@dataclass(eq=False)
class Load:
    """A load under way, from its request's admission to the last token.

    Attributes:
        begun: to be copied from the store; None: nothing, as far as is known.
        gate: of the sequence's KV, once it is known that KV is to be copied to it.
        source: a resident's KV, to be copied; None: none is.
        held: the hold on that KV's memory, until the load is over: its session may be deleted.
    """

    admission: Admission
    begun: BegunLoad | None = None
    gate: LayerGate | None = None
    source: SequenceKv | None = None
    held: ExitStack = field(default_factory=ExitStack)


@dataclass(eq=False, kw_only=True)
class EngineRequest(Request):
    """A request as the engine computes it.

    Attributes:
        is_final: the session ends with this turn.
        done: set when the answer is complete; its exception is why there is none.
        load_policy: None: the engine's.
        truncate: given the context whose window is full, returns what is to be dropped of it: ()
            ends the answer. None: the answer never fills its window.
        scores: attention of its tokens, for compression.
        input_tokens: how many of the prompt's tokens are the turn's own.
        discards: what `truncate` made it drop, in order.
        to_drop: what it is about to.
        kv: from the start of loading until it is released or becomes a resident.
        write_buffer: of this admission; None if nothing is saved.
        saves: stores the write buffer.
        load: that of its last admission, while it uses the memory, or is about to give some.
        in_batch: set when its first step is planned.
        is_kept: its answer was accepted; the save releases it.
        num_failed_loads: that failed after they were announced.
        context: of the task that made it: what is done for it elsewhere belongs to its trace, and
            is logged with its session.
    """

    sampler: Sampler
    sink: TurnSink
    is_final: bool = False
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
    context: Context = field(default_factory=copy_context)
    _token_bytes: bytearray = field(default_factory=bytearray)

    def token_bytes(self, num_tokens: int) -> bytes:
        """Return the first tokens as kvd takes them: little-endian uint32."""
        known = len(self._token_bytes) // TOKEN_BYTES
        self._token_bytes += as_token_bytes(self.token_ids[known:])
        return bytes(self._token_bytes[: num_tokens * TOKEN_BYTES])

    def discard(self, ranges: Sequence[Range]) -> None:
        """Drop computed tokens of its context, which has another lineage from now on.

        Args:
            ranges: merged, of what is computed.
        """
        if self.lineage is not None:
            computed = self.token_bytes(self.computed_tokens)
            self.lineage = self.lineage.after(computed, ranges)
        if self.scores is not None:
            self.scores.discard(ranges)
        self._token_bytes.clear()
        super().discard(ranges)

    def detach(self) -> None:
        """Forget the memory, which goes its own way; it waits for another admission."""
        self.kv = self.write_buffer = self.saves = None
        self.in_batch.clear()

    def end(self, error: Exception | None = None) -> None:
        """Wake who waits for the answer, if somebody still does."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def as_token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as kvd takes them: little-endian uint32."""
    return np.asarray(token_ids, dtype="<u4").tobytes()
