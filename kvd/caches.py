"""All layouts' caches: built from the index at start, or at the first attach with a layout.

A layout takes its part of DRAM, an arena, when its first engine attaches (or with the arena that an
earlier kvd has left). When all arenas together would exceed their bound, layouts without engines
give theirs up, least recently opened first. Of SSD each layout takes what it fills, up to its own
budget and that of the tier.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from kvd import memory
from kvd.budgets import Budgets
from kvd.cache import Cache
from kvd.clock import Clock
from kvd.config import Settings
from kvd.core.actions import Emit
from kvd.core.engine import CacheEngine, Limits
from kvd.core.errors import UnknownSessionError
from kvd.core.eviction.registry import POLICIES
from kvd.core.extent_shape import ExtentShape
from kvd.core.tenants import TenantLimits
from kvd.engines import Engines
from kvd.errors import AmbiguousSessionError, LimitReachedError, NotDurableError
from kvd.performer import Owners, Performer
from kvd.tenant_secrets import TenantSecrets
from kvd.tiers.arena import Arena, num_slots_for
from kvd.tiers.arena_store import ArenaOptions, ArenaStore, KeptArena, resolve_keep
from kvd.tiers.faults import Faults
from kvd.tiers.io_pool import IoPool
from kvd.tiers.manifest import LayoutRow, Manifest
from kvd.tiers.space_budget import SpaceBudget
from kvd.tiers.volume import SegmentVolume
from shared.errors import ReportedError
from shared.kv_layout import KVLayout
from shared.layout_message import layout_message, layout_of
from shared.log import get_logger
from shared.pb.kvd.v1 import kvd_pb2
from shared.session_key import SessionKey, session_key
from shared.units import NS_PER_S

COMMIT_S = 10.0  # how long an operator waits for the disk
UNMOUNT_S = 10.0  # how long a layout without engines may write before its arena is taken
VOLUMES = "volumes"  # in the state directory

log = get_logger(__name__)


class Caches:
    """The caches by layout fingerprint.

    Attributes:
        keep: what lets arenas outlive this process: "fdstore", "file" or "none".
        secrets: the tenants' salts and keys.
    """

    def __init__(
        self,
        settings: Settings,
        manifest: Manifest,
        clock: Clock,
        engines: Engines,
        faults: Faults,
        on_event: Callable[[Emit], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._manifest = manifest
        self._clock = clock
        self._engines = engines
        self._faults = faults
        self._on_event = on_event
        self._on_broken = on_broken
        self._caches: dict[str, Cache] = {}
        self._is_erased: Callable[[str], bool] | None = None  # whom shut_out has named
        self.secrets = TenantSecrets(manifest)
        self._opening = asyncio.Lock()
        self._volumes = settings.state_dir / VOLUMES
        self._io = IoPool(settings.ssd.io_threads, settings.ssd.in_flight_bytes)
        self._io.start()
        self.keep = resolve_keep(settings.dram.keep, settings.engine_uids())
        self._arenas = ArenaStore(
            ArenaOptions(
                self.keep, settings.dram.directory, settings.dram.hugepages, settings.dram.numa_node
            ),
            settings.state_dir,
            settings.limits.max_leases,
            faults,
        )
        self._budgets = Budgets(settings, self._volumes)
        self._space = SpaceBudget(
            self._budgets.ssd_bytes, settings.ssd.reserve_bytes, self._volumes
        )

    def __iter__(self) -> Iterator[Cache]:
        return iter(self._caches.values())

    def io_load(self) -> tuple[int, int]:
        """Of all layouts: jobs that wait for a thread, and bytes of the I/O that runs."""
        return len(self._io), self._io.bytes_in_flight

    def use(self, settings: Settings) -> None:
        """Hold other limits from now on, in every cache; tiers stay as large as they are."""
        self._settings = settings
        for cache in self:
            limits = self._limits(0, 0)
            cache.act(partial(_set_limits, limits))

    def restore(self) -> None:
        """Build the cache of every layout in the index, with the arenas that were left.

        Reads the index and the arenas' journals, never the data.
        """
        self.secrets.open(self._settings.encryption, self._volumes)
        kept = self._arenas.find()
        with memory.building_up():
            self._restore_layouts(kept)
        for arena in kept.values():
            self._arenas.discard(arena, "its layout is not in the index")

    def _restore_layouts(self, kept: dict[str, KeptArena]) -> None:
        """Restore all layouts, taking out of `kept` what belongs to them."""
        for row in self._manifest.layouts():
            try:
                layout = layout_of(kvd_pb2.KVLayout.FromString(row.message))
                self._restore_layout(layout, row, kept.pop(row.fingerprint, None))
            except (ReportedError, ValueError, OSError) as error:  # ValueError: no such message
                log.warning("layout_not_restored", layout=row.fingerprint, error=str(error))

    async def open(self, layout: KVLayout, *, prefault: bool = True) -> tuple[Cache, Arena]:
        """Return the cache of a layout, made if there is none, and its arena.

        An arena that is not prefaulted takes only the memory that is used of it.

        Raises:
            LimitReachedError: limits.max_layouts are stored, and none of them is empty.
            ArenaTooSmallError: the DRAM tier has no room for even two blocks more.
        """
        async with self._opening:
            cache = self._caches.get(layout.fingerprint)
            if cache is None and len(self._caches) >= self._settings.limits.max_layouts:
                await self._forget_a_layout()
            arena = None if cache is None else cache.arena
            if cache is None or arena is None:
                num_slots = await self._room_for(layout)
                cache = cache or self._add(layout)  # not before: layouts stay in the index
                arena = self._arenas.create(layout, num_slots)
                cache.mount(arena)
        cache.last_opened_s = asyncio.get_running_loop().time()
        if prefault and self._settings.dram.prefault:
            cache.prefault()
        return cache, arena

    def measure_space(self) -> None:
        """See how much space the file system really has; now and then."""
        for cache in self:
            cache.measure_space()

    def of_model(self, model: str) -> list[Cache]:
        """The caches of the models whose fingerprints start so ("": all), in a fixed order."""
        caches = sorted(self._caches.values(), key=lambda cache: cache.layout.fingerprint)
        return [cache for cache in caches if cache.layout.model.startswith(model)]

    def find(self, key: SessionKey) -> tuple[Cache, SessionKey]:
        """Find a session; an empty model matches if only one model has a session of this id.

        Raises:
            UnknownSessionError: there is none.
            AmbiguousSessionError: there are several.
        """
        found = []
        for cache in self._caches.values():
            if key.model in ("", cache.layout.model):
                full = session_key(key.tenant, cache.layout.model, key.session_id)
                if cache.act(partial(_is_stored, full)):
                    found.append((cache, full))
        if not found:
            raise UnknownSessionError(
                f"no session {key.session_id!r} of tenant {key.tenant!r} is stored",
                "list what is stored with: kvd ls",
            )
        if len(found) > 1:
            models = ", ".join(full.model[:12] for _, full in found)
            raise AmbiguousSessionError(
                f"session {key.session_id!r} is stored under several models ({models})",
                "name one of them with --model",
            )
        return found[0]

    def shut_out(self, is_erased: Callable[[str], bool] | None) -> None:
        """Refuse the calls of tenants that are being erased, of every layout; None: of nobody."""
        self._is_erased = is_erased
        for cache in self:
            if is_erased is None:
                cache.act(lambda core, _: core.erasing.end())
            else:
                cache.act(partial(_shut_out, is_erased))

    @property
    def index_queued_bytes(self) -> int:
        """Bytes of index rows that are not committed yet."""
        return self._manifest.queued_bytes

    async def committed(self) -> None:
        """Return once what was changed so far would survive a kill.

        Raises:
            NotDurableError: the index has not taken it within COMMIT_S.
        """
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(done.set)

        try:
            async with asyncio.timeout(COMMIT_S):
                for cache in tuple(self):
                    while cache.has_rows_waiting:
                        await cache.changed(COMMIT_S)
                self._manifest.when_committed(tell)
                await done.wait()
        except TimeoutError as error:
            raise NotDurableError(
                "the change is in effect, but not in the index yet",
                "see the log of kvd: the disk may be full",
            ) from error

    async def close(self, *, keep_dram: bool) -> None:
        """Stop every cache; `keep_dram` leaves the arenas where the next kvd finds them."""
        # Waited for: a read must not find its file closed and another one under its number.
        await asyncio.to_thread(self._io.close)
        for cache in self._caches.values():
            await cache.close(keep_dram=keep_dram)

    # -------------------------------------------------------------------------------------- inside

    def _add(self, layout: KVLayout) -> Cache:
        extent_bytes = ExtentShape(layout).full_bytes
        row = LayoutRow(
            layout.fingerprint,
            layout_message(layout).SerializeToString(),
            max(1, self._settings.ssd.segment_bytes // extent_bytes),
        )
        cache = self._build(layout, row, num_slots=0)
        self._manifest.put_layout(row)
        cache.measure_space()
        return cache

    def _restore_layout(self, layout: KVLayout, row: LayoutRow, kept: KeptArena | None) -> None:
        rows = self._manifest.rows(layout)
        if kept is not None and not self._budgets.fits(
            layout, kept.num_bytes, kept.page_bytes, self._taken_bytes()
        ):
            self._arenas.discard(kept, "its size is not what the settings say now")
            kept = None
        adoption = None if kept is None else self._arenas.adopt(layout, kept)
        if adoption is None:
            cache = self._build(layout, row, num_slots=0)
            cache.restore(rows, (), ())
        else:
            cache = self._build(layout, row, num_slots=adoption.arena.slots.num_slots)
            cache.use_arena(adoption.arena)
            orphans = self._engines.watch_orphans(cache, adoption.writing)
            cache.restore(rows, adoption.adopted, orphans)
        cache.volume.shrink(cache.max_extents)
        cache.measure_space()

    def _build(self, layout: KVLayout, row: LayoutRow, num_slots: int) -> Cache:
        settings = self._settings
        num_extents = self._budgets.ssd_bytes_of(layout) // ExtentShape(layout).full_bytes
        volume = SegmentVolume(
            self._volumes / layout.fingerprint,
            layout,
            row.extents_per_segment,
            self._space,
            settings.ssd.direct,
            self._faults,
            self.secrets.keys,
        )
        volume.open()
        engine = CacheEngine(
            layout,
            self._limits(num_slots, num_extents),
            self._salt_of,
            POLICIES[settings.eviction.policy],
        )
        owners = Owners(self._engines.identity_of, self._engines.wake_of)
        performer = Performer(layout, volume, self._manifest, self._io, owners)
        cache = Cache(
            engine, num_extents, volume, performer, self._clock, self._on_event, self._on_broken
        )
        cache.start()
        if self._is_erased is not None:
            cache.act(partial(_shut_out, self._is_erased))
        self._caches[layout.fingerprint] = cache
        return cache

    def _limits(self, num_slots: int, num_extents: int) -> Limits:
        settings = self._settings
        ttl_s = settings.sessions.default_ttl
        return Limits(
            num_slots=num_slots,
            num_extents=num_extents,
            default_ttl_ns=None if ttl_s is None else int(ttl_s * NS_PER_S),
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
        )

    def _tenant_limits(self, tenant: str) -> TenantLimits:
        settings = self._settings
        return TenantLimits(settings.tenant_ttl_ns(tenant), settings.tenant_quota_bytes(tenant))

    async def _room_for(self, layout: KVLayout) -> int:
        """Find DRAM for the arena of a layout, taking it from layouts without engines if need be.

        Returns:
            How many slots it may have: fewer than it is to have if there is no more to take.

        Raises:
            ArenaTooSmallError: not even a few.
        """
        wanted_bytes = self._budgets.arena_bytes_of(layout)
        while True:
            free_bytes = self._budgets.free_dram_bytes(self._taken_bytes())
            if free_bytes is None or free_bytes >= wanted_bytes:
                return num_slots_for(wanted_bytes, layout.block_bytes)
            if not await self._take_an_arena():
                return num_slots_for(free_bytes, layout.block_bytes, "dram.total_bytes")

    def _taken_bytes(self) -> int:
        """Bytes of the slots of all arenas."""
        slots = [cache.arena.slots for cache in self if cache.arena is not None]
        return sum(arena.num_slots * arena.slot_bytes for arena in slots)

    async def _take_an_arena(self) -> bool:
        """Have a layout without engines give up its arena, the least recently opened first.

        One with a quarantined process cannot: asking it to would only empty its DRAM.
        """
        idle = [c for c in self if c.arena is not None and not self._engines.use(c)]
        for cache in sorted(idle, key=lambda cache: cache.last_opened_s):
            if await cache.unmount(UNMOUNT_S):
                log.info("arena_taken", layout=cache.layout.fingerprint)
                return True
        return False

    async def _forget_a_layout(self) -> None:
        """Remove a layout without engines and sessions: that of a model served no more, say.

        Raises:
            LimitReachedError: every layout has some.
        """
        empty = [c for c in self if c.is_idle and not c.stats().num_sessions]
        for cache in sorted(empty, key=lambda cache: cache.last_opened_s):
            if not self._engines.use(cache):
                del self._caches[cache.layout.fingerprint]
                self._manifest.drop_layout(cache.layout.fingerprint)
                await cache.remove()
                log.info("layout_forgotten", layout=cache.layout.fingerprint)
                return
        raise LimitReachedError(
            f"{len(self._caches)} layouts are stored",
            "raise limits.max_layouts, or flush the sessions of a model that is served no more",
        )

    def _salt_of(self, tenant: str) -> bytes:
        return self.secrets.salt_of(tenant, self._settings.limits.max_tenants)


def _shut_out(is_erased: Callable[[str], bool], engine: CacheEngine, now_ns: int) -> None:
    engine.erasing.begin(is_erased, now_ns)


def _set_limits(limits: Limits, engine: CacheEngine, now_ns: int) -> None:
    engine.set_limits(limits, now_ns)


def _is_stored(key: SessionKey, engine: CacheEngine, _now_ns: int) -> bool:
    return engine.session_info(key) is not None
