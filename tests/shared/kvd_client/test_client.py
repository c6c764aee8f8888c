"""The client when attachments end: what it keeps, reports, and wakes; over both transports."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.kvd_client import client as client_module
from shared.kvd_client import connection as connection_module
from shared.kvd_client import queue_sender
from shared.kvd_client.attachment import KvdUnavailableError
from shared.kvd_client.client import MOST_ENDED, KvdClient
from shared.kvd_client.connection import _cancel_until_done
from shared.types.errors import LoadFailedError
from shared.types.graft_source import GraftSource
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
from shared.types.queue_feed import QueueFeed
from tests.small_kvd import SmallKvd, small_kvd
from tests.synthetic_engine import (
    encode,
    key_of,
    layout_with_states,
    layout_with_windows,
    small_layout,
)
from tests.until import until

LAYOUT = small_layout()
KEY = key_of("s")
TOKENS = encode(range(16))


@pytest.fixture(autouse=True, params=["local calls", "gRPC"])
def transport(request, monkeypatch):
    """Call kvd over a socket of our own, or over gRPC as an older kvd is called."""
    monkeypatch.setattr(SmallKvd, "offers_local_calls", request.param == "local calls")
    return request.param


@asynccontextmanager
async def client_of(directory, feed=None):
    client = KvdClient(directory, LAYOUT, "test", reconnect_delay_s=0.02)
    if feed is not None:
        client.queue.follow(feed)
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def num_waiting(grant):
    """Return how many threads wait for a layer of a load."""
    return len(grant.progress._words._changed._waiters)


async def until_detached(client):
    await until(lambda: not client.attached)


@pytest.mark.parametrize(
    ("layout", "what"),
    [(layout_with_states(), "the states of"), (layout_with_windows(), "windowed layers")],
)
async def test_a_kvd_without_states_or_windows_is_refused_where_they_are_needed(
    tmp_path, layout, what
):
    """Loads from it would be useless for such a model."""
    client = KvdClient(tmp_path, layout, "test", reconnect_delay_s=0.02)
    async with small_kvd(tmp_path, layout) as kvd:
        running = asyncio.create_task(client.run())
        await until(lambda: len(kvd.attaches) > 1)
        with pytest.raises(KvdUnavailableError, match=f"cannot store .*{what}"):
            await client.wait_attached(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_unchanged_arena_stays_mapped(tmp_path):
    """Over a restart of kvd: the engine registers it once; an active store continues."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT) as kvd:
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
            first = kvd.attaches[0]
            assert list(first.held_leases) == []
        await until_detached(client)
        async with small_kvd(tmp_path, LAYOUT) as kvd:
            await client.wait_attached(30)
            assert kvd.attaches[0].instance == first.instance
            assert list(kvd.attaches[0].held_leases) == [grant.lease_id]
            grant.arena.slot(2)[:4] = b"late"
            assert bytes(kvd.arena.slots.slot(2)[:4]) == b"late"
            assert await client.complete_store(grant, success=True) == 16
            assert kvd.completed == [(grant.lease_id, True)]
            again = await client.prepare_store(KEY, TOKENS, 0, 5)
            assert again.arena is grant.arena
            assert again.lease_id >> 40 == (grant.lease_id >> 40) + 1
            await client.complete_store(again, success=False)


async def test_another_arena_is_mapped(tmp_path):
    """Leases of the old one are lost, and its memory stays while it is used."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT, keep=False):
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        await until_detached(client)
        async with small_kvd(tmp_path, LAYOUT, keep=False, confirms=False) as kvd:
            await client.wait_attached(30)
            grant.arena.slot(2)[:4] = b"late"
            with pytest.raises(KvdUnavailableError):
                await client.complete_store(grant, success=True)
            assert bytes(kvd.arena.slots.slot(2)[:4]) == bytes(4)
            assert (await client.prepare_load(KEY, TOKENS, 0, 5)).arena is not grant.arena


async def test_a_lost_lease_cannot_be_completed(tmp_path):
    """Though the arena is the same: its slots may have other owners by now."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT):
            await client.wait_attached(30)
            grant = await client.prepare_load(KEY, TOKENS, 0, 5)
        await until_detached(client)
        async with small_kvd(tmp_path, LAYOUT, confirms=False) as kvd:
            await client.wait_attached(30)
            with pytest.raises(KvdUnavailableError):
                await client.complete_load(grant)
            assert not kvd.completed


async def test_a_store_that_ends_without_kvd_is_released_later(tmp_path):
    """It ends while kvd is away, after Attach has reported it as held."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT):
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        await until_detached(client)
        async with small_kvd(tmp_path, LAYOUT, may_attach=False) as kvd:
            await until(lambda: kvd.attaches)
            with pytest.raises(KvdUnavailableError):
                await client.complete_store(grant, success=True)
            kvd.may_attach.set()
            await until(lambda: kvd.completed)
            assert list(kvd.attaches[0].held_leases) == [grant.lease_id]
            assert kvd.completed == [(grant.lease_id, False)]


@pytest.mark.parametrize("holds", [False, True])
async def test_a_client_that_ends_reports_open_leases(tmp_path, holds):
    """It announces its exit only without them: otherwise it keeps its slots until it dies."""
    async with small_kvd(tmp_path, LAYOUT) as kvd:
        async with client_of(tmp_path) as client:
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
            if not holds:
                await client.complete_store(grant, success=True)
        await until(lambda: kvd.gone)
        assert kvd.gone[0].may_still_write == holds


async def test_threads_wait_for_layers(tmp_path):
    """Each is returned as soon as kvd has published it."""
    async with small_kvd(tmp_path, LAYOUT) as kvd, client_of(tmp_path) as client:
        await client.wait_attached(30)
        grant = await client.prepare_load(KEY, TOKENS, 0, 5, accept_pending=True)
        assert (grant.lookup, grant.end_token) == (Lookup.PENDING, 16)
        for layer in range(3):
            waiting = asyncio.create_task(asyncio.to_thread(grant.progress.wait_layer, layer, 30))
            await until(partial(num_waiting, grant))
            assert not waiting.done()
            kvd.arena.progress.publish(grant.lease_id, layer + 1)
            await waiting
        await client.complete_load(grant)
        assert kvd.completed == [(grant.lease_id, True)]


@pytest.mark.parametrize("end", ["fails", "kvd goes", "we go", "time passes"])
async def test_every_wait_ends(tmp_path, end):
    """By a failed load, kvd's end, the client's own end, or the deadline."""
    async with client_of(tmp_path) as client, small_kvd(tmp_path, LAYOUT) as kvd:
        await client.wait_attached(30)
        grant = await client.prepare_load(KEY, TOKENS, 0, 5, accept_pending=True)
        timeout_s = 0.05 if end == "time passes" else 60
        waiting = asyncio.create_task(asyncio.to_thread(grant.progress.wait_layer, 0, timeout_s))
        await until(partial(num_waiting, grant))
        if end == "fails":
            kvd.arena.progress.fail(grant.lease_id)
        elif end == "kvd goes":
            kvd.connection.gone.set()
        elif end == "we go":
            client._attachment.events.cancel()
        with pytest.raises(LoadFailedError):
            await asyncio.wait_for(waiting, 30)


@pytest.mark.parametrize("call", ["PrepareStore", "CompleteStore"])
async def test_a_call_without_an_answer_ends_the_attachment(tmp_path, monkeypatch, call):
    """The leases are unknown then: the next attachment reports those that are held."""
    async with small_kvd(tmp_path, LAYOUT) as kvd, client_of(tmp_path) as client:
        await client.wait_attached(30)
        grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        kvd.mute.add(call)
        monkeypatch.setattr(client_module, "CALL_S", 0.5)
        monkeypatch.setattr(connection_module, "GRACE_S", 0.5)
        is_prepare = call == "PrepareStore"
        asking = client.prepare_store(KEY, TOKENS, 0, 0.0) if is_prepare else None
        with pytest.raises(KvdUnavailableError):
            await (asking or client.complete_store(grant, success=True))
        await until(lambda: len(kvd.attaches) > 1)
        still_held = [grant.lease_id] if is_prepare else []
        assert list(kvd.attaches[1].held_leases) == still_held


async def test_pending_is_answered_on_request_only(tmp_path):
    """Others get complete loads."""
    async with small_kvd(tmp_path, LAYOUT), client_of(tmp_path) as client:
        await client.wait_attached(30)
        grant = await client.prepare_load(KEY, TOKENS, 0, 5)
        assert (grant.lookup, grant.progress) == (Lookup.HIT, None)


async def test_descriptors_are_closed(tmp_path):
    """However often kvd restarts."""

    def num_open():
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    async with client_of(tmp_path) as client:
        for _ in range(6):
            async with small_kvd(tmp_path, LAYOUT):
                await client.wait_attached(30)
            await until_detached(client)
            counts.append(num_open())
        # The attachment may just be ending, and another attempt be running.
        await until(lambda: num_open() <= min(counts[:2]) + 2)


async def test_ends_of_sessions_are_reported_when_kvd_is_back(tmp_path):
    """All that did not reach it, or were not answered; once each."""
    async with client_of(tmp_path) as client:
        for name in ("a", "b"):
            with pytest.raises(KvdUnavailableError):
                await client.end_session(key_of(name))
        async with small_kvd(tmp_path, LAYOUT) as kvd:
            await until(lambda: kvd.ended == ["a", "b"])
            await client.wait_attached(30)
            await client.end_session(key_of("c"))
            kvd.mute.add("EndSession")
            ending = asyncio.create_task(client.end_session(key_of("d")))
            await until(lambda: kvd.unanswered == ["EndSession"])
            kvd.connection.gone.set()
            with pytest.raises(KvdUnavailableError):
                await ending
            kvd.mute.clear()
            await until(lambda: len(kvd.ended) > 3)
            assert kvd.ended == ["a", "b", "c", "d"]
            await until(lambda: not client._ended)


async def test_a_kvd_without_retention_is_not_asked(tmp_path):
    """An older one lacks the call: that is logged once, and no turn fails."""
    with capture_logs() as logged:
        async with client_of(tmp_path) as client:
            with pytest.raises(KvdUnavailableError):
                await client.retain_session(key_of("a"), 60)
            for _ in range(2):
                async with small_kvd(tmp_path, LAYOUT):
                    await client.wait_attached(30)
                    assert await client.retain_session(key_of("a"), 60) == 0
                    assert await client.retain_session(key_of("p"), 60, b"\0" * 4) == 0
                await until_detached(client)
    assert [entry["event"] for entry in logged].count("kvd_cannot_retain") == 1


async def test_a_kvd_without_expectations_is_not_asked(tmp_path):
    """An older one lacks the call: that is logged once, and no turn fails."""
    with capture_logs() as logged:
        async with client_of(tmp_path) as client:
            with pytest.raises(KvdUnavailableError):
                await client.expect_session(key_of("a"), ["bash"])
            for _ in range(2):
                async with small_kvd(tmp_path, LAYOUT):
                    await client.wait_attached(30)
                    assert not await client.expect_session(key_of("a"), ["bash"])
                    assert not await client.expect_session(key_of("a"), superseded=True)
                await until_detached(client)
    assert [entry["event"] for entry in logged].count("kvd_cannot_expect") == 1


async def test_a_kvd_without_grafts_is_not_asked(tmp_path):
    """It is older, or stores keys with their positions: nothing is grafted."""
    source = GraftSource(key_of("b"), b"\0" * 8, WHOLE, 0, 1)
    async with client_of(tmp_path) as client:
        assert not client.offers_grafts
        with pytest.raises(KvdUnavailableError):
            await client.graft(key_of("a"), b"\0" * 4, WHOLE, source)
        async with small_kvd(tmp_path, LAYOUT):
            await client.wait_attached(30)
            assert not client.offers_grafts
            assert await client.graft(key_of("a"), b"\0" * 4, WHOLE, source) == 0


async def test_a_kvd_without_waits_is_not_asked_to_wait(tmp_path):
    """An older one does not know the field."""
    async with client_of(tmp_path) as client, small_kvd(tmp_path, LAYOUT):
        await client.wait_attached(30)
        grant = await client.prepare_load(KEY, TOKENS, 0, 5, fetch_wait_s=7)
        assert (grant.lookup, grant.fetch_waited_s) == (Lookup.HIT, 0)


async def test_the_number_of_remembered_ends_is_bounded(tmp_path):
    """The newest stay."""
    client = KvdClient(tmp_path, LAYOUT, "test")
    for number in range(MOST_ENDED + 5):
        with pytest.raises(KvdUnavailableError):
            await client.end_session(key_of(str(number)))
    assert len(client._ended) == MOST_ENDED
    assert key_of("4") not in client._ended
    assert key_of("5") in client._ended


async def test_a_queue_is_reported_over_consecutive_streams(tmp_path, monkeypatch):
    """Its head: all of it first, then changes, and all again after the stream has ended."""
    monkeypatch.setattr(queue_sender, "RETRY_S", 0.1)
    feed = QueueFeed()
    async with small_kvd(tmp_path, LAYOUT) as kvd, client_of(tmp_path, feed) as client:
        await client.wait_attached(30)
        await until(lambda: kvd.snapshots)
        for number in range(5):
            feed.on_wait((0, 0.0, number), key_of(str(number)), 0)
        await until(lambda: len(kvd.snapshots) > 1)
        feed.on_leave(0)
        await until(lambda: len(kvd.snapshots) > 3)
    assert [one.base_sequence for one in kvd.snapshots[:4]] == [0, 1, 2, 0]
    sequences = [one.sequence for one in kvd.snapshots]
    assert sequences == sorted(set(sequences))
    numbers = [(list(one.waiting.numbers), list(one.left)) for one in kvd.snapshots[:4]]
    assert numbers == [([], []), ([0, 1, 2], []), ([3], [0]), ([1, 2, 3], [])]


async def test_changes_of_a_queue_can_be_waited_for(tmp_path, monkeypatch):
    """Until kvd has acknowledged them, or the stream has ended; without one there is no wait."""
    monkeypatch.setattr(queue_sender, "RETRY_S", 100.0)
    feed = QueueFeed()
    async with small_kvd(tmp_path, LAYOUT) as kvd, client_of(tmp_path, feed) as client:
        await client.queue.reported()
        await client.wait_attached(30)
        await until(lambda: kvd.snapshots)
        feed.on_wait((0, 0.0, 0), key_of("0"), 0)
        for _ in range(2):  # the second time nothing has changed since
            await client.queue.reported()
            assert [list(one.waiting.numbers) for one in kvd.snapshots] == [[], [0]]
        feed.on_leave(0)
        await client.queue.reported()  # this kvd ends the stream
        assert [list(one.left) for one in kvd.snapshots] == [[], [], [0]]
        await client.queue.reported()


async def test_a_swallowed_cancellation_is_repeated():
    """Calls of grpc.aio that end at that moment swallow it; the client would never attach again."""
    swallowed = []

    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                swallowed.append(error)
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await _cancel_until_done(task)
    assert task.cancelled()
    assert len(swallowed) == 2


def test_changes_of_the_connections_state_are_notified(tmp_path):
    """Whether loads and stores are possible, at each change, and only then."""
    client = KvdClient(tmp_path, LAYOUT, "test")
    changes = []
    client.on_change.append(changes.append)
    for event in ("attached", "draining", "draining", "ended", "attached", "ended"):
        client._move(event, "stopping")
    assert changes == [True, False, True, False]
    with pytest.raises(AssertionError, match="draining cannot happen to what is detached"):
        client._move("draining", "it is not there")
