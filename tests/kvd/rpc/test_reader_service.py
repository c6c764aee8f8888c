"""The calls of monitors: sessions of their tenants, leases, usage, settings, events."""

from contextlib import asynccontextmanager

import pytest

from kvd.caches.scrubber import Scrubber
from kvd.core.records.actions import Emit
from kvd.core.records.errors import UnknownSessionError
from kvd.rpc.reader_service import ReaderService
from kvd.wire.events import EventHub
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.kvd.rpc.service_bench import (
    OF_ACME,
    OPERATOR,
    as_caller,
    serving,
    session_name,
    settings,
)
from tests.synthetic_engine import encode, key_of


@asynccontextmanager
async def reading(directory):
    """Serve a reader beside an engine."""
    async with serving(directory) as served:
        hub, caches = EventHub(4), served.caches
        reader = ReaderService(caches, caches._engines, hub, Scrubber(1 << 30), settings(directory))
        as_caller(OPERATOR)
        yield served, reader, hub


def tokens_from(first):
    return encode(range(first, first + 16))


async def test_a_session_is_described_with_its_blocks_leases_and_history(tmp_path):
    """For callers of its tenant."""
    async with reading(tmp_path) as (served, reader, _):
        await served.store(tenant="acme")
        await served.load(tenant="acme")
        asked = pb.DescribeSessionRequest(session=session_name(tenant="acme"))
        found = await reader.DescribeSession(asked, None)
        assert (found.info.num_tokens, len(found.blocks), len(found.leases)) == (16, 1, 1)
        assert found.history
        as_caller(OF_ACME)
        assert (await reader.DescribeSession(asked, None)).info.session == found.info.session
        with pytest.raises(UnknownSessionError):
            await reader.DescribeSession(pb.DescribeSessionRequest(session=session_name()), None)


async def test_a_dropped_session_is_reported_as_such(tmp_path):
    """While its history is remembered; an unknown one is not found."""
    async with reading(tmp_path) as (served, reader, _):
        await served.store()
        served.cache.act(lambda core: core.sessions.flush(key_of("a"), dry_run=False))
        with pytest.raises(UnknownSessionError, match="was flushed"):
            await reader.DescribeSession(pb.DescribeSessionRequest(session=session_name()), None)
        with pytest.raises(UnknownSessionError) as caught:
            await reader.DescribeSession(
                pb.DescribeSessionRequest(session=session_name("never")), None
            )
        assert "any more" not in caught.value.message


async def test_pages_have_the_requested_and_allowed_size(tmp_path):
    """They list the caller's tenants only."""
    async with reading(tmp_path) as (served, reader, _):
        for number, tenant in enumerate(("acme", "acme", "globex")):
            await served.store(f"s{number}", tokens_from(100 * number), tenant=tenant)
        page = await reader.ListSessions(pb.ListSessionsRequest(limit=2), None)
        assert (len(page.sessions), page.total) == (2, 3)
        as_caller(OF_ACME)
        page = await reader.ListSessions(pb.ListSessionsRequest(), None)
        assert {info.session.session_id for info in page.sessions} == {"s0", "s1"}


async def test_leases_are_listed_oldest_first(tmp_path):
    """With their holders."""
    async with reading(tmp_path) as (served, reader, _):
        for number in range(3):
            await served.store(f"s{number}", tokens_from(100 * number))
            await served.load(f"s{number}", tokens_from(100 * number))
        found = (await reader.ListLeases(pb.ListLeasesRequest(), None)).leases
        assert [lease.session.session_id for lease in found] == ["s0", "s1", "s2"]
        assert {lease.kind for lease in found} == {pb.LEASE_KIND_LOAD}


async def test_stats_have_layouts_and_engines(tmp_path):
    """Stored sessions are counted."""
    async with reading(tmp_path) as (served, reader, _):
        await served.store()
        stats = await reader.GetStats(pb.GetStatsRequest(), None)
        (layout,) = stats.layouts
        assert layout.layout == served.cache.layout.fingerprint
        assert layout.num_sessions == 1
        assert [engine.name for engine in stats.engines] == ["e"]
        assert not stats.verifying
        assert not stats.unavailable


async def test_settings_in_force_are_listed(tmp_path):
    """All of them."""
    async with reading(tmp_path) as (_, reader, _):
        found = (await reader.GetSettings(pb.GetSettingsRequest(), None)).settings
        assert "limits.max_engines" in {row.key for row in found}


async def test_the_last_events_come_first(tmp_path):
    """Those of the caller's tenants; none follow if only these are requested."""
    async with reading(tmp_path) as (_, reader, hub):
        for tenant in ("acme", "globex"):
            hub.publish(Emit("session_cut", key_of("a", tenant)))
        asked = pb.WatchEventsRequest(num_recent=10, recent_only=True)
        seen = [event.session.tenant async for event in reader.WatchEvents(asked, None)]
        assert seen == ["acme", "globex"]
        as_caller(OF_ACME)
        seen = [event.session.tenant async for event in reader.WatchEvents(asked, None)]
        assert seen == ["acme"]
