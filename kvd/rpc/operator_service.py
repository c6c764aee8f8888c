"""The Operator service: flush, pin, set TTLs, kill the holder of leases, verify, and others."""

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
from kvd.wire.selection import (
    allowed_tenants,
    check_allowed,
    filter_of,
    names_one_session,
    tenant_to_erase,
)
from shared.config.reload import Changes
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.types.session_key import SessionKey

GONE_S = 5.0  # how long KillHolder waits for the end of a process
GONE_POLL_S = 0.05  # longest time between two checks of its leases
FLUSH_BATCH = 500  # sessions dropped without a break: blocks the event loop for about 10 ms


class OperatorService(kvd_pb2_grpc.OperatorServicer):  # type: ignore[misc]  # the stubs are untyped
    """Servicer of operators' changes. A response means that the change is durable.

    Args:
        caches: caches of all layouts.
        engines: attached and quarantined engines, which may hold leases.
        scrubber: verifies stored blocks.
        reload: reads the settings again and applies them.
        eraser: destroys tenants' keys and drops their sessions.
        transfers: exports and imports session files.
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
        """Drop the KV of one session, of the sessions that a filter selects, or of all."""
        is_one = names_one_session(request)
        if request.secure:
            return await self._erase(request)
        response = pb.FlushResponse(unavailable_layouts=len(self._caches.unavailable))
        if is_one:
            cache, key = self._find_session(request.session)
            _add(
                response, cache.act(lambda core: core.sessions.flush(key, dry_run=request.dry_run))
            )
        else:
            caches = self._caches.of_model(request.filter.model)
            session_filter = filter_of(request.filter, allowed_tenants())
            await flush_selected(caches, session_filter, response, dry_run=request.dry_run)
        if not request.dry_run:
            await self._caches.wait_until_committed()
        return response

    async def Pin(self, request: pb.PinRequest, _: Any) -> pb.PinResponse:  # noqa: N802
        """Protect a session from eviction and expiry."""
        pin = Pin.SOFT if request.soft else Pin.HARD
        cache, key = self._find_session(request.session)
        cache.act(lambda core: core.sessions.pin(key, pin))
        await self._caches.wait_until_committed()
        return pb.PinResponse()

    async def Unpin(self, request: pb.PinRequest, _: Any) -> pb.PinResponse:  # noqa: N802
        """Remove a session's pin."""
        cache, key = self._find_session(request.session)
        cache.act(lambda core: core.sessions.pin(key, Pin.NONE))
        await self._caches.wait_until_committed()
        return pb.PinResponse()

    async def SetTtl(self, request: pb.SetTtlRequest, _: Any) -> pb.SetTtlResponse:  # noqa: N802
        """Set how long a session lives after its last use."""
        cache, key = self._find_session(request.session)
        ttl_ns = ttl_ns_of(request.ttl_s)
        message = cache.act(
            lambda core: session_message(
                core.sessions.set_ttl(key, ttl_ns), cache.layout, core.now_ns
            )
        )
        await self._caches.wait_until_committed()
        return pb.SetTtlResponse(expires_in_s=message.expires_in_s)

    async def KillHolder(self, request: pb.KillHolderRequest, _: Any) -> pb.KillHolderResponse:  # noqa: N802
        """Kill a process that holds leases, and wait until its leases have ended."""
        if not request.pid:  # a process in a foreign PID namespace is shown with pid 0
            raise InvalidRequestError(
                "no process is named", "send the pid of a process that kvd leases shows"
            )
        held = self._leases_of(request.pid)
        if not held or not self._kill(request.pid):
            raise NoHolderError(
                f"process {request.pid} holds no lease",
                "list the processes with leases with: kvd leases",
            )
        loop = asyncio.get_running_loop()
        until = loop.time() + GONE_S
        while (remaining := self._leases_of(request.pid)) and loop.time() < until:
            await remaining[0][0].wait_for_change(GONE_POLL_S)
        return pb.KillHolderResponse(
            num_leases=len(held),
            num_slots=sum(lease.num_slots for _, lease in held),
            gone=not remaining,
        )

    async def ReopenLayout(  # noqa: N802
        self, request: pb.ReopenLayoutRequest, _: Any
    ) -> pb.ReopenLayoutResponse:
        """Open an unavailable layout, accept its loss, or set it aside."""
        if request.accept_loss and request.set_aside:
            raise InvalidRequestError(
                "both decisions about a layout are given, accept_loss and set_aside",
                "send one of them",
            )
        name = await self._caches.reopen(
            request.layout, accept_loss=request.accept_loss, set_aside=request.set_aside
        )
        return pb.ReopenLayoutResponse(name=name)

    async def ReloadSettings(  # noqa: N802
        self, _request: pb.ReloadSettingsRequest, _: Any
    ) -> pb.ReloadSettingsResponse:
        """Read the settings again, and apply those that may change in a running kvd."""
        changes = self._reload()
        return pb.ReloadSettingsResponse(
            applied=changes.applied, needs_restart=changes.needs_restart
        )

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
        """Record whether a session that turns want will be fetched, so that they wait for it."""
        key = key_of(request.session)
        check_allowed(key, allowed_tenants())
        for cache in self._caches.of_model(key.model):
            cache.act(lambda core: core.wanting.on_answer(key, is_coming=request.coming))
        return pb.AnswerWantedResponse()

    async def Verify(self, request: pb.VerifyRequest, _: Any) -> AsyncIterator[pb.VerifyProgress]:  # noqa: N802
        """Verify every copy of every block; stops when the caller goes away."""
        caches = self._caches.of_model(request.model)
        if request.model and not caches:  # an empty result would look like "nothing is corrupt"
            raise UnknownModelError(
                f"nothing is stored for a model {request.model[:64]!r}",
                "list the models with: kvd stats",
            )
        async with aclosing(self._scrubber.run(caches, repair=request.repair)) as run:
            async for progress in run:
                yield verify_message(
                    progress.report, progress.layout, progress.num_copies, done=progress.done
                )

    async def _erase(self, request: pb.FlushRequest) -> pb.FlushResponse:
        """Drop the sessions of a tenant, or of all, and destroy the keys that seal them."""
        tenant = tenant_to_erase(request, allowed_tenants())
        response = pb.FlushResponse()
        if request.dry_run:
            response.erased_tenants.extend(self._eraser.tenants_to_erase(tenant))
            session_filter = filter_of(request.filter, None)
            await flush_selected(list(self._caches), session_filter, response, dry_run=True)
            return response
        erased = await self._eraser.erase(tenant)
        response.sessions, response.bytes = erased.num_sessions, erased.freed_bytes
        response.erased_tenants.extend(erased.tenants)
        return response

    def _find_session(self, named: pb.SessionKey) -> tuple[Cache, SessionKey]:
        """Return a session's cache and full key, if the caller may see the session.

        Raises:
            UnknownSessionError: it is not stored, or the caller may not see it.
        """
        key = key_of(named)
        check_allowed(key, allowed_tenants())
        return self._caches.find(key)

    def _kill(self, pid: int) -> bool:
        try:
            return self._engines.kill(pid)
        except PermissionError as error:
            raise NotOursToKillError(
                f"process {pid} belongs to another user, so kvd may not end it",
                f"as that user, or as root, run: kill -KILL {pid}",
            ) from error

    def _leases_of(self, pid: int) -> list[tuple[Cache, LeaseInfo]]:
        """Return the leases that a process holds."""
        engine_ids = {info.engine_id for info in self._engines.infos() if info.pid == pid}
        return [
            (cache, lease)
            for cache in self._caches
            for lease in cache.act(lambda core: core.inspection.leases())
            if lease.engine_id in engine_ids
        ]


async def flush_selected(
    caches: Iterable[Cache],
    session_filter: SessionFilter,
    response: pb.FlushResponse,
    *,
    dry_run: bool,
) -> None:
    """Drop the selected sessions in batches, so that engines are served in between.

    Args:
        caches: caches to flush.
        session_filter: selects among the sessions that are stored now.
        response: response to which freed bytes and leased sessions are added.
        dry_run: drop nothing; only count.
    """
    selected: dict[Cache, list[SessionKey]] = {}
    async for cache, ranked in scan_sessions(caches, session_filter):
        selected.setdefault(cache, []).extend(key for _, key in ranked)
    for cache, keys in selected.items():
        if dry_run:
            _add(response, await _dry_flush(cache, keys, session_filter))
            continue
        for batch in _batches(keys):
            _add(response, cache.act(partial(_flush_batch, batch, session_filter)))
            await asyncio.sleep(0)


async def _dry_flush(
    cache: Cache, keys: list[SessionKey], session_filter: SessionFilter
) -> FlushAnswer:
    """Return what a flush would do; a block shared by several flushed sessions counts once."""
    flushed: dict[SessionKey, None] = {}
    leased: list[SessionKey] = []
    for batch in _batches(keys):
        found = cache.act(partial(_flushable, batch, session_filter))
        flushed |= dict.fromkeys(found[0])
        leased += found[1]
        await asyncio.sleep(0)
    num_bytes = 0
    counted: Counter[bytes] = Counter()
    for batch in _batches(list(flushed)):
        num_bytes += cache.act(partial(_freed_bytes, batch, counted))
        await asyncio.sleep(0)
    return FlushAnswer(len(flushed), num_bytes, tuple(leased))


def _batches(keys: list[SessionKey]) -> Iterator[list[SessionKey]]:
    return (keys[start : start + FLUSH_BATCH] for start in range(0, len(keys), FLUSH_BATCH))


def _flush_batch(
    keys: list[SessionKey], session_filter: SessionFilter, core: CacheEngine
) -> FlushAnswer:
    return core.sessions.flush_selected(keys, session_filter)


def _flushable(
    keys: list[SessionKey], session_filter: SessionFilter, core: CacheEngine
) -> tuple[tuple[SessionKey, ...], tuple[SessionKey, ...]]:
    return core.sessions.flushable(keys, session_filter)


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
