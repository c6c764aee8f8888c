"""CacheEngine: the one entrance to the cache of one layout.

Owns nothing itself: it hands calls to the parts (loading, storing, writing, placement, retention,
discarding, inspection) that share one CacheState. What no engine asks for, scrubs, erasing and
session files, are parts of their own, to be called directly. Must not know: clocks, files, sockets,
tasks. Time enters as `now_ns`, effects leave through `drain`, completions come back as calls.

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

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvd.core.eviction.policies import LruPolicy
from kvd.core.eviction.policy import PolicyMaker
from kvd.core.inspection import descriptions, session_filter
from kvd.core.inspection.session_filter import SessionFilter, SessionOrder
from kvd.core.io.placement import Placement
from kvd.core.io.prefetching import Prefetcher
from kvd.core.io.reading import Reader
from kvd.core.io.verifying import Hasher, Verifier
from kvd.core.io.writing import Writer
from kvd.core.operations import checking, discarding, retention
from kvd.core.operations.compacting import Compactor
from kvd.core.operations.erasing import Eraser
from kvd.core.operations.loading import BUSY, Loader
from kvd.core.operations.matching import num_tokens_of
from kvd.core.operations.peers import Peers
from kvd.core.operations.relimiting import Relimiter
from kvd.core.operations.scrubbing import Scrubber
from kvd.core.operations.session_files import SessionFiles
from kvd.core.operations.storing import Storer
from kvd.core.records.actions import Action, IoOutcome
from kvd.core.records.records import (
    EngineStats,
    FlushAnswer,
    LeaseInfo,
    LeaseState,
    LoadAnswer,
    Lookup,
    QueueStats,
    SessionDetail,
    SessionInfo,
    StoreAnswer,
    TenantUsage,
)
from kvd.core.records.rows import AdoptedSlot, IndexRows, OrphanSlot, Pin, StoredBlock
from kvd.core.recovery import adopting, restoring
from kvd.core.state.cache_state import CacheState
from kvd.core.state.index_line import NO_BOUND, IndexAction
from kvd.core.state.leases import RestoredLease, StoreLease
from kvd.core.state.limits import Limits
from kvd.core.state.outbox import COUNTERS, Measures
from kvd.core.state.session_history import Move
from kvd.core.state.turn_log import RecordedTurn
from shared.types.kv_layout import KVLayout
from shared.types.lineage import Lineage
from shared.types.queue_change import QueueChange
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

__all__ = ["COUNTERS", "CacheEngine", "Limits"]


class CacheEngine:
    """See the module docstring.

    Args:
        layout: what a block looks like; all sessions here have its model.
        limits: bounds of everything that grows.
        salt_of: the persisted secret salt of a tenant, SALT_BYTES long.
        make_policy: builds what ranks sessions for eviction.

    Attributes:
        scrubs: comparing every copy with what was stored.
        erasing: dropping tenants without a trace.
        session_files: sessions on their way into files, and out of them.
    """

    def __init__(
        self,
        layout: KVLayout,
        limits: Limits,
        salt_of: Callable[[str], bytes],
        make_policy: PolicyMaker = LruPolicy,
    ) -> None:
        self._state = CacheState(layout, limits, salt_of, make_policy)
        placement = Placement(self._state)
        self._writer = Writer(self._state, placement)
        self._hasher = Hasher(self._state, self._writer)
        self._verifier = Verifier(self._state)
        self._reader = Reader(self._state)
        self._loader = Loader(self._state, self._reader, self._writer, self._verifier)
        self._prefetcher = Prefetcher(self._state, placement, self._writer, self._reader)
        self._storer = Storer(self._state, placement, self._writer, self._hasher)
        self._compactor = Compactor(self._state, placement, self._writer, self._verifier)
        self._relimiter = Relimiter(self._state, placement, self._writer)
        self._peers = Peers(self._state, self._loader, self._storer)
        self.scrubs = Scrubber(self._state, self._loader, self._writer)
        self.erasing = Eraser(self._state, self._loader, self._storer)
        self.session_files = SessionFiles(self._state, self._loader, self._storer, self.erasing)

    @property
    def layout(self) -> KVLayout:
        """The layout of all blocks here."""
        return self._state.layout

    # ---------------------------------------------------------------------------------------- life

    def restore(
        self,
        rows: IndexRows,
        adopted: Sequence[AdoptedSlot],
        orphans: Sequence[OrphanSlot],
        first_lease_id: int,
        now_ns: int,
    ) -> None:
        """Start from what the index and the journal of the arena say; once, before anything else.

        Sessions are cut to the prefix whose blocks exist; rows and slots that nothing needs are
        removed. Adopted blocks are verified before their first use. Orphans' slots stay their
        engines': each owner is to be named in `reattach` or `owner_gone`.

        Args:
            rows: all rows of this layout.
            adopted: slots that hold a block.
            orphans: slots that engines may still be writing to.
            first_lease_id: above every lease id that an earlier kvd has granted in this arena.
            now_ns: time.
        """
        self._state.advance(now_ns)
        adopting.adopt(self._state, adopted, orphans, first_lease_id)
        restoring.restore(self._state, rows)
        adopting.settle(self._state)
        self._verifier.issue()

    def add_slots(self, num_slots: int, first_lease_id: int) -> None:
        """Take an arena in; there is none. Leases on it are numbered from `first_lease_id` on."""
        self._state.slots.add(num_slots)
        self._state.leases.start_at(first_lease_id)
        self._prefetcher.queue_changed()

    def release_dram(self, now_ns: int) -> bool:
        """Empty the arena as far as possible, writing what is dirty; call again on SpaceFreed.

        Returns:
            Whether no slot is in use: then `drop_slots`.
        """
        self._state.advance(now_ns)
        num_slots = len(self._state.slots)
        self._state.outbox.want_wake()
        self._prefetcher.stop()
        self._compactor.stop()
        return self._writer.make_slots(num_slots) == num_slots

    def drop_slots(self) -> None:
        """Give the arena up; no slot is in use."""
        self._state.slots.drop()

    def set_ssd_capacity(self, num_extents: int, now_ns: int) -> None:
        """Allow that many extents on SSD from now on; the coldest sessions make up for less."""
        self._state.advance(now_ns)
        self._writer.set_capacity(num_extents)

    def set_limits(self, limits: Limits, now_ns: int) -> None:
        """Hold other limits from now on; `num_slots` and `num_extents` are not looked at.

        What they ask of sessions that are stored already comes in time, by `expire`.
        """
        self._state.advance(now_ns)
        self._relimiter.change(limits)
        self._prefetcher.look_again()

    def write_dirty(self, now_ns: int) -> None:
        """Write every dirty block now or as soon as it can be, whatever the policy; O(blocks).

        The end is near: what is dirty from now on is not left to rest either.
        """
        self._state.advance(now_ns)
        self._prefetcher.stop(for_good=True)
        self._compactor.stop(for_good=True)
        self._writer.write_all()

    def drain(self, max_row_bytes: int = NO_BOUND) -> list[Action]:
        """Hand out every action since the last drain, in order. Each is to be carried out.

        Of the rows of the index only so many bytes, or a little more; see `num_rows_waiting`.
        """
        self._prefetcher.go_on()
        self._compactor.go_on()
        self._state.tails.pack_idle()
        rows = self.take_rows(max_row_bytes)
        self._writer.index_took_rows()
        return [*rows, *self._state.outbox.drain()]

    def take_rows(self, max_bytes: int = NO_BOUND) -> Sequence[IndexAction]:
        """Hand out what the index is to be told next, as `drain` does, and nothing else."""
        return self._state.outbox.index.take(self._state.sessions, max_bytes)

    @property
    def num_rows_waiting(self) -> tuple[int, int]:
        """Rows that are to be handed out yet, and uses of sessions of which nothing else is."""
        return len(self._state.outbox.index), self._state.outbox.index.num_uses

    @property
    def num_blocks_waiting(self) -> int:
        """Blocks on SSD among these rows."""
        return self._state.outbox.index.num_blocks

    def expire(self, now_ns: int) -> None:
        """Do what is due, a bounded amount: expiries, write-backs, what is to be tried again."""
        self._state.advance(now_ns)
        self._relimiter.go_on()
        retention.expire(self._state)
        self._writer.write_back()
        self._verifier.issue()
        self._compactor.look()
        self._prefetcher.go_on()

    def next_deadline_ns(self) -> int | None:
        """When to call `expire`; may be in the past (at once). None: not before another call."""
        deadlines = (
            self._relimiter.next_deadline_ns(),
            self._state.ttl.next_deadline_ns(),
            self._writer.next_deadline_ns(),
            self._verifier.retry_at_ns(),
            self._prefetcher.next_deadline_ns(),
            self._compactor.next_deadline_ns(),
        )
        return min((d for d in deadlines if d is not None), default=None)

    def check(self) -> None:
        """Raise AssertionError on any broken invariant; O(everything)."""
        checking.check(self._state)
        self._reader.check()

    # ---------------------------------------------------------------------------------------- load

    def prepare_load(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        owner: int,
        now_ns: int,
        *,
        dram_only: bool = False,
        lineage: Lineage | None = None,
    ) -> LoadAnswer:
        """Lease the stored KV of token_ids[from_token:], as far as slots can be had for it.

        Unless it is a MISS the caller owes `complete_load`; when PENDING first `settle_load`, after
        LeaseReady. With `dram_only` only what is in DRAM, up to the first block that is not, and no
        read is begun for it (but if verifying finds a slot corrupt its block is read anew). The
        lineage is that of the tokens: nothing else is matched. None: it is not named; then their
        discards are taken from what is stored.

        Raises:
            InvalidRequestError: token ids or position that cannot be.
            TooManyLeasesError: at the bound.
            ErasingError: the tenant is being erased.
        """
        self.erasing.refuse(key.tenant)
        state = self._state
        state.advance(now_ns)
        is_running = state.placement.queue.is_running(key)
        state.turns.asked(key, num_tokens_of(token_ids), now_ns, is_running=is_running)
        answer = self._loader.prepare(
            key, token_ids, from_token, owner, lineage, dram_only=dram_only
        )
        state.measures.asked(key, state.now_ns)
        self._count_miss(answer)
        return answer

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
        answer = self._loader.settle(lease_id)
        self._count_miss(answer)
        return answer

    def complete_load(self, lease_id: int, owner: int, now_ns: int) -> None:
        """End a load lease, settled or not.

        Raises:
            LeaseLostError: if it is not the owner's (any more): what was loaded must not be
                trusted.
        """
        self._state.advance(now_ns)
        self._counting_losses(lease_id, owner)
        lease = self._state.leases.get(lease_id)
        key = self._loader.complete(lease_id, owner)
        if lease is not None:
            took_s = (self._state.now_ns - lease.since_ns) / NS_PER_S
            self._state.measures.load_s.observe(took_s)
        self._compactor.consider(key)

    # --------------------------------------------------------------------------------------- store

    def prepare_store(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        owner: int,
        now_ns: int,
        *,
        lineage: Lineage | None = None,
    ) -> StoreAnswer:
        """Lease slots for the KV of token_ids[from_token:] that is not stored, as far as possible.

        When all of it is stored already the session adopts it at once, and there is no lease. The
        lineage is that of the tokens: nothing else is matched. None: it is not named; then their
        discards are taken from what is stored.

        Raises:
            InvalidRequestError: token ids or position that cannot be.
            TooManyLeasesError: at the bound.
            ErasingError: the tenant is being erased.
        """
        self.erasing.refuse(key.tenant)
        self._state.advance(now_ns)
        self._state.turns.stored(key, num_tokens_of(token_ids), now_ns)
        return self._storer.prepare(key, token_ids, from_token, owner, lineage)

    def complete_store(self, lease_id: int, owner: int, success: bool, now_ns: int) -> int:
        """Publish what a store lease's slots hold (or forget it), and have it written to SSD.

        Returns:
            Stored tokens of the session.

        Raises:
            LeaseLostError: if it is not the owner's (any more).
        """
        self._state.advance(now_ns)
        self._counting_losses(lease_id, owner)
        lease = self._state.leases.get(lease_id)
        num_tokens = self._storer.complete(lease_id, owner, success=success)
        if isinstance(lease, StoreLease):
            took_s = (self._state.now_ns - lease.since_ns) / NS_PER_S
            self._state.measures.store_s.observe(took_s)
            self._compactor.consider(lease.key)
        return num_tokens

    # ------------------------------------------------------------------------------------ sessions

    def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[tuple[int, int]],
        now_ns: int,
        *,
        lineage: Lineage | None = None,
    ) -> int:
        """Drop token ranges of a session whose tokens are `token_ids`; metadata only.

        All tokens are told, however few of them are stored; the lineage is that of these tokens,
        before the discard. A store that is under way publishes nothing any more. A session that is
        known by its lineage to be after this discard, or of other discards, is left alone.

        Returns:
            Stored tokens of what the discard leaves, contiguous from the first kept one.

        Raises:
            InvalidRequestError: ranges that are empty or outside the tokens.
            ErasingError: the tenant is being erased.
        """
        self.erasing.refuse(key.tenant)
        self._state.advance(now_ns)
        num_kept = discarding.discard(self._state, key, token_ids, ranges, lineage)
        session = self._state.sessions.get(key)
        if session is not None:
            self._state.turns.discarded(key, session.num_tokens)
            self._compactor.consider(key)
        return num_kept

    def end_session(self, key: SessionKey, now_ns: int) -> bool:
        """Note that the session will not come back; returns whether it is stored."""
        self._state.advance(now_ns)
        self._state.turns.ended(key)
        self._prefetcher.look_again()
        return retention.end_session(self._state, key)

    def pin(self, key: SessionKey, pin: Pin, now_ns: int) -> None:
        """Protect a session from eviction and expiry; raises UnknownSessionError."""
        self._state.advance(now_ns)
        retention.pin(self._state, key, pin)

    def unpin(self, key: SessionKey, now_ns: int) -> None:
        """End a pin, which counts as a use; raises UnknownSessionError."""
        self._state.advance(now_ns)
        retention.pin(self._state, key, Pin.NONE)

    def set_ttl(self, key: SessionKey, ttl_ns: int | None, now_ns: int) -> SessionInfo:
        """Set a TTL (None: the default; TTL_NEVER_NS: never); raises UnknownSessionError."""
        self._state.advance(now_ns)
        retention.set_ttl(self._state, key, ttl_ns)
        return descriptions.describe_info(self._state, self._state.sessions[key])

    def flush(self, key: SessionKey | None, dry_run: bool, now_ns: int) -> FlushAnswer:
        """Drop one session, or all (None), except leased ones, from every tier.

        All of very many take long: `flush_selected` does it bit by bit.

        Raises:
            UnknownSessionError: if the one named is not stored.
        """
        self._state.advance(now_ns)
        return retention.flush(self._state, key, dry_run=dry_run)

    def flush_selected(
        self, keys: Sequence[SessionKey], wanted: SessionFilter, now_ns: int
    ) -> FlushAnswer:
        """Drop those of the sessions that are (still) meant, except leased ones."""
        self._state.advance(now_ns)
        return retention.flush_selected(self._state, keys, wanted)

    def flushable(
        self, keys: Sequence[SessionKey], wanted: SessionFilter, now_ns: int
    ) -> tuple[tuple[SessionKey, ...], tuple[SessionKey, ...]]:
        """Tell which of the sessions `flush_selected` would drop, and which are leased."""
        self._state.advance(now_ns)
        return retention.flushable(self._state, keys, wanted)

    def freed_bytes(self, keys: Sequence[SessionKey], counted: Counter[bytes]) -> int:
        """What dropping some of the sessions of one flush frees: see retention.py."""
        return retention.freed_bytes(self._state, keys, counted)

    def forget_history(self, tenant: str | None) -> None:
        """Forget what happened to a tenant's sessions (None: to all)."""
        self._state.history.forget(tenant)

    # --------------------------------------------------------------------------------------- peers

    def owner_gone(self, owner: int, now_ns: int) -> None:
        """Release everything an engine holds: it is dead and will not touch its slots."""
        self._state.advance(now_ns)
        self._peers.gone(owner)
        self._prefetcher.queue_changed()

    def detach(self, owner: int, now_ns: int) -> None:
        """Take note that an engine's connection is over while its process lives.

        What it loads it must not trust any more: those leases end. What it stores it may still be
        writing: the slots stay its own, until `reattach` or `owner_gone`.
        """
        self._state.advance(now_ns)
        self._peers.detach(owner)
        self._prefetcher.queue_changed()

    def reattach(
        self, old_owner: int, new_owner: int, held: Sequence[int], now_ns: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Give an engine that came back the store leases it still holds; it knows of no others.

        Of one that an earlier kvd granted only the slots are kept: the engine may write to them,
        but its completion fails.

        Args:
            old_owner: its id while it was attached before, or in an OrphanSlot.
            new_owner: its id now.
            held: ids of the leases it says it holds.
            now_ns: time.

        Returns:
            Those of `held` that are its own again, and those that are lost.
        """
        self._state.advance(now_ns)
        return self._peers.reattach(old_owner, new_owner, held)

    def recent_turns(self) -> Iterator[RecordedTurn]:
        """Yield the turns of the last while, oldest first; other calls may be made meanwhile."""
        return iter(self._state.turns)

    def leases(self) -> tuple[LeaseInfo, ...]:
        """List all leases, oldest first; O(leases)."""
        return tuple(
            sorted((lease.info() for lease in self._state.leases), key=lambda info: info.lease_id)
        )

    def confirm_leases(
        self, owner: int, lease_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split lease ids into those the owner still holds and those it has lost."""
        return self._peers.confirm(owner, lease_ids)

    def replace_queue(self, owner: int, jobs: QueueChange, now_ns: int) -> int:
        """Take all of an engine's waiting queue; returns its digest."""
        self._state.advance(now_ns)
        self._state.turns.queue_replaced(owner, jobs, now_ns)
        self._prefetcher.queue_changed()
        return self._state.placement.replace_queue(owner, jobs, now_ns)

    def change_queue(self, owner: int, change: QueueChange, now_ns: int) -> int:
        """Take a change of an engine's waiting queue; returns the digest of what it is now."""
        self._state.advance(now_ns)
        self._state.turns.queue_changed(owner, change, now_ns)
        self._prefetcher.queue_changed()
        return self._state.placement.change_queue(owner, change, now_ns)

    def num_queued(self, owner: int) -> int:
        """Jobs of an engine that wait."""
        return self._state.placement.queue.num_waiting(owner)

    def num_running(self, owner: int) -> int:
        """Jobs of an engine that are being computed."""
        return self._state.placement.queue.num_running(owner)

    # --------------------------------------------------------------------------------- completions

    def read_done(
        self, op_id: int, outcome: IoOutcome, stored: StoredBlock | None, now_ns: int
    ) -> None:
        """Take the outcome of a ReadBlock, and what the extent's header says if it is OK."""
        self._state.advance(now_ns)
        self._loader.read_done(op_id, outcome, stored)
        self._writer.issue()

    def verify_done(self, op_id: int, outcome: IoOutcome, now_ns: int) -> None:
        """Take the outcome of a VerifySlot or VerifyExtent."""
        self._state.advance(now_ns)
        if self.scrubs.owns(op_id):
            self.scrubs.verify_done(op_id, outcome)
        else:
            self._loader.verify_done(op_id, outcome)

    def hash_done(self, op_id: int, checksums: bytes, now_ns: int) -> None:
        """Take the checksums of a HashSlot, b"" if they could not be computed."""
        self._state.advance(now_ns)
        self._hasher.hash_done(op_id, checksums)

    def write_done(self, op_id: int, outcome: IoOutcome, now_ns: int) -> None:
        """Take the outcome of a WriteBlock; OK means that it is durable."""
        self._state.advance(now_ns)
        self._writer.write_done(op_id, outcome)

    def drop_done(self, op_id: int, now_ns: int) -> None:
        """Take the commit of a DropBlock."""
        self._state.advance(now_ns)
        self._writer.drop_done(op_id)

    def compact_done(
        self, op_id: int, outcome: IoOutcome, checksums: list[bytes], now_ns: int
    ) -> None:
        """Take the outcome of a CompactRows, and the checksums of each block it made.

        CORRUPT: a source is not what was stored, and what was made of it means nothing.
        """
        self._state.advance(now_ns)
        self._compactor.copied(op_id, outcome, checksums)

    def wipe_done(self, op_id: int, outcome: IoOutcome, now_ns: int) -> None:
        """Take the outcome of a WipeSlots."""
        self._state.advance(now_ns)
        self.erasing.wipe_done(op_id, outcome)

    def rows_committed(self, op_id: int, now_ns: int) -> None:
        """Take the commit of a CommitRows."""
        self._state.advance(now_ns)
        self._compactor.committed(op_id)

    # ------------------------------------------------------------------------------------- looking

    def session_info(self, key: SessionKey) -> SessionInfo | None:
        """Sum up a session; None if it is not stored."""
        session = self._state.sessions.get(key)
        return descriptions.describe_info(self._state, session) if session else None

    def session_keys(self) -> list[SessionKey]:
        """Name every session there is: O(sessions), of which `ranked` looks at a few at a time."""
        return list(self._state.sessions)

    def ranked(
        self,
        keys: Sequence[SessionKey],
        wanted: SessionFilter,
        order: SessionOrder,
        now_ns: int,
    ) -> list[tuple[int, SessionKey]]:
        """Give those of the sessions that are meant, each with its rank in the order."""
        self._state.advance(now_ns)
        return session_filter.ranked(self._state, keys, wanted, order)

    def session_infos(
        self, keys: Sequence[SessionKey], wanted: SessionFilter, now_ns: int
    ) -> list[SessionInfo]:
        """Sum up those of the sessions that are (still) stored and meant, in this order."""
        self._state.advance(now_ns)
        found = (self._state.sessions.get(key) for key in keys)
        return [
            descriptions.describe_info(self._state, session)
            for session in found
            if session is not None and session_filter.selects(self._state, wanted, session)
        ]

    def history(self, key: SessionKey) -> tuple[Move, ...]:
        """What happened lately to a session, be it stored or not; oldest first."""
        return self._state.history.of(key)

    @property
    def measures(self) -> Measures:
        """How long things take and rest; to be looked at only."""
        return self._state.measures

    def queue_stats(self) -> QueueStats:
        """What the queues of all engines say, and the windows; O(1)."""
        return descriptions.queue_stats(self._state)

    def describe(self, key: SessionKey) -> SessionDetail:
        """Everything about one session; raises UnknownSessionError."""
        return descriptions.describe(self._state, retention.find_session(self._state, key))

    def tenants(self) -> tuple[TenantUsage, ...]:
        """What each tenant that stores something has, and may have; O(tenants)."""
        return tuple(self._state.tenants)

    def stats(self) -> EngineStats:
        """Fill and counters; O(1)."""
        return descriptions.stats(self._state)

    def _count_miss(self, answer: LoadAnswer) -> None:
        if answer.lookup is Lookup.MISS and answer.miss_reason != BUSY:  # which is asked again
            self._state.measures.misses.add(answer.miss_reason)

    def _counting_losses(self, lease_id: int, owner: int) -> None:
        lease = self._state.leases.get(lease_id)
        if lease is None or lease.owner != owner or isinstance(lease, RestoredLease):
            self._state.outbox.count("leases_lost")
