"""Builds the caches of layouts whose files are open, and finds the DRAM that their arenas take.

A cache is an engine within the limits of the settings, and a performer for it. Of DRAM there is
what other arenas leave, and what layouts without engines can release.
"""

from collections.abc import Callable, Iterable

from kvd.caches.budgets import Budgets
from kvd.caches.layout_opening import Opened
from kvd.caches.tenant_secrets import TenantSecrets
from kvd.config import Settings
from kvd.core.engine import CacheEngine
from kvd.core.eviction.policies import POLICIES
from kvd.core.records.actions import Emit
from kvd.core.state.limits import Limits, TenantLimits
from kvd.engines.attached import Engines
from kvd.host.clock import Clock
from kvd.runtime.cache import Cache
from kvd.runtime.performer import LeaseHolders, Performer
from kvd.tiers.arena import num_slots_for
from kvd.tiers.io_threads import IoPool
from kvd.tiers.manifest import Manifest
from kvd.tiers.volume import SegmentVolume
from shared.process import memory
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout
from shared.types.units import NS_PER_S

UNMOUNT_S = 10.0  # how long a layout without engines may write before its arena is taken

log = get_logger(__name__)


class CacheBuilder:
    """Builds caches, and starts them. On the event loop.

    Args:
        settings: this kvd's settings.
        manifest: the index.
        clock: kvd's.
        engines: who uses which cache.
        io_pool: the I/O threads of all layouts.
        secrets: the tenants'.
        on_event: called with what subscribers are to see.
        on_broken: called when an invariant of the core broke.

    Attributes:
        settings: those that hold for what is built from now on.
    """

    def __init__(
        self,
        settings: Settings,
        manifest: Manifest,
        clock: Clock,
        engines: Engines,
        io_pool: IoPool,
        secrets: TenantSecrets,
        on_event: Callable[[Emit], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.settings = settings
        self._manifest = manifest
        self._clock = clock
        self._engines = engines
        self._io_pool = io_pool
        self._secrets = secrets
        self._on_event = on_event
        self._on_broken = on_broken

    def build(
        self, layout: KVLayout, volume: SegmentVolume, num_extents: int, num_slots: int = 0
    ) -> Cache:
        """Build a cache that holds nothing, and start it.

        Args:
            layout: what its blocks look like.
            volume: where they go; it is open.
            num_extents: how many extents the volume may grow to.
            num_slots: of the arena that it is to be given next; 0: there is none yet.
        """
        engine = CacheEngine(
            layout,
            self.limits(num_slots, num_extents),
            lambda tenant: self._secrets.salt_of(tenant, self.settings.limits.max_tenants),
            POLICIES[self.settings.eviction.policy],
        )
        lease_holders = LeaseHolders(self._engines.identity_of, self._engines.wake_of)
        cache = Cache(
            engine=engine,
            max_extents=num_extents,
            volume=volume,
            performer=Performer(layout, volume, self._manifest, self._io_pool, lease_holders),
            clock=self._clock,
            on_event=self._on_event,
            on_broken=self._on_broken,
        )
        cache.start()
        return cache

    def restore(self, cache: Cache, opened: Opened) -> None:
        """Give a new cache what is stored of its layout.

        It was built with the slots of the arena that is adopted.
        """
        adoption = opened.adoption
        if adoption is not None:
            cache.use_arena(adoption.arena)
        adopted = adoption.adopted if adoption else ()
        orphans = self._engines.watch_orphans(cache, adoption.writing) if adoption else ()
        with memory.building_up():
            cache.restore(opened.rows, adopted, orphans)
        try:
            cache.volume.files.shrink(cache.max_extents)
        except OSError as error:  # what is too much stays until the next start
            log.warning("segments_not_shrunk", layout=cache.layout.fingerprint, error=str(error))

    def limits(self, num_slots: int = 0, num_extents: int = 0) -> Limits:
        """Return what the settings let an engine do, beside the sizes of its tiers."""
        settings = self.settings
        ttl_s = settings.sessions.default_ttl
        return Limits(
            num_slots=num_slots,
            num_extents=num_extents,
            default_ttl_ns=None if ttl_s is None else int(ttl_s * NS_PER_S),
            max_retention_ns=int(settings.sessions.max_retention * NS_PER_S),
            max_sessions=settings.sessions.max_sessions,
            max_leases=settings.limits.max_leases,
            admission=settings.ssd.admission,
            write_back_delay_ns=int(settings.ssd.write_back_after * NS_PER_S),
            max_write_bytes=settings.ssd.in_flight_bytes,
            verify_on_load=settings.integrity.verify_on_load,
            watermark=settings.dram.watermark,
            prefetch_bytes=settings.prefetch.in_flight_bytes,
            reads_returning=settings.prefetch.returning,
            max_waste=settings.compaction.max_waste,
            compact_min_bytes=settings.compaction.min_bytes,
            compact_rest_ns=int(settings.compaction.rest * NS_PER_S),
            tenant_limits=self._tenant_limits,
            wants_sessions=settings.remote.pull,
            announces_evictions=settings.remote.write == "evicted",
        )

    def _tenant_limits(self, tenant: str) -> TenantLimits:
        settings = self.settings
        return TenantLimits(
            settings.tenant_ttl_ns(tenant),
            settings.tenant_quota_bytes(tenant),
            settings.tenant_retention_ns(tenant),
        )


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
        """Return the bytes of the slots of all arenas."""
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
        """Have a layout without engines release its arena, the least recently opened first.

        One with a quarantined process cannot: asking it to would only empty its DRAM.
        """
        idle = [c for c in self._caches if c.arena is not None and not self._engines.uses_cache(c)]
        for cache in sorted(idle, key=lambda cache: cache.last_opened_s):
            if await cache.unmount(UNMOUNT_S):
                log.info("arena_taken", layout=cache.layout.fingerprint)
                return True
        return False
