"""The caches of all layouts: built from the index at the start, or when an engine first attaches.

A layout gets an arena, its part of DRAM, when its first engine attaches, or by adopting the arena
of an earlier kvd. When all arenas together would exceed their bound, layouts without engines
release theirs, the least recently opened first. On SSD each layout takes the space that it fills,
up to its own budget and that of the tier.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial

from kvd.caches.building import CacheBuilder, DramRoom
from kvd.caches.layout_opening import LayoutOpener
from kvd.caches.tenant_secrets import TenantSecrets
from kvd.caches.unavailable import UnavailableLayout, UnavailableLayouts
from kvd.config import Settings
from kvd.core.engine import CacheEngine
from kvd.core.records.actions import Emit
from kvd.core.records.errors import UnknownSessionError
from kvd.engines.attached import Engines
from kvd.errors import AmbiguousSessionError, LimitReachedError, NotDurableError
from kvd.host.clock import Clock
from kvd.runtime.cache import Cache
from kvd.tiers.arena import Arena
from kvd.tiers.arena_store import ArenaOptions, ArenaStore, resolve_keep
from kvd.tiers.faults import Faults
from kvd.tiers.io_threads import IoPool
from kvd.tiers.manifest import Manifest
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey, session_key

SERVER_ID = "server_id"  # name of a meta value of the index
COMMIT_S = 10.0  # longest wait of an operator for the disk

log = get_logger(__name__)


class Caches:
    """The caches of one kvd, by layout fingerprint. Iteration yields the caches.

    Attributes:
        keep: what keeps arenas for the next kvd: "fdstore", "file" or "none".
        secrets: salts and keys of tenants.
        unavailable: layouts of the index that cannot be opened, and so have no cache.
        directory: directory of all volumes.
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
        self._engines = engines
        self._caches: dict[str, Cache] = {}
        self._server_id = ""  # not read yet
        self._is_erased: Callable[[str], bool] | None = None  # see block_tenants()
        self.secrets = TenantSecrets(manifest)
        self._opening = asyncio.Lock()
        self._io = IoPool(settings.ssd.io_threads, settings.ssd.in_flight_bytes)
        self._io.start()
        self.keep = resolve_keep(settings.dram.keep, settings.engine_uids())
        options = ArenaOptions(
            keep=self.keep,
            directory=settings.dram.directory,
            hugepages=settings.dram.hugepages,
            numa_node=settings.dram.numa_node,
        )
        self._arenas = ArenaStore(
            options, settings.state_dir, num_words=settings.limits.max_leases, faults=faults
        )
        self._opener = LayoutOpener(settings, manifest, self._arenas, self.secrets, faults)
        self._builder = CacheBuilder(
            settings=settings,
            manifest=manifest,
            clock=clock,
            engines=engines,
            io_pool=self._io,
            secrets=self.secrets,
            on_event=on_event,
            on_broken=on_broken,
        )
        self.directory = self._opener.directory
        self._room = DramRoom(self._opener.budgets, engines, self)
        self.unavailable = UnavailableLayouts(on_event)

    def __iter__(self) -> Iterator[Cache]:
        return iter(self._caches.values())

    def io_load(self) -> tuple[int, int]:
        """Return (jobs that wait for an I/O thread, bytes of I/O in flight) of all layouts."""
        return len(self._io), self._io.bytes_in_flight

    def server_id(self) -> str:
        """Return the id of this state directory: random, kept in the index, created if missing."""
        if not self._server_id:
            self._server_id = self._manifest.meta(SERVER_ID) or secrets.token_hex(8)
            self._manifest.put_meta(SERVER_ID, self._server_id)
        return self._server_id

    def apply_settings(self, settings: Settings) -> None:
        """Apply changed settings to every cache; the sizes of the tiers do not change."""
        self._settings = self._builder.settings = settings
        limits = self._builder.limits()
        for cache in self:
            cache.act(lambda core: core.set_limits(limits))

    def restore(self) -> None:
        """Build the caches of all layouts in the index, with the arenas of earlier kvds.

        Reads the index and the arenas' journals, never the data.
        """
        self.secrets.open(self._settings.encryption, self.directory)
        kept = self._arenas.find()
        for row in self._manifest.layouts():
            self._try_restore(UnavailableLayout(row, kept.pop(row.fingerprint, None)))
        for arena in kept.values():
            self._arenas.discard(arena, "its layout is not in the index")

    def retry_unavailable(self) -> None:
        """Try again to open unavailable layouts that are due. Called periodically."""
        if not self._opening.locked():  # never waits: the caller must ping the watchdog in time
            for unavailable in self.unavailable.due():
                self._try_restore(unavailable)

    async def reopen(self, prefix: str, *, accept_loss: bool, set_aside: bool) -> str:
        """Open an unavailable layout, accept its loss, or set it aside, as an operator decided.

        Args:
            prefix: first characters of its fingerprint.
            accept_loss: open it without its missing blocks.
            set_aside: rename its entries and files instead, so that the layout starts empty.

        Returns:
            Its fingerprint; or the new name of its entries and files, if it was set aside.

        Raises:
            LayoutUnavailableError: it still cannot be opened.
            NotSetAsideError: its files cannot be renamed.
            UnknownLayoutError: no unavailable layout has this prefix.
            UnclearSelectionError: several have it.
        """
        async with self._opening:
            unavailable = self.unavailable.find(prefix)
            if set_aside:
                name = self._opener.set_aside(unavailable)
                self.unavailable.drop(unavailable)
                await self.wait_until_committed()
                return name
            if not self._try_restore(unavailable, accept_loss=accept_loss):
                raise unavailable.error(time.monotonic())
            return unavailable.row.fingerprint

    async def open(self, layout: KVLayout, *, prefault: bool = True) -> tuple[Cache, Arena]:
        """Return the cache of a layout and its arena; create them if they do not exist.

        Args:
            layout: the layout.
            prefault: allocate all of the arena's memory in the background, if the settings say so.
                Else memory is allocated as it is used.

        Raises:
            LimitReachedError: limits.max_layouts are stored, and none of them is empty.
            ArenaTooSmallError: the DRAM tier has no room for even two blocks more.
            LayoutUnavailableError: the layout is stored, but cannot be opened now.
        """
        async with self._opening:
            self._check_available(layout)
            cache = self._caches.get(layout.fingerprint)
            num_layouts = len(self._caches) + len(self.unavailable)
            if cache is None and num_layouts >= self._settings.limits.max_layouts:
                await self._drop_empty_layout()
            arena = None if cache is None else cache.arena
            if cache is None or arena is None:
                num_slots = await self._room.find(layout)
                # Only after find(), which may raise: an added layout stays in the index.
                cache = cache or self._add_new(layout)
                arena = self._arenas.create(layout, num_slots)
                cache.mount(arena)
        cache.last_opened_s = asyncio.get_running_loop().time()
        if prefault and self._settings.dram.prefault:
            cache.prefault()
        return cache, arena

    def measure_space(self) -> None:
        """Adapt all volumes' capacities to the space on the disk. Called periodically."""
        for cache in self:
            cache.measure_space()

    def of_model(self, model: str) -> list[Cache]:
        """Return the caches of models with a fingerprint prefix ("": all), in a fixed order."""
        caches = sorted(self._caches.values(), key=lambda cache: cache.layout.fingerprint)
        return [cache for cache in caches if cache.layout.model.startswith(model)]

    def find(self, key: SessionKey) -> tuple[Cache, SessionKey]:
        """Find a stored session.

        Args:
            key: key of the session. Without a model it matches the session of any model.

        Returns:
            The session's cache, and its key with its model.

        Raises:
            UnknownSessionError: no such session is stored.
            AmbiguousSessionError: sessions of several models match.
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
                "it may be of a layout that is unavailable: kvd stats"
                if self.unavailable
                else "list what is stored with: kvd ls",
            )
        if len(found) > 1:
            models = ", ".join(full.model[:12] for _, full in found)
            raise AmbiguousSessionError(
                f"session {key.session_id!r} is stored under several models ({models})",
                "choose one with --model",
            )
        return found[0]

    def block_tenants(self, is_erased: Callable[[str], bool]) -> None:
        """Refuse calls for tenants that are being erased, until unblock_tenants().

        Args:
            is_erased: returns whether a tenant is being erased.
        """
        self._is_erased = is_erased
        for cache in self:
            cache.act(lambda core: core.erasing.begin(is_erased))

    def unblock_tenants(self) -> None:
        """Accept calls for all tenants again."""
        self._is_erased = None
        for cache in self:
            cache.act(lambda core: core.erasing.end())

    @property
    def index_queued_bytes(self) -> int:
        """Bytes of index entries that are not committed yet."""
        return self._manifest.queued_bytes

    async def wait_until_committed(self) -> None:
        """Wait until all changes so far are durable.

        Raises:
            NotDurableError: the index has not committed them within COMMIT_S.
        """
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        try:
            async with asyncio.timeout(COMMIT_S):
                for cache in tuple(self):
                    while cache.has_entries_waiting:
                        await cache.wait_for_change(COMMIT_S)
                self._manifest.when_committed(lambda: loop.call_soon_threadsafe(done.set))
                await done.wait()
        except TimeoutError as error:
            raise NotDurableError(
                "the change is in effect, but is not saved in the index yet",
                "read the log of kvd: the disk may be full",
            ) from error

    async def close(self, *, keep_dram: bool) -> None:
        """Stop all caches.

        Args:
            keep_dram: leave the arenas for the next kvd, if their backing can keep them.
        """
        # The I/O pool first: a running read must not use a descriptor that is closed, and may have
        # been given to another file.
        await asyncio.to_thread(self._io.close)
        self.unavailable.close()
        for cache in self._caches.values():
            await cache.close(keep_dram=keep_dram)
        self._arenas.log_kept()

    # ----------------------------------------------------------------------------------- internals

    def _add(self, cache: Cache) -> Cache:
        """Register a cache that was built; blocked tenants are blocked in it, too."""
        is_erased = self._is_erased
        if is_erased is not None:
            cache.act(lambda core: core.erasing.begin(is_erased))
        self._caches[cache.layout.fingerprint] = cache
        return cache

    def _add_new(self, layout: KVLayout) -> Cache:
        volume, row = self._opener.open_new(layout)
        num_extents = self._opener.num_extents(volume.shape)
        cache = self._add(self._builder.build(layout, volume, num_extents))
        self._manifest.put_layout(row)
        cache.measure_space()
        return cache

    def _check_available(self, layout: KVLayout) -> None:
        """Check that a layout is not unavailable; first try to restore it if that is due.

        Raises:
            LayoutUnavailableError: the layout is unavailable.
        """
        unavailable = self.unavailable.get(layout.fingerprint)
        now_s = time.monotonic()
        if unavailable and (
            now_s < unavailable.may_try_at_s or not self._try_restore(unavailable, layout)
        ):
            raise unavailable.error(now_s)

    def _try_restore(
        self,
        unavailable: UnavailableLayout,
        layout: KVLayout | None = None,
        *,
        accept_loss: bool = False,
    ) -> bool:
        """Try to restore a layout; if that fails, record the reason and return False."""
        restore = partial(self._restore_layout, unavailable, layout, accept_loss=accept_loss)
        return self.unavailable.attempt(unavailable, restore)

    def _restore_layout(
        self, unavailable: UnavailableLayout, layout: KVLayout | None, *, accept_loss: bool
    ) -> None:
        """Build the cache of a layout in the index; see LayoutOpener.open() for the arguments."""
        opened = self._opener.open(
            unavailable, layout, self._room.taken_bytes(), accept_loss=accept_loss
        )
        num_extents = self._opener.num_extents(opened.volume.shape)
        num_slots = 0 if opened.adoption is None else opened.adoption.arena.slots.num_slots
        cache = self._builder.build(opened.layout, opened.volume, num_extents, num_slots)
        self._builder.restore(self._add(cache), opened)
        cache.measure_space()

    async def _drop_empty_layout(self) -> None:
        """Remove a layout without engines and sessions, such as one of a retired model.

        Raises:
            LimitReachedError: every layout has engines or sessions.
        """
        empty = [c for c in self if c.is_idle and not c.stats().num_sessions]
        for cache in sorted(empty, key=lambda cache: cache.last_opened_s):
            if not self._engines.uses_cache(cache):
                del self._caches[cache.layout.fingerprint]
                self._manifest.drop_layout(cache.layout.fingerprint)
                await self._remove(cache)
                log.info("layout_forgotten", layout=cache.layout.fingerprint)
                return
        raise LimitReachedError(
            f"{len(self._caches)} layouts are stored, and no more are allowed",
            "raise limits.max_layouts, or flush the sessions of a model that is no longer served",
        )

    async def _remove(self, cache: Cache) -> None:
        """Close a cache and remove its files, once the index does not name them any more."""
        try:
            await self.wait_until_committed()
        except BaseException:
            await cache.close(keep_dram=False)
            raise
        await cache.remove()


def _is_stored(key: SessionKey, engine: CacheEngine) -> bool:
    return engine.inspection.info(key) is not None
