"""One layout's cache at work: the pure engine, the arena and the performer, joined by act().

Invariant: the engine is called from the event loop only, and only through act(), which carries out
what the engine asks for before it returns. Time enters here, from kvd's clock.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kvd.clock import Clock
from kvd.core.actions import Emit, LeaseReady, SpaceFreed
from kvd.core.engine import CacheEngine
from kvd.core.records import EngineStats
from kvd.performer import Completion, Performer
from kvd.tiers.dram import Arena
from kvd.tiers.ssd import SegmentVolume
from shared.errors import ReportedError
from shared.log import get_logger
from shared.units import NS_PER_S

T = TypeVar("T")

log = get_logger(__name__)


class Cache:
    """The cache of one layout.

    Attributes:
        layout: what its blocks look like.
        arena: the memory that engines of this layout map.
    """

    def __init__(
        self,
        engine: CacheEngine,
        arena: Arena,
        volume: SegmentVolume,
        performer: Performer,
        clock: Clock,
        on_event: Callable[[Emit], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.layout = engine.layout
        self.arena = arena
        self._engine = engine
        self._volume = volume
        self._performer = performer
        self._clock = clock
        self._on_event = on_event
        self._on_broken = on_broken
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._prefault: asyncio.Future[int] | None = None

    def start(self) -> None:
        """Open for calls. On the event loop."""
        self._performer.start(asyncio.get_running_loop(), self._completed)

    def act(self, step: Callable[[CacheEngine, int], T]) -> T:
        """Call the engine with now_ns, then carry out its actions.

        Raises:
            ReportedError: the engine refuses the call.
            Exception: an invariant broke; the daemon is told and stops.
        """
        try:
            return step(self._engine, self._clock.now_ns())
        except ReportedError:
            raise
        except Exception as error:
            self._on_broken(error)
            raise
        finally:
            self._carry_out()

    async def changed(self, timeout_s: float) -> bool:
        """Wait until slots or leases may have changed; False if nothing did in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no engine holds a lease and no read or write is under way."""
        return not self._performer.num_pending and not self._engine.stats().num_leases

    def stats(self) -> EngineStats:
        """The engine's statistics; what a restart would not find counts as dirty."""
        stats = self._engine.stats()
        uncommitted_bytes = self._performer.num_uncommitted * self.layout.block_bytes
        return replace(stats, dirty_bytes=stats.dirty_bytes + uncommitted_bytes)

    def prefault(self) -> None:
        """Allocate the arena's pages in the background; only the first call does it."""
        if self._prefault is None:
            loop = asyncio.get_running_loop()
            self._prefault = loop.run_in_executor(None, self.arena.prefault)
            self._prefault.add_done_callback(self._prefaulted)

    async def close(self) -> None:
        """Stop threads and give up the memory; what is under way ends, what waits is dropped."""
        self.arena.stop_prefault()
        if self._prefault is not None:
            await self._prefault
        await asyncio.to_thread(self._performer.close)
        if self._timer is not None:
            self._timer.cancel()
        self._volume.close()
        self.arena.close()

    def _completed(self, completion: Completion) -> None:
        self.act(completion)
        self._notify()

    def _carry_out(self) -> None:
        wake = False
        for action in self._engine.drain():
            if isinstance(action, LeaseReady | SpaceFreed):
                wake = True
            elif isinstance(action, Emit):
                self._on_event(action)
            else:
                self._performer.perform(action)
        if wake:
            self._notify()
        self._arm_timer()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ns = self._engine.next_deadline_ns()
        if deadline_ns is not None:
            delay_s = max(0.0, (deadline_ns - self._clock.now_ns()) / NS_PER_S)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(delay_s, self.act, _expire)

    def _prefaulted(self, done: "asyncio.Future[int]") -> None:
        wanted = self.arena.slots.slot_bytes * self.arena.slots.num_slots
        if not done.cancelled() and done.result() < wanted:
            log.warning("arena_not_prefaulted", arena_bytes=wanted, allocated_bytes=done.result())


def _expire(engine: CacheEngine, now_ns: int) -> None:
    engine.expire(now_ns)
