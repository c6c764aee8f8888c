"""The cache of one layout at work: joins the pure cache engine, the arena and the volume.

Invariant: the cache engine is called on the event loop only, and only through act(), which performs
all actions of the engine before it returns. Time enters here, from kvd's clock.

A cache has an arena once an inference engine of its layout attaches, or if one was adopted at the
start. Before, it is an index of the blocks on SSD. When another layout needs the memory,
kvd/caches/caches.py may take the arena away again.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvd.core.records.actions import Emit, FetchEnded, LeaseReady, SpaceFreed
from kvd.core.records.entries import AdoptedSlot, IndexEntries, OrphanSlot
from kvd.core.records.records import EngineStats
from kvd.host.clock import Clock
from kvd.runtime.completions import Completion
from kvd.runtime.performer import Performer
from kvd.tiers.arena import Arena, ArenaInfo
from kvd.tiers.volume import SegmentVolume
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.units import NS_PER_S

if TYPE_CHECKING:
    from kvd.core.engine import CacheEngine

CUT_AT_ONCE = 64  # segments per measurement, so that the loop is not blocked for long

T = TypeVar("T")

log = get_logger(__name__)


class Cache:
    """The cache of one layout.

    Attributes:
        layout: layout of the blocks.
        arena: memory that engines of this layout map; None while there is none.
        max_extents: extents to which the volume may grow, if there is space.
        volume: the layout's part of the SSD tier.
        last_opened_s: time at which an engine last attached, on the event loop's clock.
        loads: progress of loads that are under way.
        io_histograms: durations of reads and writes.
    """

    def __init__(
        self,
        engine: "CacheEngine",
        max_extents: int,
        volume: SegmentVolume,
        performer: Performer,
        clock: Clock,
        on_event: Callable[[Emit], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.layout = engine.layout
        self.max_extents = max_extents
        self.volume = volume
        self.arena: Arena | None = None
        self.last_opened_s = 0.0
        self.loads = performer.loads
        self.io_histograms = performer.histograms
        self._engine = engine
        self._performer = performer
        self._clock = clock
        self._on_event = on_event
        self._on_broken = on_broken
        self._waiters: set[asyncio.Future[None]] = set()  # see wait_for_change()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns: int | None = None  # kvd's time at which the timer fires
        self._prefault: asyncio.Future[int] | None = None
        self._is_prefaulted = False
        self._num_adopted = 0
        self._is_cuttable = True  # False: the files could not be cut, which is reported once

    # ----------------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Start the threads, and accept calls. Called on the event loop."""
        self._performer.start(asyncio.get_running_loop(), self._on_completion)

    def restore(
        self,
        rows: IndexEntries,
        adopted: Sequence[AdoptedSlot],
        orphans: Sequence[OrphanSlot],
    ) -> None:
        """Restore the state of the last kvd; called before anything else.

        The engine must have been created with the slots of the adopted arena, if there is one.

        Args:
            rows: blocks and sessions of the index.
            adopted: slots of an adopted arena that hold a block.
            orphans: slots of an adopted arena that a process of the last kvd's time may still use.
        """
        self._num_adopted = len(adopted)
        first_lease_id = 1 if self.arena is None else self.arena.first_lease_id
        self.act(lambda core: core.restore(rows, adopted, orphans, first_lease_id))

    def use_arena(self, arena: Arena) -> None:
        """Use an arena whose slots the engine knows already."""
        self.arena = arena
        self._performer.use_arena(arena)

    def mount(self, arena: Arena) -> None:
        """Use a new arena, and add its slots to the engine."""
        self.use_arena(arena)
        self.act(lambda core: core.add_slots(arena.slots.num_slots, arena.first_lease_id))

    async def unmount(self, timeout_s: float) -> bool:
        """Write dirty blocks, as far as SSD has room and time suffices, and release the arena.

        Args:
            timeout_s: longest wait for slots that are in use, in seconds.

        Returns:
            Whether the arena is released; False if slots are still in use at the deadline.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self.arena is not None:
            if self.act(lambda core: core.release_dram()):
                if self._prefault is not None:
                    await self._stop_prefault()
                    continue  # slots may have come into use during the await: check again
                # No await from here on: the caller may be cancelled there, and leave half of it.
                arena = self.arena
                self.act(lambda core: core.drop_slots())
                self._performer.use_arena(None)
                self.arena = None
                arena.close()
            elif loop.time() >= until or not await self.wait_for_change(until - loop.time()):
                return False
        return True

    # -------------------------------------------------------------------------------------- acting

    def act(self, step: Callable[["CacheEngine"], T]) -> T:
        """Advance the engine's time, call it, and perform its actions.

        Args:
            step: called with the engine.

        Returns:
            The result of `step`.

        Raises:
            ReportedError: the engine refuses the call.
            Exception: an invariant is broken, or an action could not be begun, so that its
                operation would never be answered. `on_broken` is called, and the daemon stops.
        """
        try:
            try:
                self._engine.advance(self._clock.now_ns())
                return step(self._engine)
            finally:
                self._perform_actions()
        except ReportedError:
            raise
        except Exception as error:
            self._on_broken(error)
            raise

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until slots, leases or fetches may have changed; return False on timeout."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    # ---------------------------------------------------------------------------------- inspection

    @property
    def is_idle(self) -> bool:
        """Whether no engine holds a lease, and the cache is still."""
        return self.is_quiescent and not self._engine.inspection.stats().num_leases

    @property
    def is_quiescent(self) -> bool:
        """Whether no operation is under way, and the index has received all entries."""
        return not self._performer.num_pending and not self.has_entries_waiting

    @property
    def has_entries_waiting(self) -> bool:
        """Whether the index is behind: some entries still wait to be passed to it."""
        line = self._engine.index_line
        return len(line) > 0 or line.are_uses_due(self._engine.now_ns)

    def stats(self) -> EngineStats:
        """Return the engine's statistics; blocks that a restart would not find count as dirty."""
        stats = self._engine.inspection.stats()
        num_uncommitted = self._performer.num_uncommitted + self._engine.index_line.num_blocks
        uncommitted_bytes = num_uncommitted * self.layout.block_bytes
        return replace(stats, dirty_bytes=stats.dirty_bytes + uncommitted_bytes)

    def arena_info(self, keep: str) -> ArenaInfo | None:
        """Return the present state of the arena, if there is one.

        Args:
            keep: resolved value of dram.keep.
        """
        arena = self.arena
        if arena is None:
            return None
        return ArenaInfo(
            arena_id=arena.arena_id,
            keep=keep,
            pages=arena.pages,
            epoch=arena.epoch,
            num_adopted=self._num_adopted,
            is_prefaulted=self._is_prefaulted,
            physical_bytes=arena.physical_bytes(),
        )

    # -------------------------------------------------------------------------- arena and volume

    def prefault(self) -> None:
        """Allocate the arena's pages in the background; later calls do nothing."""
        if self._prefault is None and self.arena is not None:
            loop = asyncio.get_running_loop()
            self._prefault = loop.run_in_executor(None, self.arena.prefault)
            self._prefault.add_done_callback(partial(self._on_prefault_done, self.arena))

    def measure_space(self) -> None:
        """Measure the space that is left, and set the engine's SSD capacity to it.

        If there is less than is allocated, the files are cut as far as nothing lies there any more,
        some at a time.
        """
        num_extents = min(self.max_extents, self.volume.files.physical_extents())
        end = self.act(lambda core: core.set_ssd_capacity(num_extents))
        if end is not None:
            self._cut_files(max(end, num_extents))

    def remove_segments(self) -> None:
        """Remove the volume's files. No extent may be in use, and no I/O under way."""
        self.volume.files.shrink(0)
        self.volume.files.close_removed()
        self.measure_space()

    def write_dirty(self) -> None:
        """Begin to write all dirty blocks to SSD, before kvd stops."""
        self.act(lambda core: core.write_dirty())

    async def close(self, *, keep_dram: bool) -> None:
        """Stop the threads and release the memory.

        Operations that are under way end, those that wait are dropped. Waiting entries are passed
        to the index, which commits them before it closes.

        Args:
            keep_dram: leave the arena for the next kvd.
        """
        await self._stop_prefault()
        for entry in self._engine.index_line.take():
            self._performer.perform(entry)
        await self._performer.close()
        if self._timer is not None:
            self._timer.cancel()
        self.volume.files.close()
        if self.arena is not None:
            self.arena.close(keep=keep_dram)

    async def remove(self) -> None:
        """Close the cache, which stores nothing any more, and remove arena and volume."""
        self.volume.files.shrink(0)
        await self.close(keep_dram=False)
        self.volume.files.remove()

    def _cut_files(self, num_extents: int) -> None:
        files = self.volume.files
        try:
            files.shrink(num_extents, CUT_AT_ONCE)
        except OSError as error:  # it is tried again
            if self._is_cuttable:
                log.warning("segments_not_cut", layout=self.layout.fingerprint, error=str(error))
            self._is_cuttable = False
        else:
            self._is_cuttable = True
        if not self._performer.num_pending:
            files.close_removed()

    def _on_completion(self, completion: Completion) -> None:
        self.act(completion)
        self._notify()

    def _perform_actions(self) -> None:
        wake = False
        for action in self._engine.drain(self._performer.index_room):
            if isinstance(action, LeaseReady | SpaceFreed | FetchEnded):
                wake = True
            elif isinstance(action, Emit):
                self._on_event(action)
            else:
                self._performer.perform(action)
        if self.has_entries_waiting:
            self._performer.await_room()
        if wake:
            self._notify()
        self._arm_timer()

    def _notify(self) -> None:
        """Wake all waiters. Called for each completion, mostly without any."""
        while self._waiters:
            waiter = self._waiters.pop()
            if not waiter.done():
                waiter.set_result(None)

    def _arm_timer(self) -> None:
        deadline_ns = self._engine.next_deadline_ns()
        if deadline_ns == self._timer_at_ns:
            return  # true after most calls
        self._timer_at_ns = deadline_ns
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline_ns is not None:
            delay_s = max(0.0, (deadline_ns - self._clock.now_ns()) / NS_PER_S)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._timer = self._timer_at_ns = None
        self.act(lambda core: core.expire())

    async def _stop_prefault(self) -> None:
        if self.arena is not None:
            self.arena.closing.set()
        if self._prefault is not None:
            # Not `await self._prefault`: cancelling this task would cancel the future, too, while
            # its thread still runs.
            await asyncio.wait((self._prefault,))
            self._prefault = None
            self._is_prefaulted = False  # the next arena is not

    def _on_prefault_done(self, arena: Arena, done: "asyncio.Future[int]") -> None:
        self._is_prefaulted = done.result() == arena.num_bytes
        if not self._is_prefaulted and not arena.closing.is_set():
            log.warning(
                "arena_not_prefaulted",
                layout=self.layout.fingerprint,
                arena_bytes=arena.num_bytes,
                allocated_bytes=done.result(),
            )
