"""The Operator service: flush, pin, set TTLs, end a process that hangs on to slots, verify."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from kvd.caches.caches import Caches
from kvd.caches.erasing import TenantEraser
from kvd.caches.scrubber import Scrubber
from kvd.caches.session_listing import scan_sessions
from kvd.config import Settings
from kvd.core.engine import CacheEngine
from kvd.core.inspection.session_filter import SessionFilter
from kvd.core.records.entries import Pin
from kvd.core.records.errors import InvalidRequestError
from kvd.core.records.records import FlushAnswer, LeaseInfo
from kvd.engines.attached import Engines
from kvd.errors import NoHolderError, NotOursToKillError, UnknownModelError
from kvd.rpc.operator_messages import verify_message
from kvd.runtime.cache import Cache
from kvd.session_files.transfers import Transfers
from kvd.wire.messages import key_of, session_message, ttl_ns_of
from kvd.wire.selection import allowed_tenants, check_allowed, filter_of, is_of_one, tenant_to_erase
from shared.config.reload import Changes
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.types.session_key import SessionKey

GONE_S = 5.0  # how long KillHolder waits for the end of a process
GONE_POLL_S = 0.05  # upper bound between two looks whether its leases have ended
FLUSH_BATCH = 500  # sessions dropped in one go: about 10 ms


class OperatorService(kvd_pb2_grpc.OperatorServicer):  # type: ignore[misc]  # the stubs are untyped
    """What an operator may change; an answer means that a restart will not undo it.

    Args:
        caches: the caches of all layouts.
        engines: engines, which may hold leases.
        scrubber: checks what is stored.
        reload: puts the settings into force as they are now.
        eraser: drops a tenant's keys, and with them its sessions.
        transfers: session files out and in.
    """

    def __init__(
        self,
        caches: Caches,
        engines: Engines,
        scrubber: Scrubber,
        reload: Callable[[], Changes[Settings]],
        eraser: TenantEraser,
        transfers: Transfers,
    ) -> None:
        self._caches = caches
        self._engines = engines
        self._scrubber = scrubber
        self._reload = reload
        self._eraser = eraser
        self._transfers = transfers

    async def Flush(self, request: pb.FlushRequest, _: Any) -> pb.FlushResponse:  # noqa: N802
        """Drop the KV of one session, of those that a filter is for, or everything."""
        is_one = is_of_one(request)
        if request.secure:
            return await self._erase(request)
        response = pb.FlushResponse(unavailable_layouts=len(self._caches.unavailable))
        if is_one:
            cache, key = self._found(request.session)
            _add(
                response, cache.act(lambda core: core.sessions.flush(key, dry_run=request.dry_run))
            )
        else:
            caches = self._caches.of_model(request.filter.model)
            wanted = filter_of(request.filter, allowed_tenants())
            await flush_selected(caches, wanted, response, dry_run=request.dry_run)
        if not request.dry_run:
            await self._caches.committed()
        return response

    async def Pin(self, request: pb.PinRequest, _: Any) -> pb.PinResponse:  # noqa: N802
        """Protect a session from eviction and expiry."""
        pin = Pin.SOFT if request.soft else Pin.HARD
        cache, key = self._found(request.session)
        cache.act(lambda core: core.sessions.pin(key, pin))
        await self._caches.committed()
        return pb.PinResponse()

    async def Unpin(self, request: pb.PinRequest, _: Any) -> pb.PinResponse:  # noqa: N802
        """Take the protection away."""
        cache, key = self._found(request.session)
        cache.act(lambda core: core.sessions.pin(key, Pin.NONE))
        await self._caches.committed()
        return pb.PinResponse()

    async def SetTtl(self, request: pb.SetTtlRequest, _: Any) -> pb.SetTtlResponse:  # noqa: N802
        """Set how long a session lives after its last use."""
        cache, key = self._found(request.session)
        ttl_ns = ttl_ns_of(request.ttl_s)
        message = cache.act(
            lambda core: session_message(
                core.sessions.set_ttl(key, ttl_ns), cache.layout, core.now_ns
            )
        )
        await self._caches.committed()
        return pb.SetTtlResponse(expires_in_s=message.expires_in_s)

    async def KillHolder(self, request: pb.KillHolderRequest, _: Any) -> pb.KillHolderResponse:  # noqa: N802
        """End a process that holds leases, and wait for them to end with it."""
        if not request.pid:  # how a process of another PID namespace looks
            raise InvalidRequestError("no process is named", "name one that kvd leases shows")
        held = self._leases_of(request.pid)
        if not held or not self._kill(request.pid):
            raise NoHolderError(
                f"process {request.pid} holds no lease", "list who does with: kvd leases"
            )
        loop = asyncio.get_running_loop()
        until = loop.time() + GONE_S
        while (left := self._leases_of(request.pid)) and loop.time() < until:
            await left[0][0].wait_for_change(GONE_POLL_S)
        return pb.KillHolderResponse(
            num_leases=len(held),
            num_slots=sum(lease.num_slots for _, lease in held),
            gone=not left,
        )

    async def ReopenLayout(  # noqa: N802
        self, request: pb.ReopenLayoutRequest, _: Any
    ) -> pb.ReopenLayoutResponse:
        """Open an unavailable layout, or do with it what the operator has decided."""
        if request.accept_loss and request.set_aside:
            raise InvalidRequestError("two decisions about one layout", "decide for one of them")
        name = await self._caches.reopen(
            request.layout, accept_loss=request.accept_loss, set_aside=request.set_aside
        )
        return pb.ReopenLayoutResponse(name=name)

    async def ReloadSettings(  # noqa: N802
        self, _request: pb.ReloadSettingsRequest, _: Any
    ) -> pb.ReloadSettingsResponse:
        """Read the settings again, and put into force what may change live."""
        found = self._reload()
        return pb.ReloadSettingsResponse(applied=found.applied, needs_restart=found.needs_restart)

    async def ExportSession(  # noqa: N802
        self, request: pb.ExportSessionRequest, _: Any
    ) -> AsyncIterator[pb.SessionFilePart]:
        """Send a session as a file."""
        async with aclosing(self._transfers.export(request, allowed_tenants())) as parts:
            async for part in parts:
                yield part

    async def ImportSession(  # noqa: N802
        self, requests: AsyncIterator[pb.ImportSessionRequest], _: Any
    ) -> pb.ImportSessionResponse:
        """Store a session from a file."""
        return await self._transfers.import_session(requests, allowed_tenants())

    async def AnswerWanted(  # noqa: N802
        self, request: pb.AnswerWantedRequest, _: Any
    ) -> pb.AnswerWantedResponse:
        """Take what became of a session that turns want: whether it is worth waiting for."""
        key = key_of(request.session)
        check_allowed(key, allowed_tenants())
        for cache in self._caches.of_model(key.model):
            cache.act(lambda core: core.wanting.answered(key, is_coming=request.coming))
        return pb.AnswerWantedResponse()

    async def Verify(self, request: pb.VerifyRequest, _: Any) -> AsyncIterator[pb.VerifyProgress]:  # noqa: N802
        """Check every copy; it ends with its caller."""
        caches = self._caches.of_model(request.model)
        if request.model and not caches:  # not to be taken for "nothing is corrupt"
            raise UnknownModelError(
                f"nothing is stored of a model {request.model[:64]!r}",
                "see which there are: kvd stats",
            )
        async with aclosing(self._scrubber.run(caches, repair=request.repair)) as run:
            async for progress in run:
                yield verify_message(
                    progress.report, progress.layout, progress.num_copies, done=progress.done
                )

    async def _erase(self, request: pb.FlushRequest) -> pb.FlushResponse:
        """Drop a tenant's sessions, or all, so that nothing of them can be read again."""
        tenant = tenant_to_erase(request, allowed_tenants())
        response = pb.FlushResponse()
        if request.dry_run:
            response.erased_tenants.extend(self._eraser.named(tenant))
            wanted = filter_of(request.filter, None)
            await flush_selected(list(self._caches), wanted, response, dry_run=True)
            return response
        erased = await self._eraser.erase(tenant)
        response.sessions, response.bytes = erased.num_sessions, erased.freed_bytes
        response.erased_tenants.extend(erased.tenants)
        return response

    def _found(self, named: pb.SessionKey) -> tuple[Cache, SessionKey]:
        """Return the session that a request names, if its caller may see it."""
        key = key_of(named)
        check_allowed(key, allowed_tenants())
        return self._caches.find(key)

    def _kill(self, pid: int) -> bool:
        try:
            return self._engines.kill(pid)
        except PermissionError as error:
            raise NotOursToKillError(
                f"process {pid} is another user's", f"as that user, or root: kill -KILL {pid}"
            ) from error

    def _leases_of(self, pid: int) -> list[tuple[Cache, LeaseInfo]]:
        """Return what a process holds."""
        engine_ids = {info.engine_id for info in self._engines.infos() if info.pid == pid}
        return [
            (cache, lease)
            for cache in self._caches
            for lease in cache.act(lambda core: core.inspection.leases())
            if lease.engine_id in engine_ids
        ]


async def flush_selected(
    caches: Iterable[Cache],
    wanted: SessionFilter,
    response: pb.FlushResponse,
    *,
    dry_run: bool,
) -> None:
    """Drop those of the sessions there are now that are meant, bit by bit: engines work meanwhile.

    Args:
        caches: caches to look through.
        wanted: filter of the sessions that are meant.
        response: response to which what was freed, and what is leased, is added.
        dry_run: only sum up what would be.
    """
    meant: dict[Cache, list[SessionKey]] = {}
    async for cache, ranked in scan_sessions(caches, wanted):
        meant.setdefault(cache, []).extend(key for _, key in ranked)
    for cache, keys in meant.items():
        if dry_run:
            _add(response, await _would_flush(cache, keys, wanted))
            continue
        for bit in _bits(keys):
            _add(response, cache.act(partial(_flush_selected, bit, wanted)))
            await asyncio.sleep(0)


async def _would_flush(cache: Cache, keys: list[SessionKey], wanted: SessionFilter) -> FlushAnswer:
    """Return what a flush would do; what two sessions share it would free with both of them."""
    flushed: dict[SessionKey, None] = {}
    leased: list[SessionKey] = []
    for bit in _bits(keys):
        found = cache.act(partial(_flushable, bit, wanted))
        flushed |= dict.fromkeys(found[0])
        leased += found[1]
        await asyncio.sleep(0)
    num_bytes = 0
    counted: Counter[bytes] = Counter()
    for bit in _bits(list(flushed)):
        num_bytes += cache.act(partial(_freed_bytes, bit, counted))
        await asyncio.sleep(0)
    return FlushAnswer(len(flushed), num_bytes, tuple(leased))


def _bits(keys: list[SessionKey]) -> Iterator[list[SessionKey]]:
    return (keys[start : start + FLUSH_BATCH] for start in range(0, len(keys), FLUSH_BATCH))


def _flush_selected(
    keys: list[SessionKey], wanted: SessionFilter, core: CacheEngine
) -> FlushAnswer:
    return core.sessions.flush_selected(keys, wanted)


def _flushable(
    keys: list[SessionKey], wanted: SessionFilter, core: CacheEngine
) -> tuple[tuple[SessionKey, ...], tuple[SessionKey, ...]]:
    return core.sessions.flushable(keys, wanted)


def _freed_bytes(
    keys: list[SessionKey],
    counted: Counter[bytes],
    core: CacheEngine,
) -> int:
    return core.sessions.freed_bytes(keys, counted)


def _add(response: pb.FlushResponse, answer: FlushAnswer) -> None:
    response.sessions += answer.num_sessions
    response.bytes += answer.freed_bytes
    response.skipped_leased.extend(key_message(key) for key in answer.skipped_leased)
