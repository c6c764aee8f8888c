"""The Operator service: flush, pin, set TTLs, end a process that hangs on to slots, verify."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from kvd.cache import Cache
from kvd.caches import Caches
from kvd.core.engine import CacheEngine
from kvd.core.errors import InvalidRequestError
from kvd.core.records import FlushAnswer, LeaseInfo, Pin
from kvd.engines import Engines
from kvd.errors import NoHolderError, NotOursToKillError, UnknownModelError
from kvd.messages import key_message, key_of, session_message, ttl_ns_of
from kvd.operator_messages import verify_message
from kvd.scrubber import Scrubber
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.session_key import SessionKey

GONE_S = 5.0  # how long KillHolder waits for the end of a process
GONE_POLL_S = 0.05  # upper bound between two looks whether its leases have ended


FLUSH_BATCH = 500  # sessions dropped in one go: about 10 ms


class OperatorService(kvd_pb2_grpc.OperatorServicer):  # type: ignore[misc]  # the stubs are untyped
    """What an operator may change; an answer means that a restart will not undo it."""

    def __init__(self, caches: Caches, engines: Engines, scrubber: Scrubber) -> None:
        self._caches = caches
        self._engines = engines
        self._scrubber = scrubber

    async def Flush(  # noqa: N802
        self, request: kvd_pb2.FlushRequest, _context: Any
    ) -> kvd_pb2.FlushResponse:
        """Drop one session's KV from all tiers, or everything."""
        if request.all == request.HasField("session"):
            raise InvalidRequestError("what to flush is not clear", "name one session, or all")
        response = kvd_pb2.FlushResponse()
        if not request.all:
            cache, key = self._caches.find(key_of(request.session))
            _add(response, cache.act(partial(_flush, key, request.dry_run)))
        elif request.dry_run:
            for cache in self._caches:
                _add(response, cache.act(partial(_flush, None, True)))
        else:
            for cache in list(self._caches):
                await _flush_all(cache, response)
        if not request.dry_run:
            await self._caches.committed()
        return response

    async def Pin(  # noqa: N802
        self, request: kvd_pb2.PinRequest, _context: Any
    ) -> kvd_pb2.PinResponse:
        """Protect a session from eviction and expiry."""
        pin = Pin.SOFT if request.soft else Pin.HARD
        cache, key = self._caches.find(key_of(request.session))
        cache.act(lambda core, now_ns: core.pin(key, pin, now_ns))
        await self._caches.committed()
        return kvd_pb2.PinResponse()

    async def Unpin(  # noqa: N802
        self, request: kvd_pb2.PinRequest, _context: Any
    ) -> kvd_pb2.PinResponse:
        """Take the protection away."""
        cache, key = self._caches.find(key_of(request.session))
        cache.act(lambda core, now_ns: core.unpin(key, now_ns))
        await self._caches.committed()
        return kvd_pb2.PinResponse()

    async def SetTtl(  # noqa: N802
        self, request: kvd_pb2.SetTtlRequest, _context: Any
    ) -> kvd_pb2.SetTtlResponse:
        """Set how long a session lives after its last use."""
        cache, key = self._caches.find(key_of(request.session))
        ttl_ns = ttl_ns_of(request.ttl_s)
        message = cache.act(
            lambda core, now_ns: session_message(
                core.set_ttl(key, ttl_ns, now_ns), cache.layout, now_ns
            )
        )
        await self._caches.committed()
        return kvd_pb2.SetTtlResponse(expires_in_s=message.expires_in_s)

    async def KillHolder(  # noqa: N802
        self, request: kvd_pb2.KillHolderRequest, _context: Any
    ) -> kvd_pb2.KillHolderResponse:
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
            await left[0][0].changed(GONE_POLL_S)
        return kvd_pb2.KillHolderResponse(
            num_leases=len(held),
            num_slots=sum(lease.num_slots for _, lease in held),
            gone=not left,
        )

    async def Verify(  # noqa: N802
        self, request: kvd_pb2.VerifyRequest, _context: Any
    ) -> AsyncIterator[kvd_pb2.VerifyProgress]:
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

    def _kill(self, pid: int) -> bool:
        try:
            return self._engines.kill(pid)
        except PermissionError as error:
            raise NotOursToKillError(
                f"process {pid} is another user's", f"as that user, or root: kill -KILL {pid}"
            ) from error

    def _leases_of(self, pid: int) -> list[tuple[Cache, LeaseInfo]]:
        """What a process holds."""
        owners = {facts.owner for facts in self._engines.owners() if facts.pid == pid}
        return [
            (cache, lease)
            for cache in self._caches
            for lease in cache.act(lambda core, _: core.leases())
            if lease.owner in owners
        ]


async def _flush_all(cache: Cache, response: kvd_pb2.FlushResponse) -> None:
    """Drop the sessions there are now, a few at a time: engines go on meanwhile."""
    num_left = cache.stats().num_sessions
    while num_left > 0 and (answer := cache.act(_flush_some)).num_sessions:
        num_left -= answer.num_sessions
        _add(response, replace(answer, skipped_leased=()))
        await asyncio.sleep(0)
    left = cache.act(partial(_flush, None, True))  # a dry run
    response.skipped_leased.extend(key_message(key) for key in left.skipped_leased)


def _flush_some(core: CacheEngine, now_ns: int) -> FlushAnswer:
    return core.flush_some(FLUSH_BATCH, now_ns)


def _add(response: kvd_pb2.FlushResponse, answer: FlushAnswer) -> None:
    response.sessions += answer.num_sessions
    response.bytes += answer.freed_bytes
    response.skipped_leased.extend(key_message(key) for key in answer.skipped_leased)


def _flush(key: SessionKey | None, dry_run: bool, core: CacheEngine, now_ns: int) -> FlushAnswer:
    return core.flush(key, dry_run, now_ns)
