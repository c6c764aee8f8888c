"""The Reader service: sessions, leases, statistics and events, for monitors and operators."""

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from kvd.cache import Cache
from kvd.caches import Caches
from kvd.config import Settings
from kvd.core.engine import CacheEngine
from kvd.core.records import LeaseInfo, SessionPage, TenantUsage
from kvd.core.turn_log import RecordedTurn
from kvd.engines import Engines
from kvd.events import EventHub
from kvd.messages import block_message, key_of, session_message
from kvd.operator_messages import layout_stats_message, lease_message
from kvd.process_stats import engine_message, process_message
from kvd.scrubber import Scrubber
from kvd.turn_messages import recent_turns_messages
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.version import __version__


class ReaderService(kvd_pb2_grpc.ReaderServicer):  # type: ignore[misc]  # the stubs are untyped
    """What a monitor may look at."""

    def __init__(
        self,
        caches: Caches,
        engines: Engines,
        events: EventHub,
        scrubber: Scrubber,
        settings: Settings,
    ) -> None:
        self._caches = caches
        self._engines = engines
        self._events = events
        self._scrubber = scrubber
        self._settings = settings

    async def ListSessions(  # noqa: N802
        self, request: kvd_pb2.ListSessionsRequest, _context: Any
    ) -> kvd_pb2.ListSessionsResponse:
        """Page through the sessions, layout by layout, least recently used first in each.

        A page token is "<layout fingerprint> <the cache engine's own page token>".
        """
        most = self._settings.limits.sessions_page
        limit = min(request.limit or most, most)
        resume, _, after = request.page_token.partition(" ")
        response = kvd_pb2.ListSessionsResponse()
        for cache in self._caches.of_model(request.model):
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

    async def ListLeases(  # noqa: N802
        self, request: kvd_pb2.ListLeasesRequest, _context: Any
    ) -> kvd_pb2.ListLeasesResponse:
        """Who uses slots, attached or quarantined; oldest first."""
        owners = {facts.owner: facts for facts in self._engines.owners()}
        messages = []
        for cache in self._caches.of_model(request.model):
            leases, now_ns = cache.act(_leases)
            messages += [
                lease_message(lease, cache.layout, owners.get(lease.owner), now_ns)
                for lease in leases
            ]
        messages.sort(key=lambda message: -message.age_s)
        return kvd_pb2.ListLeasesResponse(leases=messages)

    async def GetStats(  # noqa: N802
        self, _request: kvd_pb2.GetStatsRequest, _context: Any
    ) -> kvd_pb2.GetStatsResponse:
        """Fill, counters, engines and the process itself."""
        return kvd_pb2.GetStatsResponse(
            version=__version__,
            layouts=[self._layout_message(cache) for cache in self._caches.of_model("")],
            engines=[
                engine_message(engine, *engine.cache.act(partial(_num_jobs, engine.engine_id)))
                for engine in self._engines
            ],
            process=process_message(),
            verifying=self._scrubber.is_running,
        )

    async def ListRecentTurns(  # noqa: N802
        self, request: kvd_pb2.ListRecentTurnsRequest, _context: Any
    ) -> AsyncIterator[kvd_pb2.RecentTurns]:
        """The turns of the last while, layout by layout."""
        settings = self._settings
        for cache in self._caches.of_model(request.model):
            turns, now_ns = cache.act(_recent_turns)
            for message in recent_turns_messages(
                turns,
                cache.layout,
                cache.stats().tiers,
                settings.eviction.policy,
                settings.sessions.default_ttl,
                now_ns,
            ):
                yield message

    async def WatchEvents(  # noqa: N802
        self, _request: kvd_pb2.WatchEventsRequest, _context: Any
    ) -> AsyncIterator[kvd_pb2.Event]:
        """Stream events from now on."""
        with self._events.watch() as queue:
            while True:
                yield await queue.get()

    def _layout_message(self, cache: Cache) -> kvd_pb2.LayoutStats:
        return layout_stats_message(
            cache.stats(),
            cache.layout,
            cache.arena_facts(self._caches.keep),
            cache.volume_facts(),
            self._settings.ssd.admission,
            cache.act(_tenants),
        )


def _page(
    tenant: str, after: str, limit: int, core: CacheEngine, now_ns: int
) -> tuple[SessionPage, int]:
    return core.sessions(tenant, after, limit), now_ns


def _num_jobs(owner: int, core: CacheEngine, _now_ns: int) -> tuple[int, int]:
    """Of an engine: those that wait, those that run."""
    return core.num_queued(owner), core.num_running(owner)


def _leases(core: CacheEngine, now_ns: int) -> tuple[tuple[LeaseInfo, ...], int]:
    return core.leases(), now_ns


def _recent_turns(core: CacheEngine, now_ns: int) -> tuple[Iterator[RecordedTurn], int]:
    return core.recent_turns(), now_ns


def _tenants(core: CacheEngine, _now_ns: int) -> tuple[TenantUsage, ...]:
    return core.tenants()
