"""One layout's cache at work: the pure engine, the arena, the volume, joined by act().

Invariant: the engine is called from the event loop only, and only through act(), which carries out
what the engine asks for before it returns. Time enters here, from kvd's clock.

A cache has an arena once an engine of its layout attaches, or when one was adopted; before, it is
an index of what lies on SSD. Whoever needs the memory more may take it away again
(kvd/caches/caches.py).
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

T = TypeVar("T")

log = get_logger(__name__)


class Cache:
    """The cache of one layout.

    Attributes:
        layout: what its blocks look like.
        arena: the memory that engines of this layout map; None while there is none.
        max_extents: what the volume may grow to, if there is space.
        volume: its part of the SSD tier.
        last_opened_s: when an engine last came for it, on the loop's clock.
        loads: the progress of loads that are under way.
        io_histograms: how long its reads and writes take.
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
        self._waiters: set[asyncio.Future[None]] = set()  # see changed()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_ns: int | None = None  # when it fires
        self._prefault: asyncio.Future[int] | None = None
        self._is_prefaulted = False
        self._num_adopted = 0

    # ---------------------------------------------------------------------------------- beginning

    def start(self) -> None:
        """Open for calls. On the event loop."""
        self._performer.start(asyncio.get_running_loop(), self._completed)

    def restore(
        self,
        rows: IndexEntries,
        adopted: Sequence[AdoptedSlot],
        orphans: Sequence[OrphanSlot],
    ) -> None:
        """Begin with what the index, and the arena if one was adopted, hold; before anything else.

        The engine was made with the arena's slots.
        """
        self._num_adopted = len(adopted)
        first_lease_id = 1 if self.arena is None else self.arena.first_lease_id
        self.act(lambda core: core.restore(rows, adopted, orphans, first_lease_id))

    def use_arena(self, arena: Arena) -> None:
        """Take an arena into use whose slots the engine knows of."""
        self.arena = arena
        self._performer.use_arena(arena)

    def mount(self, arena: Arena) -> None:
        """Take a new arena into use."""
        self.use_arena(arena)
        self.act(lambda core: core.add_slots(arena.slots.num_slots, arena.first_lease_id))

    async def unmount(self, timeout_s: float) -> bool:
        """Write what is dirty, as far as SSD takes it in time, and give the arena up.

        Returns:
            False if an engine still uses it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while self.arena is not None:
            if self.act(lambda core: core.release_dram()):
                if self._prefault is not None:
                    await self._stop_prefault()
                    continue  # others had their turn meanwhile
                # Nothing is awaited from here on: our caller may be cancelled at any await.
                arena = self.arena
                self.act(lambda core: core.drop_slots())
                self._performer.use_arena(None)
                self.arena = None
                arena.close()
            elif loop.time() >= until or not await self.changed(until - loop.time()):
                return False
        return True

    # -------------------------------------------------------------------------------------- acting

    def act(self, step: Callable[["CacheEngine"], T]) -> T:
        """Tell the engine the time, call it, then carry out its actions.

        Raises:
            ReportedError: the engine refuses the call.
            Exception: an invariant broke, or an action could not be begun, which would leave its
                operation without an answer; `on_broken` is called, and the daemon stops.
        """
        try:
            try:
                self._engine.advance(self._clock.now_ns())
                return step(self._engine)
            finally:
                self._carry_out()
        except ReportedError:
            raise
        except Exception as error:
            self._on_broken(error)
            raise

    async def changed(self, timeout_s: float) -> bool:
        """Wait until slots, leases or fetches may have changed; False if nothing did in time."""
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

    # ------------------------------------------------------------------------------------- looking

    @property
    def is_idle(self) -> bool:
        """Whether no engine holds a lease, and it is still."""
        return self.is_still and not self._engine.inspection.stats().num_leases

    @property
    def is_still(self) -> bool:
        """Whether no read or write is under way, and the index was given all entries."""
        return not self._performer.num_pending and not self.has_entries_waiting

    @property
    def has_entries_waiting(self) -> bool:
        """Whether the index is behind: it has not been given some of its entries."""
        return any((len(self._engine.index_line), self._engine.index_line.num_uses))

    def stats(self) -> EngineStats:
        """Return the engine's statistics; what a restart would not find counts as dirty."""
        stats = self._engine.inspection.stats()
        num_uncommitted = self._performer.num_uncommitted + self._engine.index_line.num_blocks
        uncommitted_bytes = num_uncommitted * self.layout.block_bytes
        return replace(stats, dirty_bytes=stats.dirty_bytes + uncommitted_bytes)

    def arena_info(self, keep: str) -> ArenaInfo | None:
        """Return the arena as it is; `keep` is where arenas are kept."""
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

    # ------------------------------------------------------------------------------------- the rest

    def prefault(self) -> None:
        """Allocate the arena's pages in the background; only the first call does it."""
        if self._prefault is None and self.arena is not None:
            loop = asyncio.get_running_loop()
            self._prefault = loop.run_in_executor(None, self.arena.prefault)
            self._prefault.add_done_callback(partial(self._prefaulted, self.arena))

    def measure_space(self) -> None:
        """Measure how much the file system really has left, and let the engine use no more."""
        num_extents = min(self.max_extents, self.volume.files.physical_extents())
        self.act(lambda core: core.writes.set_capacity(num_extents))

    def remove_segments(self) -> None:
        """Remove the volume's files: no extent is in use, and nothing is under way."""
        self.volume.files.shrink(0)
        self.measure_space()

    def write_dirty(self) -> None:
        """Have everything written that is not on SSD yet: the end is near."""
        self.act(lambda core: core.write_dirty())

    async def close(self, *, keep_dram: bool) -> None:
        """Stop threads and release the memory; what is under way ends, what waits is dropped.

        But for entries: the index is given all of them, to commit before it closes.
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
        """Close for good: nothing is stored any more, and nothing is to be left."""
        self.volume.files.shrink(0)
        await self.close(keep_dram=False)
        self.volume.files.remove()

    def _completed(self, completion: Completion) -> None:
        self.act(completion)
        self._notify()

    def _carry_out(self) -> None:
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
        """Wake all who wait. Called for each completion, mostly with nobody waiting."""
        while self._waiters:
            waiter = self._waiters.pop()
            if not waiter.done():
                waiter.set_result(None)

    def _arm_timer(self) -> None:
        deadline_ns = self._engine.next_deadline_ns()
        if deadline_ns == self._timer_at_ns:
            return  # as after most calls
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
            # Unlike awaiting it, this does not cancel it with us: its thread would still run.
            await asyncio.wait((self._prefault,))
            self._prefault = None
            self._is_prefaulted = False  # true of this arena only

    def _prefaulted(self, arena: Arena, done: "asyncio.Future[int]") -> None:
        self._is_prefaulted = done.result() == arena.num_bytes
        if not self._is_prefaulted and not arena.closing.is_set():
            log.warning(
                "arena_not_prefaulted",
                layout=self.layout.fingerprint,
                arena_bytes=arena.num_bytes,
                allocated_bytes=done.result(),
            )
