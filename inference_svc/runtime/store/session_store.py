"""The interface of a store of sessions' KV, and the store that keeps nothing.

A load has two halves: `begin` finds out how many tokens there are; `finish` copies them layer by
layer behind a gate, while a step may already compute the layers that have arrived. No method raises
because the store fails: the turn is recomputed, or not saved, and that is counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from inference_svc.core.ranges import Range
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
    """The tokens to load, and the KV to load them into.

    Attributes:
        key: the session's key.
        token_ids: all tokens that may be loaded, from the first one on; little-endian uint32.
        kv: the empty KV to load into; it belongs to the load until that is over.
        policy: whether loading must pay against computing.
        may_wait: whether to accept blocks that kvd is still reading.
        lineage: the tokens' lineage: the discards that they come after; None: not known.
        traffic: the engine's other work, for the policy.
        history_tokens: number of tokens that the session had before its turn; a remote store may
            have these if kvd has not.
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
    """A load that was begun: how many tokens it brings, and what is left to copy.

    Attributes:
        end_token: the sequence's KV is going to hold tokens [0, end_token).
        tail_from: first token of the last block if that is partial, else `end_token`: the first
            token whose pre-RoPE keys the next store needs.
        window_from: first token of which layers with a window will have KV.
        tier_tokens: how many of the tokens kvd had in each tier.
        reason: slug that says why it is not more; "" if all requested tokens are there.
        grant: the last grant, not copied yet; None: nothing is left to copy.
        began_s: monotonic time when the load began, in seconds, plus the time for which kvd
            fetched the session from a remote store.
    """

    end_token: int = 0
    tail_from: int = 0
    window_from: int = 0
    tier_tokens: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    grant: LoadGrant | None = None
    began_s: float = 0.0


class SessionLoads(Protocol):
    """The loads from a store: each is begun, then finished or cancelled."""

    async def begin(self, request: LoadRequest) -> BegunLoad:
        """Find out how much of a session is stored; the caller owes `finish` or `cancel`."""

    async def finish(
        self,
        begun: BegunLoad,
        kv: SequenceKv,
        tail: WriteBuffer | None,
        gate: LayerGate,
        layers: range,
    ) -> None:
        """Copy layers of a load to its KV; after the last layer confirm the gate, or fail it.

        Args:
            begun: the load, which has a grant.
            kv: the KV that the load was begun for.
            tail: the write buffer that keeps the pre-RoPE keys of a partial last block; None:
                nothing is saved.
            gate: opened layer by layer.
            layers: the layers to copy; the next call continues behind them.
        """

    async def cancel(self, begun: BegunLoad) -> None:
        """End a load that is not going to be finished; its lease is given back."""


class SessionStore(Protocol):
    """A store of sessions' KV, as the engine uses it."""

    @property
    def state(self) -> StoreState:
        """Whether kvd is attached; "off" if nothing is stored."""

    @property
    def saves(self) -> bool:
        """Whether KV is stored at all; if not, no write buffers are needed."""

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
            clock: the clock of the step that still computes the KV. A layer is read once the clock
                has opened for it; blocks are published, and this returns, only when the clock is
                confirmed. None: all KV is there.
            lineage: the tokens' lineage; None: not known.

        Returns:
            A slug that says why not all of them are stored; "" if they are, None if the save
            failed.
        """

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[Range],
        lineage: Lineage | None = None,
    ) -> None:
        """Drop merged ranges of a session's tokens; the others keep their KV.

        If the store cannot be notified, later loads stay correct: they match only KV of the same
        tokens and lineage, and miss all other tokens.

        Args:
            key: the session's key.
            token_ids: its tokens before the discard, little-endian uint32.
            ranges: positions in `token_ids`.
            lineage: the lineage of `token_ids`; None: not known.
        """

    @property
    def offers_grafts(self) -> bool:
        """Whether the store can graft now."""

    async def graft(
        self, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
    ) -> int:
        """Append KV of another session's tokens to a session's own; no KV is copied.

        Args:
            key: the session's key.
            token_ids: all its tokens that are stored, little-endian uint32.
            lineage: their lineage.
            source: the tokens of the other session to append.

        Returns:
            How many tokens were appended; 0 if the store cannot do it.
        """

    async def retain(self, key: SessionKey, retention: Retention, prefix: bytes) -> None:
        """Report for how long a session and its prefix are to be kept at least.

        Args:
            key: the session's key.
            retention: the retention that its client asks for.
            prefix: its first tokens, with which other sessions begin, too; little-endian uint32.
        """

    async def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> None:
        """Report how soon a session is likely to return, once its turn is stored: a hint.

        Args:
            key: the session's key.
            tools: names of tools that its last answer calls; it returns when they have answered.
            superseded: whether another session continues the conversation in its place.
        """

    async def end_session(self, key: SessionKey) -> None:
        """Report that the session takes no further turn."""

    async def forget(self, key: SessionKey, token_ids: bytes) -> None:
        """Drop the KV of a deleted session's tokens (little-endian uint32)."""

    def follow_queue(self, feed: QueueFeed) -> None:
        """Receive the queue's changes from now on: which turns wait, in which order, which run."""


class NoSessionLoads:
    """Loads from the store that keeps nothing."""

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
        """Graft nothing: nothing is stored."""
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
        """Do nothing: there is nothing to prefetch."""
