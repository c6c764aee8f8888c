"""Erases one tenant or all: drops their KV from every tier, and destroys their keys.

1. All caches refuse the tenants' calls (kvd/core/operations/erasing.py). The tenants' sessions are
   dropped. Once their running operations have ended, free memory is zeroed.
2. If all tenants are erased, and there may be plain blocks from a time without encryption, the
   segments are removed.
3. The tenants' keys and salts are deleted from the index. The entries of their sessions and blocks
   were removed before, in order; entries that no cache knows of are deleted together with the keys.
   Once that is durable, and the keys are in no file of the database any more, the tenants are
   erased.
4. The tenants' calls are accepted again. They get new keys and salts.

A kill before step 3 is durable leaves the keys, and the sessions that were not dropped yet. Then
the erasure has not happened, and no caller was told that it has. A kill after step 3 leaves nothing
that could be read.
"""

import asyncio
from dataclasses import dataclass

from kvd.caches.caches import Caches
from kvd.caches.tenant_secrets import has_segments
from kvd.core.records.records import FlushAnswer
from kvd.errors import NotDurableError
from kvd.runtime.cache import Cache
from kvd.wire.events import EventHub
from shared.process.log import get_logger
from shared.types.errors import StateError

STEP_SESSIONS = 200  # sessions dropped without a break: blocks the loop for some milliseconds
POLL_S = 0.05  # longest time between two checks for operations that are under way
PURGE_S = 30.0  # longest wait for the deletion of the keys

log = get_logger(__name__)


class NotErasableError(StateError):
    """Deleting keys would not erase everything that was requested."""

    reason = "not_erasable"


@dataclass(frozen=True)
class Erasure:
    """The result of an erasure.

    Attributes:
        tenants: tenants whose keys were destroyed.
        num_sessions: number of dropped sessions.
        freed_bytes: bytes freed in all tiers.
    """

    tenants: tuple[str, ...]
    num_sessions: int
    freed_bytes: int


class TenantEraser:
    """Erases tenants, one call at a time."""

    def __init__(self, caches: Caches, events: EventHub) -> None:
        self._caches = caches
        self._events = events
        self._erasing = asyncio.Lock()

    def tenants_to_erase(self, tenant: str | None) -> tuple[str, ...]:
        """Return the tenants that erase() would erase: one, or all (None).

        Raises:
            NotErasableError: deleting keys would not erase everything.
        """
        secrets = self._caches.secrets
        if secrets.keys is None:
            raise NotErasableError(
                "the SSD tier is not encrypted, so nothing can be erased by deleting a key",
                "flush without --secure, or set encryption.key_file first",
            )
        if tenant is not None and secrets.note.has_plain:
            raise NotErasableError(
                "the SSD tier may hold unencrypted blocks from before, which no deleted key erases",
                "flush everything once, which removes them: kvd flush --secure --all",
            )
        stored_tenants = secrets.keys.tenants
        return stored_tenants if tenant is None else tuple(t for t in stored_tenants if t == tenant)

    async def erase(self, tenant: str | None) -> Erasure:
        """Erase one tenant, or all (None). When this returns, nothing of them can be read.

        Raises:
            NotErasableError: not everything can be erased.
            NotDurableError: memory could not be zeroed, or the disk has not deleted the keys yet.
        """
        self.tenants_to_erase(tenant)
        if self._caches.unavailable:
            raise NotErasableError(
                f"{len(self._caches.unavailable)} layouts are unavailable, and their data in "
                "memory and segments cannot be erased",
                "restore their files, or decide what happens to them with kvd reopen; kvd stats "
                "lists them",
            )
        async with self._erasing:
            self._caches.block_tenants(lambda name: tenant in (None, name))
            try:
                answers = [await self._clear(cache) for cache in list(self._caches)]
                await self._remove_segments(tenant)
                tenants = self.tenants_to_erase(tenant)
                await self._drop_keys(tenants)
                self._forget(tenant)
            finally:
                self._caches.unblock_tenants()
        num_sessions = sum(answer.num_sessions for answer in answers)
        log.info("tenants_erased", tenants=len(tenants), sessions=num_sessions)
        return Erasure(tenants, num_sessions, sum(answer.freed_bytes for answer in answers))

    def _forget(self, tenant: str | None) -> None:
        """Forget the histories and recent events of the sessions, which name their ids."""
        for cache in self._caches:
            cache.act(lambda core: core.erasing.forget(tenant))
        self._events.forget(tenant)

    async def _clear(self, cache: Cache) -> FlushAnswer:
        """Drop the tenants' sessions in one cache, and zero its free memory."""
        num_sessions = freed_bytes = 0
        while True:
            dropped = cache.act(lambda core: core.erasing.step(STEP_SESSIONS))
            num_sessions += dropped.num_sessions
            freed_bytes += dropped.freed_bytes
            if cache.act(lambda core: core.erasing.is_gone()):
                break
            is_dropping = dropped.num_sessions or cache.act(lambda core: core.erasing.has_unvisited)
            await (asyncio.sleep(0) if is_dropping else cache.wait_for_change(POLL_S))
        cache.act(lambda core: core.erasing.wipe())
        while cache.act(lambda core: core.erasing.is_wiping()):
            await cache.wait_for_change(POLL_S)
        if not cache.act(lambda core: core.erasing.is_wiped()):
            raise NotDurableError(
                "the memory of the dropped sessions could not be overwritten with zeros",
                "read the log of kvd, and stop kvd with SIGINT, which frees the memory",
            )
        return FlushAnswer(num_sessions, freed_bytes, ())

    async def _remove_segments(self, tenant: str | None) -> None:
        """Remove all segments if they may hold plain blocks; none of them is in use."""
        if tenant is not None or not self._caches.secrets.note.has_plain:
            return
        # First the entries that name extents: after a kill they must not name removed segments.
        await self._caches.wait_until_committed()
        for cache in list(self._caches):
            while not cache.is_quiescent:
                await cache.wait_for_change(POLL_S)
            cache.remove_segments()
        if has_segments(self._caches.directory):
            raise NotErasableError(
                f"{self._caches.directory} contains segments that kvd does not know",
                "delete them (volumes that were set aside, for example), then run the command "
                "again",
            )
        self._caches.secrets.record_no_plain()

    async def _drop_keys(self, tenants: tuple[str, ...]) -> None:
        loop = asyncio.get_running_loop()
        dropped = asyncio.Event()
        self._caches.secrets.drop(tenants, lambda: loop.call_soon_threadsafe(dropped.set))
        try:
            async with asyncio.timeout(PURGE_S):
                await dropped.wait()
        except TimeoutError as error:
            raise NotDurableError(
                "the keys are no longer used, but not deleted from the disk yet",
                "read the log of kvd: the disk may be full, or a program reads manifest.db; then "
                "run the command again",
            ) from error
