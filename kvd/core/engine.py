"""CacheEngine: the entrance to the cache of one layout.

It makes the parts, which share one CacheState, exposes those that callers use, and does what
concerns all of them: start, end, changed limits, time. Must not know: clocks, files, sockets,
tasks. Time enters through `advance`, before each call. Effects leave through `drain`, after it.
Completions come back as calls of the part that asked for the effect.

    caller                       parts
    an engine                    loads, stores, sessions (discard, end), retention, expectations,
                                 engines (queues), wanting (waits)
    an operator                  sessions, inspection, scrubs, erasing, session_files, growing,
                                 wanting
    the performer, when done     arrivals (ReadBlock, VerifySlot, VerifyExtent), hashes (HashSlots),
                                 writes (WriteBlock, DropBlock), relocations (RelocateBlock,
                                 ReplaceBlock), compactions (CompactTokens, CommitIndex), erasing
                                 (WipeSlots)

Invariants (checking.py holds them as code):
1. a load is answered with the KV of exactly the tokens asked for, or of fewer, never other bytes;
2. bytes are visible only after a store was completed successfully, and never change afterwards;
3. a leased slot is given to no one else; a lease ends by its completion or with its engine;
4. what is left of a session is a prefix; eviction never breaks it in the middle;
5. after every call the index entries emitted so far can be restored to a usable cache: those of
   blocks follow their data, and sessions are cut to the blocks that exist.

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
from kvd.core.io.relocating import Relocator
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
    """The cache of one layout: all its parts, and what concerns them together.

    Args:
        layout: what a block looks like; all sessions here have its model.
        limits: bounds of everything that grows.
        salt_of: returns the persisted secret salt of a tenant, SALT_BYTES long.
        make_policy: makes the eviction policy.

    Attributes:
        layout: the layout of all blocks here.
        loads: from tokens to leased slots that hold their KV.
        stores: from tokens to leased slots that the engine fills, and to a longer session.
        sessions: discards, ends, pins, TTLs, flushes.
        retention: sessions that clients want kept for a while.
        expectations: what is likely to happen to sessions, and in which tier returned ones were.
        engines: queues of engines, and what happens to their leases.
        wanting: sessions that are requested from elsewhere, and loads that wait for them.
        inspection: sessions, blocks, counters and histories, for operators.
        scrubs: comparisons of every copy with what was stored.
        erasing: removal of tenants without a trace.
        session_files: sessions that are exported to files, or imported.
        growing: sessions whose import has come in part.
        index_line: actions of the index that were not drained yet.
        arrivals, hashes, writes, relocations, compactions: parts to which the performer reports
            completions.
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
        self.relocations = Relocator(state, writer)
        self.compactions = compactor

    # ---------------------------------------------------------------------------------------- time

    @property
    def now_ns(self) -> int:
        """The time of the current call, in nanoseconds of kvd's own clock."""
        return self._state.now_ns

    def advance(self, now_ns: int) -> None:
        """Set the time of the call that follows. Time never goes backwards (D17)."""
        self._state.advance(now_ns)

    def expire(self) -> None:
        """Do a bounded amount of the work that is due: expiries, write-backs, retries."""
        self._reconfigurer.resume()
        self.sessions.expire()
        self.retention.end_due()
        self.writes.write_back()
        self._verifier.issue()
        self.compactions.look()
        self.relocations.look()
        self.relocations.resume()
        self.wanting.end_due()
        self._announcer.look()

    def next_deadline_ns(self) -> int | None:
        """Return when to call `expire`. In the past: at once. None: not before another call."""
        earliest_ns = None
        for deadline_ns in (  # a loop, not a generator, for speed: this runs after every call
            self._reconfigurer.next_deadline_ns(),
            self._state.ttl.next_deadline_ns(),
            self._state.retention.next_deadline_ns(),
            self.writes.next_deadline_ns(),
            self._verifier.retry_at_ns(),
            self._prefetcher.next_deadline_ns(),
            self.compactions.resting.next_deadline_ns(),
            self.relocations.next_deadline_ns(),
            self.wanting.next_deadline_ns(),
            self._announcer.next_deadline_ns(),
            self.index_line.next_deadline_ns(self._state.now_ns),
        ):
            if deadline_ns is not None and (earliest_ns is None or deadline_ns < earliest_ns):
                earliest_ns = deadline_ns
        return earliest_ns

    # ------------------------------------------------------------------------------------- effects

    def drain(self, max_index_bytes: int = NO_BOUND) -> list[Action]:
        """Return all actions since the last drain, in order. The caller carries out each.

        Args:
            max_index_bytes: how many bytes of index entries to return, or a little more; see
                `index_line`.
        """
        state = self._state
        self._prefetcher.resume()
        if state.compaction is not None or state.wasteful:
            self.compactions.resume()
        self.relocations.resume()
        state.tails.pack_idle()
        if state.slots.num_unwiped:
            self.erasing.resume()
        entries = self.index_line.take(max_index_bytes, state.now_ns)
        self.writes.resume()  # writes may have waited because the index was far behind
        self._announcer.consider()
        return [*state.journal.drain(), *entries, *state.outbox.drain()]

    # ------------------------------------------------------------------------------- begin and end

    def restore(
        self,
        entries: IndexEntries,
        adopted: Sequence[AdoptedSlot],
        orphans: Sequence[OrphanSlot],
        first_lease_id: int,
    ) -> None:
        """Restore the cache from the index and the arena's journal, before any other call.

        Sessions are cut to the prefix whose blocks exist. Entries and slots that nothing needs are
        removed. Adopted blocks are verified before their first use. The slots of orphans stay with
        their engines: the caller names each of these in `engines.reattach` or `engines.remove`.

        Args:
            entries: all entries of this layout.
            adopted: slots that hold a block.
            orphans: slots that engines may still be writing to.
            first_lease_id: an id above all that earlier kvds have granted in this arena.
        """
        adopting.adopt(self._state, adopted, orphans, first_lease_id)
        restoring.restore(self._state, entries)
        adopting.settle(self._state)
        self._verifier.issue()

    def add_slots(self, num_slots: int, first_lease_id: int) -> None:
        """Add an arena; there must be none. Leases are numbered from `first_lease_id` on."""
        self._state.slots.add(num_slots)
        self._state.leases.start_at(first_lease_id)
        self._prefetcher.on_queue_change()

    def release_dram(self) -> bool:
        """Empty the arena as far as possible, and write dirty blocks; repeat on SpaceFreed.

        Returns:
            Whether no slot is in use, so that `drop_slots` may be called.
        """
        num_slots = len(self._state.slots)
        self._state.outbox.request_wake()
        self._prefetcher.stop()
        self.compactions.stop()
        num_free = self.writes.make_slots(num_slots)
        return num_free == num_slots and not self._state.slots.num_unwiped

    def drop_slots(self) -> None:
        """Remove the arena. No slot may be in use."""
        self._state.slots.drop()

    def set_limits(self, limits: Limits) -> None:
        """Apply other limits from now on. Their `num_slots` and `num_extents` are ignored.

        Their effects on sessions that are already stored follow in steps, by `expire`.
        """
        self._reconfigurer.change(limits)
        self._prefetcher.reschedule()

    def set_ssd_capacity(self, num_extents: int) -> int | None:
        """Set the size of the SSD tier. If more is used, evict in the policy's order.

        Blocks behind the new end that stay are moved before it, step by step.

        Returns:
            To how many whole extents the files may be cut now, if that is more than `num_extents`;
            None: they may not be cut.
        """
        self.writes.set_capacity(num_extents)
        self.relocations.look()
        return self.relocations.end()

    def write_dirty(self) -> None:
        """Write every dirty block now, or as soon as possible, whatever the policy; O(blocks).

        For the shutdown: blocks that become dirty later are written at once, too.
        """
        self._prefetcher.stop(for_good=True)
        self.compactions.stop(for_good=True)
        self.relocations.stop()
        self.writes.write_all()

    def check(self) -> None:
        """Raise AssertionError on any broken invariant; O(everything)."""
        checking.check(self._state)
        self._reader.check()
        self.wanting.check()
        self.growing.check()
