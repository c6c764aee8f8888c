"""The Reader service: sessions, leases, statistics and events, for monitors and operators."""

import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from kvd.caches.caches import Caches
from kvd.caches.scrubber import Scrubber
from kvd.caches.session_listing import SessionLister
from kvd.config import Settings
from kvd.core.engine import CacheEngine
from kvd.core.records.errors import UnknownSessionError
from kvd.core.records.records import LeaseInfo, TenantUsage
from kvd.core.state.turn_log import RecordedTurn
from kvd.engines.attached import Engines
from kvd.engines.process_stats import engine_message, process_message
from kvd.rpc.operator_messages import (
    encryption_message,
    layout_stats_message,
    lease_message,
    unavailable_message,
)
from kvd.rpc.reloading import settings_message
from kvd.rpc.session_moves import gone_error, history_messages
from kvd.runtime.cache import Cache
from kvd.wire.events import EventHub
from kvd.wire.messages import block_message, key_of, session_message
from kvd.wire.selection import allowed_tenants, check_allowed, event_filter_of, listing_of
from kvd.wire.turn_messages import recent_turns_messages
from shared.config.reload import LiveSettings
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
        live: LiveSettings[Settings],
    ) -> None:
        self._caches = caches
        self._engines = engines
        self._events = events
        self._scrubber = scrubber
        self._live = live
        self._lister = SessionLister(caches)

    @property
    def _settings(self) -> Settings:
        """In force now."""
        return self._live.settings

    async def ListSessions(  # noqa: N802
        self, request: kvd_pb2.ListSessionsRequest, _context: Any
    ) -> kvd_pb2.ListSessionsResponse:
        """Page through the sessions of all layouts."""
        most = self._settings.limits.sessions_page
        limit = min(request.limit or most, most)
        listing = listing_of(request, allowed_tenants())
        page = await self._lister.page(listing, request.page_token, limit)
        page.unavailable_layouts = len(self._caches.unavailable)
        return page

    async def DescribeSession(  # noqa: N802
        self, request: kvd_pb2.DescribeSessionRequest, _context: Any
    ) -> kvd_pb2.DescribeSessionResponse:
        """One session with its blocks, its leases, and what happened to it lately."""
        asked = key_of(request.session)
        check_allowed(asked, allowed_tenants())
        try:
            cache, key = self._caches.find(asked)
        except UnknownSessionError as error:
            raise gone_error(self._caches, asked) or error from error
        detail, now_ns = cache.act(lambda core, now_ns: (core.describe(key), now_ns))
        owners = {facts.owner: facts for facts in self._engines.owners()}
        leases = cache.act(lambda core, _: core.leases())
        return kvd_pb2.DescribeSessionResponse(
            info=session_message(detail.info, cache.layout, now_ns),
            blocks=[block_message(block) for block in detail.blocks],
            history=history_messages(cache.act(lambda core, _: core.history(key)), now_ns),
            leases=[
                lease_message(lease, cache.layout, owners.get(lease.owner), now_ns)
                for lease in leases
                if lease.key == key
            ],
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
            encryption=encryption_message(self._caches.secrets.info()),
            unavailable=[
                unavailable_message(layout, time.monotonic()) for layout in self._caches.unavailable
            ],
        )

    async def GetSettings(  # noqa: N802
        self, _request: kvd_pb2.GetSettingsRequest, _context: Any
    ) -> kvd_pb2.GetSettingsResponse:
        """The settings in force, and where each comes from."""
        return settings_message(self._live.loaded)

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
        self, request: kvd_pb2.WatchEventsRequest, _context: Any
    ) -> AsyncIterator[kvd_pb2.Event]:
        """Stream the last events, if they are wanted, and those from now on."""
        wanted = event_filter_of(request, allowed_tenants())
        recent = self._events.recent(wanted, request.num_recent)
        if request.recent_only:
            for event in recent:
                yield event
            return
        with self._events.watch(wanted) as watcher:
            for event in recent:
                yield event
            while True:
                yield await watcher.next()

    def _layout_message(self, cache: Cache) -> kvd_pb2.LayoutStats:
        return layout_stats_message(
            cache.stats(),
            cache.layout,
            cache.arena_info(self._caches.keep),
            cache.volume.files.info(),
            self._settings.ssd.admission,
            cache.act(_tenants),
            cache.act(lambda core, _: core.queue_stats()),
        )


def _num_jobs(owner: int, core: CacheEngine, _now_ns: int) -> tuple[int, int]:
    """Of an engine: those that wait, those that run."""
    return core.num_queued(owner), core.num_running(owner)


def _leases(core: CacheEngine, now_ns: int) -> tuple[tuple[LeaseInfo, ...], int]:
    return core.leases(), now_ns


def _recent_turns(core: CacheEngine, now_ns: int) -> tuple[Iterator[RecordedTurn], int]:
    return core.recent_turns(), now_ns


def _tenants(core: CacheEngine, _now_ns: int) -> tuple[TenantUsage, ...]:
    return core.tenants()
