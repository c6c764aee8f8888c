"""The Reader service: sessions, leases, statistics and events, for monitors and operators."""

import os
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from kvd.caches.caches import Caches
from kvd.caches.scrubber import Scrubber
from kvd.caches.session_listing import SessionLister
from kvd.config import Settings
from kvd.core.engine import CacheEngine
from kvd.core.records.errors import UnknownSessionError
from kvd.core.state.session_history import Move, MoveKind
from kvd.engines.attached import Engine, Engines
from kvd.rpc.operator_messages import (
    encryption_message,
    engine_message,
    history_messages,
    layout_stats_message,
    lease_message,
    process_message,
    settings_message,
    unavailable_message,
)
from kvd.runtime.cache import Cache
from kvd.wire.events import EventHub
from kvd.wire.messages import (
    block_message,
    key_of,
    recent_turns_messages,
    session_message,
    state_message,
    window_message,
)
from kvd.wire.selection import allowed_tenants, check_allowed, event_filter_of, listing_of
from shared.config.reload import LiveSettings
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.types.session_key import SessionKey, session_key
from shared.types.units import NS_PER_S, format_duration
from shared.version import __version__

# Why a session is not stored any more, by the last move of its history.
_GONE = {
    MoveKind.DROPPED: "left all tiers for room",
    MoveKind.EXPIRED: "expired",
    MoveKind.FLUSHED: "was flushed",
}


class ReaderService(kvd_pb2_grpc.ReaderServicer):  # type: ignore[misc]  # the stubs are untyped
    """Servicer of monitors' queries; it changes nothing.

    Args:
        caches: caches of all layouts.
        engines: attached and quarantined engines.
        events: recent and future events.
        scrubber: verifies stored blocks.
        live: settings in force.
    """

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

    async def ListSessions(  # noqa: N802
        self, request: pb.ListSessionsRequest, _: Any
    ) -> pb.ListSessionsResponse:
        """Page through the sessions of all layouts."""
        max_limit = self._live.loaded.settings.limits.sessions_page
        limit = min(request.limit or max_limit, max_limit)
        listing = listing_of(request, allowed_tenants())
        page = await self._lister.page(listing, request.page_token, limit)
        page.unavailable_layouts = len(self._caches.unavailable)
        return page

    async def DescribeSession(  # noqa: N802
        self, request: pb.DescribeSessionRequest, _: Any
    ) -> pb.DescribeSessionResponse:
        """Return one session with its blocks, leases and recent history."""
        named = key_of(request.session)
        check_allowed(named, allowed_tenants())
        try:
            cache, key = self._caches.find(named)
        except UnknownSessionError as error:
            history = self._history_of_gone(named) if request.may_be_gone else []
            if history:
                return pb.DescribeSessionResponse(history=history)
            raise removed_session_error(self._caches, named) or error from error
        detail, now_ns = cache.act(lambda core: (core.inspection.describe(key), core.now_ns))
        engines = {info.engine_id: info for info in self._engines.infos()}
        leases = cache.act(lambda core: core.inspection.leases())
        return pb.DescribeSessionResponse(
            info=session_message(detail.info, cache.layout, now_ns),
            blocks=[block_message(block) for block in detail.blocks],
            states=[state_message(state) for state in detail.states],
            windows=[window_message(window) for window in detail.windows],
            history=history_messages(
                cache.act(lambda core: core.inspection.history.of(key)), now_ns
            ),
            leases=[
                lease_message(lease, cache.layout, engines.get(lease.engine_id), now_ns)
                for lease in leases
                if lease.key == key
            ],
        )

    def _history_of_gone(self, key: SessionKey) -> list[pb.SessionMove]:
        """Return the history of a session that is not stored any more; [] if it is not known."""
        for cache in self._caches.of_model(key.model):
            full = session_key(key.tenant, cache.layout.model, key.session_id)
            moves, now_ns = cache.act(partial(_history, full))
            if moves:
                return list(history_messages(moves, now_ns))
        return []

    async def ListLeases(self, request: pb.ListLeasesRequest, _: Any) -> pb.ListLeasesResponse:  # noqa: N802
        """Return the leases of all engines, attached or quarantined; oldest first."""
        engines = {info.engine_id: info for info in self._engines.infos()}
        messages = []
        for cache in self._caches.of_model(request.model):
            leases, now_ns = cache.act(lambda core: (core.inspection.leases(), core.now_ns))
            messages += [
                lease_message(lease, cache.layout, engines.get(lease.engine_id), now_ns)
                for lease in leases
            ]
        messages.sort(key=lambda message: -message.age_s)
        return pb.ListLeasesResponse(leases=messages)

    async def GetStats(self, _request: pb.GetStatsRequest, _: Any) -> pb.GetStatsResponse:  # noqa: N802
        """Return fill levels, counters, engines, and facts about kvd's process."""
        return pb.GetStatsResponse(
            version=__version__,
            layouts=[self._layout_message(cache) for cache in self._caches.of_model("")],
            engines=[self._engine_message(engine) for engine in self._engines],
            process=process_message(),
            verifying=self._scrubber.is_running,
            encryption=encryption_message(self._caches.secrets.info()),
            server_id=self._caches.server_id(),
            server_name=os.uname().nodename,
            unavailable=[
                unavailable_message(layout, time.monotonic()) for layout in self._caches.unavailable
            ],
        )

    async def GetSettings(self, _request: pb.GetSettingsRequest, _: Any) -> pb.GetSettingsResponse:  # noqa: N802
        """Return the settings in force, with the source of each."""
        return settings_message(self._live.loaded)

    async def ListRecentTurns(  # noqa: N802
        self, request: pb.ListRecentTurnsRequest, _: Any
    ) -> AsyncIterator[pb.RecentTurns]:
        """Yield the recorded recent turns, layout by layout."""
        settings = self._live.loaded.settings
        for cache in self._caches.of_model(request.model):
            turns, now_ns = cache.act(lambda core: (iter(core.inspection.turns), core.now_ns))
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
        self, request: pb.WatchEventsRequest, call: Any
    ) -> AsyncIterator[pb.Event]:
        """Stream recent events, as many as requested, and all events from now on."""
        event_filter = event_filter_of(request, allowed_tenants())
        recent = self._events.recent(event_filter, request.num_recent)
        if request.recent_only:
            for event in recent:
                yield event
            return
        with self._events.watch(event_filter) as watcher:
            # Shows the client that it will receive every event from now on.
            await call.send_initial_metadata(())
            for event in recent:
                yield event
            while True:
                yield await watcher.next()

    def _engine_message(self, engine: Engine) -> pb.EngineInfo:
        num_requests = engine.cache.act(lambda core: core.engines.num_requests(engine.engine_id))
        return engine_message(engine, *num_requests)

    def _layout_message(self, cache: Cache) -> pb.LayoutStats:
        return layout_stats_message(
            cache.stats(),
            cache.layout,
            cache.arena_info(self._caches.keep),
            cache.volume.files.info(),
            self._live.loaded.settings.ssd.admission,
            cache.act(lambda core: tuple(core.inspection.tenants)),
            cache.act(lambda core: core.inspection.queue_stats()),
        )


def removed_session_error(caches: Caches, key: SessionKey) -> UnknownSessionError | None:
    """Return an error that says why a session is not stored any more; None if it is not known."""
    for cache in caches.of_model(key.model):
        full = session_key(key.tenant, cache.layout.model, key.session_id)
        last, now_ns = cache.act(partial(_removal, full))
        if last is not None:
            ago = format_duration(max(0.0, (now_ns - last.last_ns) / NS_PER_S))
            why = f" ({last.why})" if last.why == "corrupt" else ""
            return UnknownSessionError(
                f"session {key.session_id!r} of tenant {key.tenant!r} is not stored any more: "
                f"it {_GONE[last.kind]}{why} {ago} ago",
                "list what is stored with: kvd ls",
            )
    return None


def _history(key: SessionKey, core: CacheEngine) -> tuple[tuple[Move, ...], int]:
    return core.inspection.history.of(key), core.now_ns


def _removal(key: SessionKey, core: CacheEngine) -> tuple[Move | None, int]:
    return core.inspection.history.removal(key), core.now_ns
