"""The store of sessions' KV as the engine uses it, and the one that keeps nothing.

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
from inference_svc.core.retention import Retention
from inference_svc.runtime.kv.layer_gate import LayerGate, StepClock
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from shared.kvd_client.grants import LoadGrant
from shared.types.block_key import TOKEN_BYTES
from shared.types.graft_source import GraftSource
from shared.types.lineage import Lineage
from shared.types.load_choice import IDLE, Traffic
from shared.types.queue_feed import QueueFeed
from shared.types.session_key import SessionKey

StoreState = Literal["attached", "detached", "off"]


@dataclass(eq=False)
class LoadRequest:
    """What is to be loaded, and where it goes.

    Attributes:
        key: the session's key.
        token_ids: all tokens that may be loaded, from the first one on; little-endian uint32.
        kv: the empty KV to load into; belongs to the load until that is over.
        policy: whether loading must pay against computing.
        may_wait: whether to accept blocks that kvd is still reading.
        lineage: the tokens' lineage: which discards they come after; None: not named.
        traffic: what else the engine has to do, for the policy.
        history_tokens: how many of the tokens the session had before its turn: so many may be
            stored elsewhere if they are not here.
    """

    key: SessionKey
    token_ids: bytes
    kv: SequenceKv
    policy: LoadPolicy
    may_wait: bool = True
    lineage: Lineage | None = None
    traffic: Traffic = IDLE
    history_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that may be loaded."""
        return len(self.token_ids) // TOKEN_BYTES


@dataclass(eq=False)
class BegunLoad:
    """A load whose extent is known.

    Attributes:
        end_token: the sequence's KV is going to hold tokens [0, end_token).
        tail_from: first token of the last block if that is partial, else end_token: the first token
            whose position-free KV the next store needs.
        window_from: first token of which layers with a window will have KV.
        tier_tokens: how many of the tokens kvd had in each tier.
        reason: slug, why it is not more; "" if all requested tokens are there.
        grant: the last grant, not copied yet; None: nothing is left to copy.
        began_s: monotonic time when the load began, in seconds; later by the time for which its
            session was fetched from elsewhere.
    """

    end_token: int = 0
    tail_from: int = 0
    window_from: int = 0
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
    """A store of sessions' KV, as the engine uses it."""

    @property
    def state(self) -> StoreState:
        """Whether kvd is attached; "off" if nothing is stored."""

    @property
    def saves(self) -> bool:
        """Whether KV is stored at all: else nobody needs write buffers."""

    @property
    def loads(self) -> SessionLoads:
        """The loads from this store."""

    async def save(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        buffer: WriteBuffer,
        clock: StepClock | None = None,
        lineage: Lineage | None = None,
    ) -> str | None:
        """Store the buffer's KV of tokens from `from_token` on.

        Args:
            key: the session's key.
            token_ids: its tokens from the first one on, little-endian uint32.
            from_token: the first token to store; those before it are stored.
            buffer: the write buffer with the tokens' KV.
            clock: the clock of the step that still computes it: a layer's KV is read once the clock
                lets it pass; nothing is published before the clock is confirmed, nor does this
                return. None: all KV is there.
            lineage: the tokens' lineage; None: not named.

        Returns:
            A slug that says why not all of them are stored; "" if they are, None if it failed.
        """

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """Drop merged ranges of a session's tokens; the others keep their KV.

        If the store cannot be notified, it has nothing of the tokens that are left, or only KV
        whose lineage says that it was computed as theirs was: a later load misses the rest.

        Args:
            key: the session's key.
            token_ids: its tokens before the discard, little-endian uint32.
            ranges: positions in `token_ids`.
            lineage: the lineage of `token_ids`; None: not named.
        """

    @property
    def offers_grafts(self) -> bool:
        """Whether `graft` may give anything now."""

    async def graft(
        self, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
    ) -> int:
        """Have KV of another session's tokens follow a session's own; nothing is copied.

        Args:
            key: the session's key.
            token_ids: all its tokens that are stored, little-endian uint32.
            lineage: their lineage.
            source: what is to follow.

        Returns:
            How many tokens follow; 0 if the store cannot do it.
        """

    async def retain(self, key: SessionKey, retention: Retention, prefix: bytes) -> None:
        """Report for how long a session, and what it begins with, are to be kept at least.

        Args:
            key: the session's key.
            retention: its client's wish.
            prefix: its first tokens that other sessions begin with, too; little-endian uint32.
        """

    async def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> None:
        """Report what is likely to become of a session once its turn is stored: a hint.

        Args:
            key: the session's key.
            tools: names of tools that its last answer calls: it is back when they have answered.
            superseded: whether another session goes on in its place.
        """

    async def end_session(self, key: SessionKey) -> None:
        """Report that the session takes no further turn."""

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """Drop the KV of a deleted session's tokens (little-endian uint32)."""

    def follow_queue(self, feed: QueueFeed) -> None:
        """Receive from now on which turns wait, in which order, and which run."""


class NoSessionLoads:
    """Loads where nothing is stored."""

    async def begin(self, request: LoadRequest) -> BegunLoad:
        """Return a load of no tokens."""
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
        """Refuse: there is no load to finish."""
        del begun, kv, tail, gate, layers
        raise AssertionError("nothing was begun")

    async def cancel(self, begun: BegunLoad) -> None:
        """Do nothing: no load was begun."""


class NoSessionStore:
    """The store of `--mode recompute`: nothing is kept."""

    state: StoreState = "off"
    saves = False
    offers_grafts = False
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
        """Refuse: there are no write buffers to save."""
        del key, token_ids, from_token, buffer, clock, lineage
        raise AssertionError("nothing is saved")

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """Do nothing: nothing is stored."""

    async def graft(
        self, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
    ) -> int:
        """Give nothing: nothing is stored."""
        del key, token_ids, lineage, source
        return 0

    async def retain(self, key: SessionKey, retention: Retention, prefix: bytes) -> None:
        """Do nothing: nothing is stored of the session."""

    async def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> None:
        """Do nothing: nothing is stored of the session."""

    async def end_session(self, key: SessionKey) -> None:
        """Do nothing: nothing is stored of the session."""

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """Do nothing: nothing is stored."""

    def follow_queue(self, feed: QueueFeed) -> None:
        """Do nothing: nobody prefetches."""
