"""What the engine asks of a store of sessions, and the store that keeps nothing.

A load has two halves: `begin` finds out how many tokens there are, `finish` copies them layer by
layer behind a gate, while a step may follow on its heels. Nothing here raises because of the store:
the turn is recomputed, or not saved, and that is counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from inference_svc.core.discards import Range
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.runtime.kv.copy_stream import StepClock
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from shared.kvd_client.grants import LoadGrant
from shared.types.block_key import TOKEN_BYTES
from shared.types.lineage import Lineage
from shared.types.queue_feed import QueueFeed
from shared.types.session_key import SessionKey

StoreState = Literal["attached", "detached", "off"]


@dataclass(eq=False)
class LoadRequest:
    """What is to be loaded, and where it goes.

    Attributes:
        token_ids: little-endian uint32: all that may be loaded, from the first token on.
        kv: empty; belongs to the load until it is over.
        may_wait: take what kvd is still reading, too.
        lineage: of the tokens: which discards they come after; None: not named.
    """

    key: SessionKey
    token_ids: bytes
    kv: SequenceKv
    policy: LoadPolicy
    may_wait: bool = True
    lineage: Lineage | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens are asked for."""
        return len(self.token_ids) // TOKEN_BYTES


@dataclass(eq=False)
class BegunLoad:
    """A load whose extent is known.

    Attributes:
        end_token: the sequence's KV is going to hold tokens [0, end_token).
        tail_from: where the last block begins if it is partial, else end_token: the first token
            whose position-free KV the next store needs.
        tier_tokens: of these tokens, by the tier where kvd had them.
        reason: slug, why it is not more; "" if all that was asked for is there.
        grant: the last one, not copied yet; None: nothing is left to copy.
        began_s: monotonic time.
    """

    end_token: int = 0
    tail_from: int = 0
    tier_tokens: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    grant: LoadGrant | None = None
    began_s: float = 0.0


class SessionLoads(Protocol):
    """How the engine loads from a store: `begin`, then `finish` or `cancel`."""

    async def begin(self, request: LoadRequest) -> BegunLoad:
        """Find out how much of a session is stored."""

    async def finish(
        self,
        begun: BegunLoad,
        kv: SequenceKv,
        tail: WriteBuffer | None,
        gate: LayerGate,
        layers: range,
    ) -> None:
        """Copy these layers; after the last one confirm the gate, or fail it."""

    async def cancel(self, begun: BegunLoad) -> None:
        """End a load that nobody waits for any more."""


class SessionStore(Protocol):
    """What the engine needs of a store."""

    @property
    def state(self) -> StoreState:
        """For people."""

    @property
    def saves(self) -> bool:
        """Whether position-free KV is wanted at all."""

    @property
    def loads(self) -> SessionLoads:
        """What is stored is loaded by these."""

    async def save(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None = None,
        lineage: Lineage | None = None,
    ) -> str | None:
        """Store the buffer's KV of token_ids[from_token:], which are of the lineage.

        With a clock it is still being computed: a layer's KV is read once the clock lets it pass,
        nothing is published before it is confirmed, nor does this return. Returns why not all of
        them are stored, "" if they are, None if it failed.
        """

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """Drop merged ranges of a session's tokens; the others keep their KV.

        If the store cannot be told, it has nothing of the tokens that are left, or only what it
        knows to have been computed as they were: a later load misses the rest.

        Args:
            key: whose.
            token_ids: before the discard.
            ranges: positions in these.
            lineage: of these.
        """

    async def end_session(self, key: SessionKey) -> None:
        """Say that the session will not come back."""

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """Drop the KV of a deleted session that was these tokens."""

    def follow_queue(self, feed: QueueFeed) -> None:
        """Be told from now on which turns wait, in which order, and which run."""


class NoSessionLoads:
    """Loads where nothing is stored."""

    async def begin(self, request: LoadRequest) -> BegunLoad:
        """Nothing is stored."""
        del request
        return BegunLoad(reason="mode_recompute")

    async def finish(
        self,
        begun: BegunLoad,
        kv: SequenceKv,
        tail: WriteBuffer | None,
        gate: LayerGate,
        layers: range,
    ) -> None:
        """Never called: there is no load."""
        del begun, kv, tail, gate, layers
        raise AssertionError("nothing was begun")

    async def cancel(self, begun: BegunLoad) -> None:
        """There is nothing to end."""


class NoSessionStore:
    """The store of `--mode recompute`: nothing is kept."""

    state: StoreState = "off"
    saves = False
    loads = NoSessionLoads()

    async def save(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None = None,
        lineage: Lineage | None = None,
    ) -> str | None:
        """Never called: there are no write buffers."""
        del key, token_ids, from_token, buffer, clock, lineage
        raise AssertionError("nothing is saved")

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """Nothing is stored."""

    async def end_session(self, key: SessionKey) -> None:
        """Nobody to tell."""

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """Nothing to drop."""

    def follow_queue(self, feed: QueueFeed) -> None:
        """Nobody to tell."""
