"""All layouts' caches: built from the index at start, or at the first attach with a layout."""

import asyncio
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvd.cache import Cache
from kvd.clock import Clock
from kvd.config import Settings
from kvd.core.actions import Emit
from kvd.core.engine import CacheEngine, Limits
from kvd.core.errors import UnknownSessionError
from kvd.core.eviction import make_policy
from kvd.core.records import BlockRecord, SessionRecord
from kvd.errors import AmbiguousSessionError, LimitReachedError, NotDurableError
from kvd.performer import Performer
from kvd.tiers.dram import create_arena, dram_bytes, num_slots_for
from kvd.tiers.manifest import LayoutRow, Manifest
from kvd.tiers.ssd import Faults, SegmentVolume
from shared.block_key import SALT_BYTES
from shared.errors import ReportedError
from shared.kv_layout import KVLayout
from shared.layout_message import layout_message, layout_of
from shared.log import get_logger
from shared.pb.kvd.v1 import kvd_pb2
from shared.session_key import SessionKey, session_key
from shared.units import NS_PER_S

COMMIT_S = 10.0  # how long an operator waits for the disk
AUTO_FRACTION = 0.25  # of the state directory's free space, for the volume of one layout

log = get_logger(__name__)


class Caches:
    """The caches by layout fingerprint."""

    def __init__(
        self,
        settings: Settings,
        manifest: Manifest,
        clock: Clock,
        faults: Faults,
        on_event: Callable[[Emit], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._settings = settings
        self._manifest = manifest
        self._clock = clock
        self._faults = faults
        self._on_event = on_event
        self._on_broken = on_broken
        self._caches: dict[str, Cache] = {}
        self._salts: dict[str, bytes] = {}
        self._read_pool = ThreadPoolExecutor(settings.ssd.read_threads, "kvd-read")

    def __iter__(self) -> Iterator[Cache]:
        return iter(self._caches.values())

    def restore(self) -> None:
        """Build the cache of every layout in the index. Reads the index, never the data."""
        self._salts = self._manifest.salts()
        for row in self._manifest.layouts():
            try:
                layout = layout_of(kvd_pb2.KVLayout.FromString(row.message))
                cache = self._build(layout, row)
            except (ReportedError, ValueError) as error:  # ValueError: not a protobuf message
                log.warning("layout_not_restored", layout=row.fingerprint, error=str(error))
                continue
            sessions = self._manifest.sessions(row.fingerprint)
            blocks = self._manifest.blocks(row.fingerprint)
            cache.act(partial(_restore, sessions, blocks))

    def open(self, layout: KVLayout) -> Cache:
        """Return the cache of a layout, made if there is none.

        Raises:
            LimitReachedError: limits.max_layouts are open.
            ArenaTooSmallError: the DRAM tier does not hold even two blocks.
        """
        cache = self._caches.get(layout.fingerprint)
        if cache is None:
            if len(self._caches) >= self._settings.limits.max_layouts:
                raise LimitReachedError(
                    f"{len(self._caches)} layouts are stored", "raise limits.max_layouts"
                )
            extents_per_segment = max(1, self._settings.ssd.segment_bytes // layout.block_bytes)
            message = layout_message(layout).SerializeToString()
            row = LayoutRow(layout.fingerprint, message, extents_per_segment)
            cache = self._build(layout, row)
            self._manifest.put_layout(row)
        if self._settings.dram.prefault:
            cache.prefault()
        return cache

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

    async def committed(self) -> None:
        """Return once what was changed so far would survive a kill.

        Raises:
            NotDurableError: the index has not taken it within COMMIT_S.
        """
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(done.set)

        self._manifest.when_committed(tell)
        try:
            async with asyncio.timeout(COMMIT_S):
                await done.wait()
        except TimeoutError as error:
            raise NotDurableError(
                "the change is in effect, but not in the index yet",
                "see the log of kvd: the disk may be full",
            ) from error

    async def close(self) -> None:
        """Stop every cache."""
        # Waited for: a read must not find its file closed and another one under its number.
        await asyncio.to_thread(self._read_pool.shutdown, wait=True, cancel_futures=True)
        for cache in self._caches.values():
            await cache.close()

    def _build(self, layout: KVLayout, row: LayoutRow) -> Cache:
        settings = self._settings
        num_slots = num_slots_for(dram_bytes(settings.dram.bytes), layout.block_bytes)
        directory = settings.state_dir / "volumes" / layout.fingerprint
        num_extents = ssd_bytes(settings.ssd.bytes, directory) // layout.block_bytes
        volume = SegmentVolume(
            directory, layout, num_extents, row.extents_per_segment, self._faults
        )
        volume.open()
        ttl_s = settings.sessions.default_ttl
        limits = Limits(
            num_slots=num_slots,
            num_extents=num_extents,
            default_ttl_ns=None if ttl_s is None else int(ttl_s * NS_PER_S),
            max_sessions=settings.sessions.max_sessions,
            max_leases=settings.limits.max_leases,
        )
        engine = CacheEngine(layout, limits, self._salt_of, make_policy(settings.eviction.policy))
        arena = create_arena(layout.fingerprint, layout.block_bytes, num_slots)
        performer = Performer(
            layout.fingerprint, arena.slots, volume, self._manifest, self._read_pool
        )
        cache = Cache(
            engine, arena, volume, performer, self._clock, self._on_event, self._on_broken
        )
        cache.start()
        self._caches[layout.fingerprint] = cache
        return cache

    def _salt_of(self, tenant: str) -> bytes:
        """Return a tenant's secret salt, made and kept at its first block."""
        if tenant not in self._salts:
            if len(self._salts) >= self._settings.limits.max_tenants:
                raise LimitReachedError(
                    f"{len(self._salts)} tenants have a salt", "raise limits.max_tenants"
                )
            self._salts[tenant] = secrets.token_bytes(SALT_BYTES)
            self._manifest.put_salt(tenant, self._salts[tenant])
        return self._salts[tenant]


def _restore(
    sessions: Iterable[SessionRecord],
    blocks: Iterable[BlockRecord],
    engine: CacheEngine,
    now_ns: int,
) -> None:
    engine.restore(sessions, blocks, now_ns)


def _is_stored(key: SessionKey, engine: CacheEngine, _now_ns: int) -> bool:
    return engine.session_info(key) is not None


def ssd_bytes(configured: int | None, directory: Path) -> int:
    """Size of a volume: as configured, or a fraction of the free space, never less than it has."""
    if configured is not None:
        return configured
    used = sum(path.stat().st_size for path in directory.glob("*.segment"))
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return max(used, int((free + used) * AUTO_FRACTION))
