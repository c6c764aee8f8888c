"""Builds the caches of layouts whose volumes are open, and finds DRAM for their arenas.

A cache consists of a cache engine with the limits of the settings, and its performer. DRAM for an
arena is what other arenas leave, and what layouts without attached engines release.
"""

from collections.abc import Callable, Iterable

from kvd.caches.budgets import Budgets
from kvd.caches.layout_opening import OpenedLayout
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
    """Builds and starts caches. Its methods are called on the event loop.

    Args:
        settings: kvd's settings.
        manifest: the index.
        clock: kvd's clock.
        engines: registry of engines.
        io_pool: I/O threads of all layouts.
        secrets: salts and keys of tenants.
        on_event: called with events for watchers.
        on_broken: called when an invariant of the core is broken.

    Attributes:
        settings: settings of caches that are built from now on.
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
        """Build an empty cache, and start it.

        Args:
            layout: layout of the blocks.
            volume: its open volume.
            num_extents: number of extents to which the volume may grow. If more are stored, the
                cache begins with those; `Cache.measure_space` then says which of them stay.
            num_slots: slots of the arena that the caller passes to restore(); 0: there is none.
        """
        num_stored = volume.files.num_extents() if num_extents else 0
        engine = CacheEngine(
            layout,
            self.limits(num_slots, max(num_extents, num_stored)),
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

    def restore(self, cache: Cache, opened: OpenedLayout) -> None:
        """Restore a new cache from the index, and from an adopted arena if there is one.

        The cache must have been built with the slots of that arena.
        """
        adoption = opened.adoption
        if adoption is not None:
            cache.use_arena(adoption.arena)
        adopted = adoption.adopted if adoption else ()
        orphans = self._engines.watch_orphans(cache, adoption.writing) if adoption else ()
        with memory.gc_paused():
            cache.restore(opened.rows, adopted, orphans)

    def limits(self, num_slots: int = 0, num_extents: int = 0) -> Limits:
        """Return a cache engine's limits: the sizes of its tiers, and those of the settings."""
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
    """Finds room for arenas in the DRAM tier.

    Args:
        budgets: budgets of the layouts.
        engines: registry of engines.
        caches: yields all caches that exist at the time of an iteration.
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
        """Find room for a layout's arena; if necessary, layouts without engines release theirs.

        Returns:
            The number of its slots; fewer than configured if there is no more room.

        Raises:
            ArenaTooSmallError: there is no room for MIN_SLOTS slots.
        """
        wanted_bytes = self._budgets.arena_bytes_of(layout)
        while True:
            free_bytes = self._budgets.free_dram_bytes(self.taken_bytes())
            if free_bytes is None or free_bytes >= wanted_bytes:
                return num_slots_for(wanted_bytes, layout.block_bytes)
            if not await self._reclaim_arena():
                return num_slots_for(free_bytes, layout.block_bytes, "dram.total_bytes")

    async def _reclaim_arena(self) -> bool:
        """Have a layout without engines release its arena, the least recently opened first.

        Layouts with a quarantined process are left out: they would lose the blocks in DRAM, but
        could not release the arena.

        Returns:
            Whether an arena was released.
        """
        idle = [c for c in self._caches if c.arena is not None and not self._engines.uses_cache(c)]
        for cache in sorted(idle, key=lambda cache: cache.last_opened_s):
            if await cache.unmount(UNMOUNT_S):
                log.info("arena_taken", layout=cache.layout.fingerprint)
                return True
        return False
