"""CacheEngine: the one entrance to the cache of one layout.

Owns nothing itself: it hands calls to the parts (loading, storing, writing, placement, retention,
discarding, inspection) that share one CacheState. Must not know: clocks, files, sockets, tasks.
Time enters as `now_ns`, effects leave through `drain`, completions come back as calls.

Invariants (checking.py holds them as code):
1. what a load answers is the KV of exactly the tokens asked for, or less of it, never other bytes;
2. bytes are visible only after `complete_store(success=True)`, and never change afterwards;
3. a leased slot is given to nobody else; a lease ends by its completion or with its owner;
4. what remains of a session is a prefix; evicting never breaks it in the middle;
5. after every call the rows emitted so far restore to a usable cache: rows of blocks follow their
   data, sessions are cut to what exists.

Calls that name an owner are made only between its attach and `owner_gone`.

*Source:* sessions as the unit of placement: CachedAttention §3.3; the sans-I/O shape: aioquic.
"""

from collections.abc import Callable, Iterable, Sequence

from kvd.core import checking, discarding, inspection, restoring, retention
from kvd.core.actions import OWNER_GONE, Action, IoOutcome
from kvd.core.eviction import EvictionPolicy, LruPolicy
from kvd.core.leases import LoadLease
from kvd.core.loading import Loader
from kvd.core.outbox import COUNTERS
from kvd.core.placement import Placement
from kvd.core.records import (
    BlockRecord,
    EngineStats,
    FlushAnswer,
    LeaseState,
    LoadAnswer,
    QueuedJob,
    SessionDetail,
    SessionInfo,
    SessionPage,
    SessionRecord,
    StoreAnswer,
)
from kvd.core.state import CacheState, Limits
from kvd.core.storing import Storer
from kvd.core.writing import Writer
from shared.kv_layout import KVLayout
from shared.session_key import SessionKey

__all__ = ["COUNTERS", "CacheEngine", "Limits"]


class CacheEngine:
    """See the module docstring.

    Args:
        layout: what a block looks like; all sessions here have its model.
        limits: bounds of everything that grows.
        salt_of: the persisted secret salt of a tenant, SALT_BYTES long.
        policy: ranks sessions for eviction; it must be new. None is LRU.
    """

    def __init__(
        self,
        layout: KVLayout,
        limits: Limits,
        salt_of: Callable[[str], bytes],
        policy: EvictionPolicy | None = None,
    ) -> None:
        self._state = CacheState(layout, limits, salt_of, policy or LruPolicy())
        placement = Placement(self._state)
        self._writer = Writer(self._state, placement)
        self._loader = Loader(self._state, placement)
        self._storer = Storer(self._state, placement, self._writer)

    @property
    def layout(self) -> KVLayout:
        """The layout of all blocks here."""
        return self._state.layout

    # ---------------------------------------------------------------------------------------- life

    def restore(
        self, sessions: Iterable[SessionRecord], blocks: Iterable[BlockRecord], now_ns: int
    ) -> None:
        """Start from the rows that recovery found; once, before anything else.

        Sessions are cut to the prefix whose blocks exist; rows that nothing needs are removed.
        """
        self._state.advance(now_ns)
        restoring.restore(self._state, sessions, blocks)

    def drain(self) -> list[Action]:
        """Hand out every action since the last drain, in order. Each is to be carried out."""
        return self._state.outbox.drain(self._state.sessions)

    def expire(self, now_ns: int) -> None:
        """Do what is due: expire sessions (a bounded number), try held-back SSD writes again."""
        self._state.advance(now_ns)
        retention.expire(self._state)
        self._writer.issue()

    def next_deadline_ns(self) -> int | None:
        """When to call `expire`; may be in the past (at once). None: not before another call."""
        deadlines = (self._state.ttl.next_deadline_ns(), self._writer.retry_at_ns())
        return min((d for d in deadlines if d is not None), default=None)

    def check(self) -> None:
        """Raise AssertionError on any broken invariant; O(everything)."""
        checking.check(self._state)

    # ---------------------------------------------------------------------------------------- load

    def prepare_load(
        self, key: SessionKey, token_ids: bytes, from_token: int, owner: int, now_ns: int
    ) -> LoadAnswer:
        """Lease the stored KV of token_ids[from_token:], as far as slots can be had for it.

        Unless it is a MISS the caller owes `complete_load`; when PENDING first `settle_load`, after
        LeaseReady.

        Raises:
            InvalidRequestError: token ids or position that cannot be.
            TooManyLeasesError: at the bound.
        """
        self._state.advance(now_ns)
        return self._loader.prepare(key, token_ids, from_token, owner)

    def lease_state(self, lease_id: int) -> LeaseState:
        """Say whether a load lease may be settled."""
        return self._loader.state_of(lease_id)

    def settle_load(self, lease_id: int) -> LoadAnswer:
        """Answer a PENDING load: HIT with the spans that arrived, up to the first that did not.

        Called before LeaseReady (at a deadline), it gives up on the reads still under way. On MISS
        nothing is owed.

        Raises:
            LeaseLostError: if the owner is gone.
        """
        return self._loader.settle(lease_id)

    def complete_load(self, lease_id: int, owner: int, now_ns: int) -> None:
        """End a load lease, settled or not.

        Raises:
            LeaseLostError: if it is not the owner's (any more): what was loaded must not be
                trusted.
        """
        self._state.advance(now_ns)
        self._counting_losses(lease_id, owner)
        self._loader.complete(lease_id, owner)

    # --------------------------------------------------------------------------------------- store

    def prepare_store(
        self, key: SessionKey, token_ids: bytes, from_token: int, owner: int, now_ns: int
    ) -> StoreAnswer:
        """Lease slots for the KV of token_ids[from_token:] that is not stored, as far as possible.

        When all of it is stored already the session adopts it at once, and there is no lease.

        Raises:
            InvalidRequestError: token ids or position that cannot be.
            TooManyLeasesError: at the bound.
        """
        self._state.advance(now_ns)
        return self._storer.prepare(key, token_ids, from_token, owner)

    def complete_store(self, lease_id: int, owner: int, success: bool, now_ns: int) -> int:
        """Publish what a store lease's slots hold (or forget it), and have it written to SSD.

        Returns:
            Stored tokens of the session.

        Raises:
            LeaseLostError: if it is not the owner's (any more).
        """
        self._state.advance(now_ns)
        self._counting_losses(lease_id, owner)
        return self._storer.complete(lease_id, owner, success=success)

    # ------------------------------------------------------------------------------------ sessions

    def discard(
        self, key: SessionKey, token_ids: bytes, ranges: Sequence[tuple[int, int]], now_ns: int
    ) -> int:
        """Drop token ranges of a session whose tokens are `token_ids`; metadata only.

        Returns:
            Stored tokens that remain, contiguous from the first kept one.

        Raises:
            InvalidRequestError: ranges that are empty or outside the tokens.
        """
        self._state.advance(now_ns)
        return discarding.discard(self._state, key, token_ids, ranges)

    def end_session(self, key: SessionKey, now_ns: int) -> bool:
        """Note that the session will not come back; returns whether it is stored."""
        self._state.advance(now_ns)
        return retention.end_session(self._state, key)

    def pin(self, key: SessionKey, now_ns: int) -> None:
        """Protect a session from eviction and expiry; raises UnknownSessionError."""
        self._state.advance(now_ns)
        retention.pin(self._state, key)

    def unpin(self, key: SessionKey, now_ns: int) -> None:
        """End a pin; raises UnknownSessionError."""
        self._state.advance(now_ns)
        retention.unpin(self._state, key)

    def set_ttl(self, key: SessionKey, ttl_ns: int | None, now_ns: int) -> SessionInfo:
        """Set a TTL (None: the default; TTL_NEVER_NS: never); raises UnknownSessionError."""
        self._state.advance(now_ns)
        retention.set_ttl(self._state, key, ttl_ns)
        return inspection.describe_info(self._state, self._state.sessions[key])

    def flush(self, key: SessionKey | None, dry_run: bool, now_ns: int) -> FlushAnswer:
        """Drop one session, or all (None), except leased ones, from every tier.

        Raises:
            UnknownSessionError: if the one named is not stored.
        """
        self._state.advance(now_ns)
        return retention.flush(self._state, key, dry_run=dry_run)

    # --------------------------------------------------------------------------------------- peers

    def owner_gone(self, owner: int, now_ns: int) -> None:
        """Release everything an engine holds: it is dead and will not touch its slots."""
        self._state.advance(now_ns)
        leases = self._state.leases.of_owner(owner)
        for lease in leases:
            if isinstance(lease, LoadLease):
                self._loader.release(lease)
            else:
                self._storer.release(lease)
        self._state.queue.replace(owner, ())
        self._state.outbox.emit(OWNER_GONE, None, {"owner": owner, "num_leases": len(leases)})

    def confirm_leases(
        self, owner: int, lease_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split lease ids into those the owner still holds and those it has lost."""
        held = {lease.lease_id for lease in self._state.leases.of_owner(owner)}
        confirmed = tuple(lease_id for lease_id in lease_ids if lease_id in held)
        return confirmed, tuple(lease_id for lease_id in lease_ids if lease_id not in held)

    def push_queue(self, owner: int, jobs: Sequence[QueuedJob], now_ns: int) -> None:
        """Take the newest snapshot of an engine's waiting queue."""
        self._state.advance(now_ns)
        self._state.queue.replace(owner, jobs)

    def num_queued(self, owner: int) -> int:
        """Jobs in an engine's newest queue snapshot."""
        return len(self._state.queue.jobs(owner))

    # --------------------------------------------------------------------------------- completions

    def read_done(self, op_id: int, outcome: IoOutcome, now_ns: int) -> None:
        """Take the outcome of a ReadBlock."""
        self._state.advance(now_ns)
        self._loader.read_done(op_id, outcome)

    def write_done(
        self, op_id: int, outcome: IoOutcome, checksums: tuple[int, ...], now_ns: int
    ) -> None:
        """Take the outcome of a WriteBlock; checksums of each layer slice, () on failure."""
        self._state.advance(now_ns)
        self._writer.write_done(op_id, outcome, checksums)

    def drop_done(self, op_id: int, now_ns: int) -> None:
        """Take the commit of a DropBlock."""
        self._state.advance(now_ns)
        self._writer.drop_done(op_id)

    # ------------------------------------------------------------------------------------- looking

    def session_info(self, key: SessionKey) -> SessionInfo | None:
        """Sum up a session; None if it is not stored."""
        session = self._state.sessions.get(key)
        return inspection.describe_info(self._state, session) if session else None

    def sessions(self, tenant: str, after: str, limit: int) -> SessionPage:
        """List a page of sessions, least recently used first; tenant "" lists all; O(sessions)."""
        return inspection.list_sessions(self._state, tenant, after, limit)

    def describe(self, key: SessionKey) -> SessionDetail:
        """Everything about one session; raises UnknownSessionError."""
        return inspection.describe(self._state, retention.find_session(self._state, key))

    def stats(self) -> EngineStats:
        """Fill and counters; O(1)."""
        return inspection.stats(self._state)

    def _counting_losses(self, lease_id: int, owner: int) -> None:
        lease = self._state.leases.get(lease_id)
        if lease is None or lease.owner != owner:
            self._state.outbox.count("leases_lost")
