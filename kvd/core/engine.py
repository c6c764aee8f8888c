"""CacheEngine: the one entrance to the cache of one layout.

It makes the parts, which share one CacheState, shows those that others call, and carries out what
concerns all of them: the begin, the end, other limits, time. Must not know: clocks, files, sockets,
tasks. Time enters through `advance`, before each call; effects leave through `drain`, after it;
completions come back as calls of the part that asked for the effect.

    who asks                     part
    an engine                    loads, stores, sessions (discard, end), retention, expectations,
                                 engines (queues), wanting (waits)
    an operator                  sessions, inspection, scrubs, erasing, session_files, growing,
                                 wanting
    the performer, at an end     arrivals (ReadBlock, VerifySlot, VerifyExtent), hashes (HashSlot),
                                 writes (WriteBlock, DropBlock), compactions (CompactTokens,
                                 CommitIndex), erasing (WipeSlots)

Invariants (checking.py holds them as code):
1. what a load answers is the KV of exactly the tokens asked for, or less of it, never other bytes;
2. bytes are visible only after a store is completed with success, and never change afterwards;
3. a leased slot is given to nobody else; a lease ends by its completion or with its engine;
4. what remains of a session is a prefix; evicting never breaks it in the middle;
5. after every call the index entries emitted so far restore to a usable cache: those of blocks
   follow their data, sessions are cut to what exists.

Calls that name an engine are made only between its attach and `engines.remove`.

*Source:* sessions as the unit of placement: CachedAttention §3.3; the sans-I/O shape: aioquic.
"""

from collections.abc import Callable, Sequence

from kvd.core.eviction.policies import LruPolicy
from kvd.core.eviction.policy import PolicyMaker
from kvd.core.inspection.descriptions import Inspector
from kvd.core.io.announcing import Announcer
from kvd.core.io.placement import Placement
from kvd.core.io.prefetching import Prefetcher
from kvd.core.io.reading import Reader
from kvd.core.io.verifying import Hasher, Verifier
from kvd.core.io.writing import Writer
from kvd.core.operations import checking
from kvd.core.operations.arriving import Arrivals
from kvd.core.operations.compacting import Compactor
from kvd.core.operations.engines import EngineReports
from kvd.core.operations.erasing import Eraser
from kvd.core.operations.expecting import Expectations
from kvd.core.operations.growing import GrowingSessions
from kvd.core.operations.loading import Loader
from kvd.core.operations.publishing import Publisher
from kvd.core.operations.reconfiguring import Reconfigurer
from kvd.core.operations.retaining import Retainer
from kvd.core.operations.scrubbing import Scrubber
from kvd.core.operations.session_files import SessionFiles
from kvd.core.operations.sessions import Sessions
from kvd.core.operations.storing import Storer
from kvd.core.operations.wanting import WantedSessions
from kvd.core.records.actions import Action
from kvd.core.records.entries import AdoptedSlot, IndexEntries, OrphanSlot
from kvd.core.recovery import adopting, restoring
from kvd.core.state.cache_state import CacheState
from kvd.core.state.index_line import NO_BOUND
from kvd.core.state.limits import Limits
from shared.types.kv_layout import KVLayout


class CacheEngine:
    """See the module docstring.

    Args:
        layout: what a block looks like; all sessions here have its model.
        limits: bounds of everything that grows.
        salt_of: the persisted secret salt of a tenant, SALT_BYTES long.
        make_policy: builds what ranks sessions for eviction.

    Attributes:
        layout: the layout of all blocks here.
        loads: from tokens to leased slots that hold their KV.
        stores: from tokens to leased slots to be filled, and to a longer session.
        sessions: discards, ends, pins, TTLs, flushes.
        retention: which sessions clients want to be kept for a while.
        expectations: what is likely to become of sessions, and where those were that returned.
        engines: their queues, and what becomes of their leases.
        wanting: sessions that are asked for elsewhere, and which of them loads wait for.
        inspection: what there is, and what happened.
        scrubs: comparing every copy with what was stored.
        erasing: dropping tenants without a trace.
        session_files: sessions on their way into files, and out of them.
        growing: sessions that have what of an import has come.
        index_line: actions of the index that were not drained yet.
        arrivals, hashes, writes, compactions: what the performer answers to.
    """

    def __init__(
        self,
        layout: KVLayout,
        limits: Limits,
        salt_of: Callable[[str], bytes],
        make_policy: PolicyMaker = LruPolicy,
    ) -> None:
        state = self._state = CacheState(layout, limits, salt_of, make_policy)
        placement = Placement(state)
        writer = Writer(state, placement)
        hasher = Hasher(state, writer.admit_all)
        verifier = self._verifier = Verifier(state)
        reader = self._reader = Reader(state)
        prefetcher = self._prefetcher = Prefetcher(state, placement, writer, reader)
        compactor = Compactor(state, placement, writer, verifier)
        self._reconfigurer = Reconfigurer(state, placement, writer)
        self.layout = layout
        self.loads = Loader(state, reader, writer, verifier, compactor.consider)
        publisher = Publisher(state, placement, hasher)
        self.stores = Storer(state, placement, writer, publisher, compactor.consider)
        self._announcer = Announcer(state)
        self.inspection = Inspector(state)
        self.sessions = Sessions(state, self.inspection, compactor.consider, prefetcher.reschedule)
        self.retention = Retainer(state, publisher.adopt, writer.admit_all)
        self.expectations = Expectations(state)
        self.growing = GrowingSessions(state, publisher.publish)
        self.wanting = WantedSessions(state, self.growing)
        self.engines = EngineReports(
            state,
            self.loads,
            self.stores,
            prefetcher,
            self.expectations.on_arrival,
            self.wanting.on_queue,
        )
        self.scrubs = Scrubber(state, self.loads, writer)
        self.erasing = Eraser(state, self.loads, self.stores, self.sessions)
        self.session_files = SessionFiles(state, self.loads, self.stores)
        self.index_line = state.outbox.index
        self.arrivals = Arrivals(
            state, self.loads, reader, writer, verifier, self.scrubs.check_done
        )
        self.hashes = hasher
        self.writes = writer
        self.compactions = compactor

    # ---------------------------------------------------------------------------------------- time

    @property
    def now_ns(self) -> int:
        """The time that everything goes by."""
        return self._state.now_ns

    def advance(self, now_ns: int) -> None:
        """Take the time of the call that follows. It never goes back (D17)."""
        self._state.advance(now_ns)

    def expire(self) -> None:
        """Do what is due, a bounded amount: expiries, write-backs, what is to be tried again."""
        self._reconfigurer.resume()
        self.sessions.expire()
        self.retention.end_due()
        self.writes.write_back()
        self._verifier.issue()
        self.compactions.look()
        self.wanting.end_due()
        self._announcer.look()

    def next_deadline_ns(self) -> int | None:
        """When to call `expire`; may be in the past (at once). None: not before another call."""
        earliest_ns = None
        for deadline_ns in (  # not by a generator: this is asked after every call
            self._reconfigurer.next_deadline_ns(),
            self._state.ttl.next_deadline_ns(),
            self._state.retention.next_deadline_ns(),
            self.writes.next_deadline_ns(),
            self._verifier.retry_at_ns(),
            self._prefetcher.next_deadline_ns(),
            self.compactions.resting.next_deadline_ns(),
            self.wanting.next_deadline_ns(),
            self._announcer.next_deadline_ns(),
        ):
            if deadline_ns is not None and (earliest_ns is None or deadline_ns < earliest_ns):
                earliest_ns = deadline_ns
        return earliest_ns

    # ------------------------------------------------------------------------------------- effects

    def drain(self, max_index_bytes: int = NO_BOUND) -> list[Action]:
        """Return every action since the last drain, in order. Each is to be carried out.

        Of the entries of the index only so many bytes, or a little more; see `index_line`.
        """
        state = self._state
        self._prefetcher.resume()
        if state.compaction is not None or state.wasteful:
            self.compactions.resume()
        state.tails.pack_idle()
        entries = self.index_line.take(max_index_bytes)
        self.writes.resume()  # they may have waited for an index that was far behind
        self._announcer.consider()
        return [*entries, *state.outbox.drain()]

    # ------------------------------------------------------------------------------- begin and end

    def restore(
        self,
        entries: IndexEntries,
        adopted: Sequence[AdoptedSlot],
        orphans: Sequence[OrphanSlot],
        first_lease_id: int,
    ) -> None:
        """Start from what the index and the journal of the arena say; before anything else.

        Sessions are cut to the prefix whose blocks exist; entries and slots that nothing needs are
        removed. Adopted blocks are verified before their first use. Orphans' slots stay their
        engines': each engine is to be named in `engines.reattach` or `engines.remove`.

        Args:
            entries: all entries of this layout.
            adopted: slots that hold a block.
            orphans: slots that engines may still be writing to.
            first_lease_id: above every lease id that an earlier kvd has granted in this arena.
        """
        adopting.adopt(self._state, adopted, orphans, first_lease_id)
        restoring.restore(self._state, entries)
        adopting.settle(self._state)
        self._verifier.issue()

    def add_slots(self, num_slots: int, first_lease_id: int) -> None:
        """Take an arena in; there is none. Leases on it are numbered from `first_lease_id` on."""
        self._state.slots.add(num_slots)
        self._state.leases.start_at(first_lease_id)
        self._prefetcher.on_queue_change()

    def release_dram(self) -> bool:
        """Empty the arena as far as possible, writing what is dirty; call again on SpaceFreed.

        Returns:
            Whether no slot is in use: then `drop_slots`.
        """
        num_slots = len(self._state.slots)
        self._state.outbox.want_wake()
        self._prefetcher.stop()
        self.compactions.stop()
        return self.writes.make_slots(num_slots) == num_slots

    def drop_slots(self) -> None:
        """Give the arena up; no slot is in use."""
        self._state.slots.drop()

    def set_limits(self, limits: Limits) -> None:
        """Hold other limits from now on; `num_slots` and `num_extents` are not looked at.

        What they ask of sessions that are stored already comes in time, by `expire`.
        """
        self._reconfigurer.change(limits)
        self._prefetcher.reschedule()

    def write_dirty(self) -> None:
        """Write every dirty block now or as soon as it can be, whatever the policy; O(blocks).

        The end is near: what is dirty from now on is not left to rest either.
        """
        self._prefetcher.stop(for_good=True)
        self.compactions.stop(for_good=True)
        self.writes.write_all()

    def check(self) -> None:
        """Raise AssertionError on any broken invariant; O(everything)."""
        checking.check(self._state)
        self._reader.check()
        self.wanting.check()
        self.growing.check()
