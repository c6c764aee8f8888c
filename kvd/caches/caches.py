"""All layouts' caches: built from the index at start, or at the first attach with a layout.

A layout takes its part of DRAM, an arena, when its first engine attaches (or with the arena that an
earlier kvd has left). When all arenas together would exceed their bound, layouts without engines
give theirs up, least recently opened first. Of SSD each layout takes what it fills, up to its own
budget and that of the tier.
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

SERVER_ID = "server_id"  # in the index's meta
COMMIT_S = 10.0  # how long an operator waits for the disk

log = get_logger(__name__)


class Caches:
    """The caches by layout fingerprint.

    Attributes:
        keep: what lets arenas outlive this process: "fdstore", "file" or "none".
        secrets: the tenants' salts and keys.
        unavailable: layouts in the index that have no cache: they cannot be opened.
        directory: where all volumes are.
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
        self._server_id = ""  # not asked for yet
        self._is_erased: Callable[[str], bool] | None = None  # whom shut_out has named
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
        """Return, of all layouts, jobs that wait for a thread, and bytes of the I/O that runs."""
        return len(self._io), self._io.bytes_in_flight

    def server_id(self) -> str:
        """Return what this state directory is called among others: random, kept in the index."""
        if not self._server_id:
            self._server_id = self._manifest.meta(SERVER_ID) or secrets.token_hex(8)
            self._manifest.put_meta(SERVER_ID, self._server_id)
        return self._server_id

    def use(self, settings: Settings) -> None:
        """Hold other limits from now on, in every cache; tiers stay as large as they are."""
        self._settings = self._builder.settings = settings
        limits = self._builder.limits()
        for cache in self:
            cache.act(lambda core: core.set_limits(limits))

    def restore(self) -> None:
        """Build the cache of every layout in the index, with the arenas that were left.

        Reads the index and the arenas' journals, never the data.
        """
        self.secrets.open(self._settings.encryption, self.directory)
        kept = self._arenas.find()
        for row in self._manifest.layouts():
            self._try(UnavailableLayout(row, kept.pop(row.fingerprint, None)))
        for arena in kept.values():
            self._arenas.discard(arena, "its layout is not in the index")

    def retry_unavailable(self) -> None:
        """Try again to open layouts whose time has come; now and then."""
        if not self._opening.locked():  # not waited for: our caller has a watchdog to calm
            for found in self.unavailable.due():
                self._try(found)

    async def reopen(self, prefix: str, *, accept_loss: bool, set_aside: bool) -> str:
        """Open an unavailable layout, or do with it what an operator has decided.

        Args:
            prefix: how its fingerprint begins.
            accept_loss: do without the blocks that are not there.
            set_aside: rename its entries and files instead, so that it begins anew.

        Returns:
            Its fingerprint, or the name that its entries and files have now.

        Raises:
            LayoutUnavailableError: it still cannot be opened.
            NotSetAsideError: its files cannot be renamed.
            UnknownLayoutError, UnclearSelectionError: no layout, or several, are meant.
        """
        async with self._opening:
            found = self.unavailable.find(prefix)
            if set_aside:
                name = self._opener.set_aside(found)
                self.unavailable.drop(found)
                await self.committed()
                return name
            if not self._try(found, accept_loss=accept_loss):
                raise found.error(time.monotonic())
            return found.row.fingerprint

    async def open(self, layout: KVLayout, *, prefault: bool = True) -> tuple[Cache, Arena]:
        """Return the cache of a layout, made if there is none, and its arena.

        An arena that is not prefaulted takes only the memory that is used of it.

        Raises:
            LimitReachedError: limits.max_layouts are stored, and none of them is empty.
            ArenaTooSmallError: the DRAM tier has no room for even two blocks more.
            LayoutUnavailableError: it is stored, and cannot be opened now.
        """
        async with self._opening:
            self._try_for(layout)
            cache = self._caches.get(layout.fingerprint)
            num_layouts = len(self._caches) + len(self.unavailable)
            if cache is None and num_layouts >= self._settings.limits.max_layouts:
                await self._forget_a_layout()
            arena = None if cache is None else cache.arena
            if cache is None or arena is None:
                num_slots = await self._room.find(layout)
                cache = cache or self._add_new(layout)  # not before: layouts stay in the index
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
        """Return the caches of models whose fingerprints start so ("": all), in a fixed order."""
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
                "it may be of a layout that is unavailable: kvd stats"
                if self.unavailable
                else "list what is stored with: kvd ls",
            )
        if len(found) > 1:
            models = ", ".join(full.model[:12] for _, full in found)
            raise AmbiguousSessionError(
                f"session {key.session_id!r} is stored under several models ({models})",
                "name one of them with --model",
            )
        return found[0]

    def shut_out(self, is_erased: Callable[[str], bool]) -> None:
        """Refuse the calls of tenants that are being erased, of every layout; see `let_in`."""
        self._is_erased = is_erased
        for cache in self:
            cache.act(lambda core: core.erasing.begin(is_erased))

    def let_in(self) -> None:
        """Refuse nobody's calls any more."""
        self._is_erased = None
        for cache in self:
            cache.act(lambda core: core.erasing.end())

    @property
    def index_queued_bytes(self) -> int:
        """Bytes of index entries that are not committed yet."""
        return self._manifest.queued_bytes

    async def committed(self) -> None:
        """Return once what was changed so far would survive a kill.

        Raises:
            NotDurableError: the index has not taken it within COMMIT_S.
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
                "the change is in effect, but not in the index yet",
                "see the log of kvd: the disk may be full",
            ) from error

    async def close(self, *, keep_dram: bool) -> None:
        """Stop every cache; `keep_dram` leaves the arenas where the next kvd finds them."""
        # Waited for: a read must not find its file closed and another one under its number.
        await asyncio.to_thread(self._io.close)
        self.unavailable.close()
        for cache in self._caches.values():
            await cache.close(keep_dram=keep_dram)
        self._arenas.log_kept()

    # -------------------------------------------------------------------------------------- inside

    def _add(self, cache: Cache) -> Cache:
        """Let a cache that was built be found."""
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

    def _try_for(self, layout: KVLayout) -> None:
        """See that a layout is not unavailable, trying it again if its time has come.

        Raises:
            LayoutUnavailableError: it is.
        """
        found = self.unavailable.get(layout.fingerprint)
        now_s = time.monotonic()
        if found and (now_s < found.may_try_at_s or not self._try(found, layout)):
            raise found.error(now_s)

    def _try(
        self, found: UnavailableLayout, layout: KVLayout | None = None, *, accept_loss: bool = False
    ) -> bool:
        """Restore a layout; False, with its reason noted, if it cannot be."""
        restore = partial(self._restore_layout, found, layout, accept_loss=accept_loss)
        return self.unavailable.attempt(found, restore)

    def _restore_layout(
        self, found: UnavailableLayout, asked: KVLayout | None, *, accept_loss: bool
    ) -> None:
        """Build the cache of a layout in the index; see LayoutOpener.open for the rest."""
        opened = self._opener.open(found, asked, self._room.taken_bytes(), accept_loss=accept_loss)
        num_extents = self._opener.num_extents(opened.volume.shape)
        num_slots = 0 if opened.adoption is None else opened.adoption.arena.slots.num_slots
        cache = self._builder.build(opened.layout, opened.volume, num_extents, num_slots)
        self._builder.restore(self._add(cache), opened)
        cache.measure_space()

    async def _forget_a_layout(self) -> None:
        """Remove a layout without engines and sessions: that of a model served no more, say.

        Raises:
            LimitReachedError: every layout has some.
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
            f"{len(self._caches)} layouts are stored",
            "raise limits.max_layouts, or flush the sessions of a model that is served no more",
        )

    async def _remove(self, cache: Cache) -> None:
        """Close a cache for good, with its files, once no entry names them any more."""
        try:
            await self.committed()
        except BaseException:
            await cache.close(keep_dram=False)
            raise
        await cache.remove()


def _is_stored(key: SessionKey, engine: CacheEngine) -> bool:
    return engine.inspection.info(key) is not None
