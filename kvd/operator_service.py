"""The Operator and Reader services: look at sessions, flush, pin, expire; stats and events."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from kvd.cache import Cache
from kvd.caches import Caches
from kvd.config import LimitSettings
from kvd.core.engine import CacheEngine
from kvd.core.errors import InvalidRequestError
from kvd.core.records import FlushAnswer, SessionPage
from kvd.engines import Engines
from kvd.events import EventHub
from kvd.messages import (
    block_message,
    key_message,
    key_of,
    layout_stats_message,
    session_message,
    ttl_ns_of,
)
from kvd.process_stats import engine_message, process_message
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.session_key import SessionKey
from shared.version import __version__


class OperatorService(kvd_pb2_grpc.OperatorServicer):  # type: ignore[misc]  # the stubs are untyped
    """What an operator may change; an answer means that a restart will not undo it."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches

    async def Flush(  # noqa: N802
        self, request: kvd_pb2.FlushRequest, _context: Any
    ) -> kvd_pb2.FlushResponse:
        """Drop one session's KV from all tiers, or everything."""
        if request.all == request.HasField("session"):
            raise InvalidRequestError("what to flush is not clear", "name one session, or all")
        found: list[tuple[Cache, SessionKey | None]] = [(cache, None) for cache in self._caches]
        if not request.all:
            found = [self._caches.find(key_of(request.session))]
        response = kvd_pb2.FlushResponse()
        for cache, key in found:
            answer = cache.act(partial(_flush, key, request.dry_run))
            response.sessions += answer.num_sessions
            response.bytes += answer.freed_bytes
            response.skipped_leased.extend(key_message(k) for k in answer.skipped_leased)
        if not request.dry_run:
            await self._caches.committed()
        return response

    async def Pin(  # noqa: N802
        self, request: kvd_pb2.PinRequest, _context: Any
    ) -> kvd_pb2.PinResponse:
        """Protect a session from eviction and expiry."""
        cache, key = self._caches.find(key_of(request.session))
        cache.act(lambda core, now_ns: core.pin(key, now_ns))
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


class ReaderService(kvd_pb2_grpc.ReaderServicer):  # type: ignore[misc]  # the stubs are untyped
    """What a monitor may look at."""

    def __init__(
        self, caches: Caches, engines: Engines, events: EventHub, limits: LimitSettings
    ) -> None:
        self._caches = caches
        self._engines = engines
        self._events = events
        self._limits = limits

    async def ListSessions(  # noqa: N802
        self, request: kvd_pb2.ListSessionsRequest, _context: Any
    ) -> kvd_pb2.ListSessionsResponse:
        """Page through the sessions, layout by layout, least recently used first in each.

        A page token is "<layout fingerprint> <the cache engine's own page token>".
        """
        limit = min(request.limit or self._limits.sessions_page, self._limits.sessions_page)
        resume, _, after = request.page_token.partition(" ")
        response = kvd_pb2.ListSessionsResponse()
        for cache in self._caches_of(request.model):
            layout = cache.layout.fingerprint
            room = limit - len(response.sessions)
            page, now_ns = cache.act(
                partial(_page, request.tenant, after if layout == resume else "", max(1, room))
            )
            response.total += page.total
            if layout < resume or response.next_page_token:
                continue
            if room:
                response.sessions.extend(
                    session_message(info, cache.layout, now_ns) for info in page.sessions
                )
            if page.next_page and room:
                response.next_page_token = f"{layout} {page.next_page}"
            elif page.sessions and not room:
                response.next_page_token = f"{layout} "
        return response

    async def DescribeSession(  # noqa: N802
        self, request: kvd_pb2.DescribeSessionRequest, _context: Any
    ) -> kvd_pb2.DescribeSessionResponse:
        """One session with its blocks."""
        cache, key = self._caches.find(key_of(request.session))
        detail, now_ns = cache.act(lambda core, now_ns: (core.describe(key), now_ns))
        return kvd_pb2.DescribeSessionResponse(
            info=session_message(detail.info, cache.layout, now_ns),
            blocks=[block_message(block) for block in detail.blocks],
        )

    async def GetStats(  # noqa: N802
        self, _request: kvd_pb2.GetStatsRequest, _context: Any
    ) -> kvd_pb2.GetStatsResponse:
        """Fill, counters, engines and the process itself."""
        return kvd_pb2.GetStatsResponse(
            version=__version__,
            layouts=[
                layout_stats_message(cache.stats(), cache.layout) for cache in self._caches_of("")
            ],
            engines=[
                engine_message(engine, engine.cache.act(partial(_num_queued, engine.engine_id)))
                for engine in self._engines
            ],
            process=process_message(),
        )

    async def WatchEvents(  # noqa: N802
        self, _request: kvd_pb2.WatchEventsRequest, _context: Any
    ) -> AsyncIterator[kvd_pb2.Event]:
        """Stream events from now on."""
        with self._events.watch() as queue:
            while True:
                yield await queue.get()

    def _caches_of(self, model: str) -> list[Cache]:
        caches = sorted(self._caches, key=lambda cache: cache.layout.fingerprint)
        return [cache for cache in caches if cache.layout.model.startswith(model)]


def _flush(key: SessionKey | None, dry_run: bool, core: CacheEngine, now_ns: int) -> FlushAnswer:
    return core.flush(key, dry_run, now_ns)


def _page(
    tenant: str, after: str, limit: int, core: CacheEngine, now_ns: int
) -> tuple[SessionPage, int]:
    return core.sessions(tenant, after, limit), now_ns


def _num_queued(owner: int, core: CacheEngine, _now_ns: int) -> int:
    return core.num_queued(owner)
