"""DRAM for one more arena: what is free of it, and what layouts without engines can give up."""

from collections.abc import Iterable

from kvd.caches.budgets import Budgets
from kvd.engines.attached import Engines
from kvd.runtime.cache import Cache
from kvd.tiers.arena import num_slots_for
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout

UNMOUNT_S = 10.0  # how long a layout without engines may write before its arena is taken

log = get_logger(__name__)


class DramRoom:
    """Finds room for arenas.

    Args:
        budgets: each layout's part of the tiers.
        engines: who uses which cache.
        caches: all there are, whenever it is gone through.
    """

    def __init__(self, budgets: Budgets, engines: Engines, caches: Iterable[Cache]) -> None:
        self._budgets = budgets
        self._engines = engines
        self._caches = caches

    def taken_bytes(self) -> int:
        """Bytes of the slots of all arenas."""
        slots = [cache.arena.slots for cache in self._caches if cache.arena is not None]
        return sum(arena.num_slots * arena.slot_bytes for arena in slots)

    async def find(self, layout: KVLayout) -> int:
        """Find room for the arena of a layout, taking it from layouts without engines if need be.

        Returns:
            How many slots it may have: fewer than it is to have if there is no more to take.

        Raises:
            ArenaTooSmallError: not even a few.
        """
        wanted_bytes = self._budgets.arena_bytes_of(layout)
        while True:
            free_bytes = self._budgets.free_dram_bytes(self.taken_bytes())
            if free_bytes is None or free_bytes >= wanted_bytes:
                return num_slots_for(wanted_bytes, layout.block_bytes)
            if not await self._take_an_arena():
                return num_slots_for(free_bytes, layout.block_bytes, "dram.total_bytes")

    async def _take_an_arena(self) -> bool:
        """Have a layout without engines give up its arena, the least recently opened first.

        One with a quarantined process cannot: asking it to would only empty its DRAM.
        """
        idle = [c for c in self._caches if c.arena is not None and not self._engines.use(c)]
        for cache in sorted(idle, key=lambda cache: cache.last_opened_s):
            if await cache.unmount(UNMOUNT_S):
                log.info("arena_taken", layout=cache.layout.fingerprint)
                return True
        return False
