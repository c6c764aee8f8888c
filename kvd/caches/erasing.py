"""Erasing a tenant, or all: from every tier, and so that nothing on SSD can be read any more.

1. the tenants are shut out of every cache (kvd/core/operations/erasing.py), their sessions
   dropped, what is being moved waited for; then free memory is zeroed;
2. if all is erased, and there may be plain blocks from a time without encryption, the segments are
   removed;
3. the tenants' keys and salts are deleted: the entries of their sessions and blocks went before, in
   the same order, and those that no cache knows of go with them. Once that is durable, and in no
   file of the database any more, they are erased;
4. the tenants are let in again; they get new keys and salts.

A kill before 3 is durable leaves the keys, and whatever sessions were not dropped yet: then it has
not happened, and no caller got another answer. A kill after it leaves nothing that could be read.
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

STEP_SESSIONS = 200  # dropped in one go: some milliseconds
POLL_S = 0.05  # upper bound between two looks whether what was moved has arrived
PURGE_S = 30.0  # how long the disk may take to delete the keys

log = get_logger(__name__)


class NotErasableError(StateError):
    """What is asked for is not erased by deleting a key."""

    reason = "not_erasable"


@dataclass(frozen=True)
class Erased:
    """What was erased."""

    tenants: tuple[str, ...]
    num_sessions: int
    freed_bytes: int


class TenantEraser:
    """Erases tenants, one call at a time."""

    def __init__(self, caches: Caches, events: EventHub) -> None:
        self._caches = caches
        self._events = events
        self._erasing = asyncio.Lock()

    def named(self, tenant: str | None) -> tuple[str, ...]:
        """Return the tenants that would be erased: one, or all there are.

        Raises:
            NotErasableError: deleting keys would not do.
        """
        secrets = self._caches.secrets
        if secrets.keys is None:
            raise NotErasableError(
                "nothing is encrypted at rest, so nothing can be erased by its key",
                "flush without --secure, or set encryption.key_file first",
            )
        if tenant is not None and secrets.note.has_plain:
            raise NotErasableError(
                "blocks from a time without encryption may be on SSD, which no key erases",
                "flush everything once, which removes them: kvd flush --secure --all",
            )
        stored_tenants = secrets.keys.tenants
        return stored_tenants if tenant is None else tuple(t for t in stored_tenants if t == tenant)

    async def erase(self, tenant: str | None) -> Erased:
        """Erase one tenant, or all (None); nothing of it is there any more when this returns.

        Raises:
            NotErasableError: deleting keys would not do; nothing was done.
            NotDurableError: the disk has not taken it yet.
        """
        self.named(tenant)
        if self._caches.unavailable:
            raise NotErasableError(
                f"{len(self._caches.unavailable)} layouts are unavailable, and what they hold in "
                "memory and segments cannot be erased",
                "bring their files back, or decide about them with kvd reopen; see kvd stats",
            )
        async with self._erasing:
            self._caches.shut_out(lambda name: tenant in (None, name))
            try:
                answers = [await self._clear(cache) for cache in list(self._caches)]
                await self._remove_segments(tenant)
                tenants = self.named(tenant)
                await self._drop_keys(tenants)
                self._forget(tenant)
            finally:
                self._caches.let_in()
        num_sessions = sum(answer.num_sessions for answer in answers)
        log.info("tenants_erased", tenants=len(tenants), sessions=num_sessions)
        return Erased(tenants, num_sessions, sum(answer.freed_bytes for answer in answers))

    def _forget(self, tenant: str | None) -> None:
        """Forget what happened to the sessions, which is kept by their ids."""
        for cache in self._caches:
            cache.act(lambda core: core.erasing.forget(tenant))
        self._events.forget(tenant)

    async def _clear(self, cache: Cache) -> FlushAnswer:
        """Drop the tenants' sessions of one cache, and zero what is free of its memory."""
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
                "memory of the sessions that were dropped could not be zeroed",
                "see the log of kvd, and stop it with SIGINT, which gives the memory up",
            )
        return FlushAnswer(num_sessions, freed_bytes, ())

    async def _remove_segments(self, tenant: str | None) -> None:
        """Remove what was written before there was a key; nothing of it is in use."""
        if tenant is not None or not self._caches.secrets.note.has_plain:
            return
        await self._caches.committed()  # of the entries that name extents
        for cache in list(self._caches):
            while not cache.is_still:
                await cache.wait_for_change(POLL_S)
            cache.remove_segments()
        if has_segments(self._caches.directory):
            raise NotErasableError(
                f"segments that kvd does not know are left in {self._caches.directory}",
                "delete them: volumes that were set aside, say; then do it again",
            )
        self._caches.secrets.has_no_plain()

    async def _drop_keys(self, tenants: tuple[str, ...]) -> None:
        loop = asyncio.get_running_loop()
        dropped = asyncio.Event()
        self._caches.secrets.drop(tenants, lambda: loop.call_soon_threadsafe(dropped.set))
        try:
            async with asyncio.timeout(PURGE_S):
                await dropped.wait()
        except TimeoutError as error:
            raise NotDurableError(
                "the keys are forgotten, but not deleted from the disk yet",
                "see the log of kvd: the disk may be full, or somebody reads manifest.db; "
                "then do it again",
            ) from error
