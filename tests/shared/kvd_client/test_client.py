"""The client over attachments that end: what it keeps, what it reports, what wakes its threads."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.kvd_client import client as client_module
from shared.kvd_client import queue_sender
from shared.kvd_client.attachment import KvdUnavailableError
from shared.kvd_client.client import MOST_ENDED, KvdClient
from shared.kvd_client.connection import _cancel_until_done
from shared.types.errors import LoadFailedError
from shared.types.graft_source import GraftSource
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
from shared.types.queue_feed import QueueFeed
from tests.small_kvd import small_kvd
from tests.synthetic_engine import (
    encode,
    key_of,
    layout_with_states,
    layout_with_windows,
    small_layout,
)

LAYOUT = small_layout()
KEY = key_of("s")
TOKENS = encode(range(16))


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


async def until(is_so):
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)


def num_waiting(grant):
    """How many threads wait for a layer of a load."""
    return len(grant.progress._words._changed._waiters)


async def detached(client):
    await until(lambda: not client.attached)


@pytest.mark.parametrize(
    ("layout", "what"),
    [(layout_with_states(), "the states of"), (layout_with_windows(), "windowed layers")],
)
async def test_a_kvd_that_keeps_no_states_or_windows_is_not_attached_to(tmp_path, layout, what):
    """An engine whose model has them would load nothing of use from it."""
    client = KvdClient(tmp_path, layout, "test", reconnect_delay_s=0.02)
    async with small_kvd(tmp_path, layout) as kvd:
        running = asyncio.create_task(client.run())
        await until(lambda: len(kvd.attaches) > 1)
        with pytest.raises(KvdUnavailableError, match=f"cannot store .*{what}"):
            await client.wait_attached(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_same_arena_stays_mapped(tmp_path):
    """Over a restart of kvd: the engine registers it once; a store under way goes on."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT) as kvd:
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
            first = kvd.attaches[0]
            assert list(first.held_leases) == []
        await detached(client)
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


async def test_another_arena_is_mapped_anew(tmp_path):
    """What was granted in the old one is lost, and its memory stays while it is used."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT, keep=False):
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        await detached(client)
        async with small_kvd(tmp_path, LAYOUT, keep=False, confirms=False) as kvd:
            await client.wait_attached(30)
            grant.arena.slot(2)[:4] = b"late"
            with pytest.raises(KvdUnavailableError):
                await client.complete_store(grant, success=True)
            assert bytes(kvd.arena.slots.slot(2)[:4]) == bytes(4)
            assert (await client.prepare_load(KEY, TOKENS, 0, 5)).arena is not grant.arena


async def test_a_lease_that_was_lost_cannot_be_completed(tmp_path):
    """Though the arena is the same: its slots may be others' by now."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT):
            await client.wait_attached(30)
            grant = await client.prepare_load(KEY, TOKENS, 0, 5)
        await detached(client)
        async with small_kvd(tmp_path, LAYOUT, confirms=False) as kvd:
            await client.wait_attached(30)
            with pytest.raises(KvdUnavailableError):
                await client.complete_load(grant)
            assert not kvd.completed


async def test_what_was_given_back_to_nobody_is_given_back_later(tmp_path):
    """A store that ends while kvd is away, after Attach has said that it is held."""
    async with client_of(tmp_path) as client:
        async with small_kvd(tmp_path, LAYOUT):
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        await detached(client)
        async with small_kvd(tmp_path, LAYOUT, may_attach=False) as kvd:
            await until(lambda: kvd.attaches)
            with pytest.raises(KvdUnavailableError):
                await client.complete_store(grant, success=True)
            kvd.may_attach.set()
            await until(lambda: kvd.completed)
            assert list(kvd.attaches[0].held_leases) == [grant.lease_id]
            assert kvd.completed == [(grant.lease_id, False)]


@pytest.mark.parametrize("holds", [False, True])
async def test_a_client_that_ends_says_whether_it_still_writes(tmp_path, holds):
    """It leaves only when no lease is open: else its slots stay its own until it dies."""
    async with small_kvd(tmp_path, LAYOUT) as kvd:
        async with client_of(tmp_path) as client:
            await client.wait_attached(30)
            grant = await client.prepare_store(KEY, TOKENS, 0, 5)
            if not holds:
                await client.complete_store(grant, success=True)
        await until(lambda: kvd.gone)
        assert kvd.gone[0].may_still_write == holds


async def test_layers_are_waited_for_in_threads(tmp_path):
    """Each is there as soon as kvd has published it."""
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
async def test_no_thread_waits_for_ever(tmp_path, end):
    """A load that fails, kvd that goes away, our own end, the deadline."""
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
    """Nobody knows then what kvd holds for us: the next attachment reports what we hold."""
    async with small_kvd(tmp_path, LAYOUT) as kvd, client_of(tmp_path) as client:
        await client.wait_attached(30)
        grant = await client.prepare_store(KEY, TOKENS, 0, 5)
        kvd.mute.add(call)
        monkeypatch.setattr(client_module, "CALL_S", 0.5)
        monkeypatch.setattr(client_module, "GRACE_S", 0.5)
        is_prepare = call == "PrepareStore"
        asking = client.prepare_store(KEY, TOKENS, 0, 0.0) if is_prepare else None
        with pytest.raises(KvdUnavailableError):
            await (asking or client.complete_store(grant, success=True))
        await until(lambda: len(kvd.attaches) > 1)
        still_held = [grant.lease_id] if is_prepare else []
        assert list(kvd.attaches[1].held_leases) == still_held


async def test_pending_is_answered_only_to_those_who_ask(tmp_path):
    """Others get what is complete."""
    async with small_kvd(tmp_path, LAYOUT), client_of(tmp_path) as client:
        await client.wait_attached(30)
        grant = await client.prepare_load(KEY, TOKENS, 0, 5)
        assert (grant.lookup, grant.progress) == (Lookup.HIT, None)


async def test_descriptors_are_given_back(tmp_path):
    """However often kvd restarts."""

    def num_open():
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    async with client_of(tmp_path) as client:
        for _ in range(6):
            async with small_kvd(tmp_path, LAYOUT):
                await client.wait_attached(30)
            await detached(client)
            counts.append(num_open())
        # The attachment may just be ending, and an attempt to attach again be under way.
        await until(lambda: num_open() <= min(counts[:2]) + 2)


async def test_the_ends_of_sessions_are_told_when_kvd_is_back(tmp_path):
    """All that did not reach it while it was away, or that it did not answer; once each."""
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


async def test_a_kvd_that_retains_nothing_is_not_told(tmp_path):
    """An older one, which has no such call: that is logged once, and no turn fails of it."""
    with capture_logs() as logged:
        async with client_of(tmp_path) as client:
            with pytest.raises(KvdUnavailableError):
                await client.retain_session(key_of("a"), 60)
            for _ in range(2):
                async with small_kvd(tmp_path, LAYOUT):
                    await client.wait_attached(30)
                    assert await client.retain_session(key_of("a"), 60) == 0
                    assert await client.retain_session(key_of("p"), 60, b"\0" * 4) == 0
                await detached(client)
    assert [entry["event"] for entry in logged].count("kvd_cannot_retain") == 1


async def test_a_kvd_that_expects_nothing_is_not_told(tmp_path):
    """An older one, which has no such call: that is logged once, and no turn fails of it."""
    with capture_logs() as logged:
        async with client_of(tmp_path) as client:
            with pytest.raises(KvdUnavailableError):
                await client.expect_session(key_of("a"), ["bash"])
            for _ in range(2):
                async with small_kvd(tmp_path, LAYOUT):
                    await client.wait_attached(30)
                    assert not await client.expect_session(key_of("a"), ["bash"])
                    assert not await client.expect_session(key_of("a"), superseded=True)
                await detached(client)
    assert [entry["event"] for entry in logged].count("kvd_cannot_expect") == 1


async def test_a_kvd_that_knows_no_grafts_is_not_asked(tmp_path):
    """An older one, or one that stores keys with their positions: nothing is given."""
    source = GraftSource(key_of("b"), b"\0" * 8, WHOLE, 0, 1)
    async with client_of(tmp_path) as client:
        assert not client.offers_grafts
        with pytest.raises(KvdUnavailableError):
            await client.graft(key_of("a"), b"\0" * 4, WHOLE, source)
        async with small_kvd(tmp_path, LAYOUT):
            await client.wait_attached(30)
            assert not client.offers_grafts
            assert await client.graft(key_of("a"), b"\0" * 4, WHOLE, source) == 0


async def test_a_kvd_that_does_not_wait_is_not_asked_to(tmp_path):
    """An older one: it would not know the field."""
    async with client_of(tmp_path) as client, small_kvd(tmp_path, LAYOUT):
        await client.wait_attached(30)
        grant = await client.prepare_load(KEY, TOKENS, 0, 5, fetch_wait_s=7)
        assert (grant.lookup, grant.fetch_waited_s) == (Lookup.HIT, 0)


async def test_so_many_ends_are_remembered(tmp_path):
    """The newest; the others go by their age."""
    client = KvdClient(tmp_path, LAYOUT, "test")
    for number in range(MOST_ENDED + 5):
        with pytest.raises(KvdUnavailableError):
            await client.end_session(key_of(str(number)))
    assert len(client._ended) == MOST_ENDED
    assert key_of("4") not in client._ended
    assert key_of("5") in client._ended


async def test_a_queue_is_told_over_one_stream_after_the_other(tmp_path, monkeypatch):
    """Its head; all of it first, then what changes, and all again when the stream has ended."""
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


async def test_what_has_happened_to_a_queue_may_be_waited_for(tmp_path, monkeypatch):
    """Until kvd has acknowledged it, or the stream has ended; without one there is no wait."""
    monkeypatch.setattr(queue_sender, "RETRY_S", 100.0)
    feed = QueueFeed()
    async with small_kvd(tmp_path, LAYOUT) as kvd, client_of(tmp_path, feed) as client:
        await client.queue.reported()
        await client.wait_attached(30)
        await until(lambda: kvd.snapshots)
        feed.on_wait((0, 0.0, 0), key_of("0"), 0)
        for _ in range(2):  # the second time nothing has happened since
            await client.queue.reported()
            assert [list(one.waiting.numbers) for one in kvd.snapshots] == [[], [0]]
        feed.on_leave(0)
        await client.queue.reported()  # this kvd ends the stream
        assert [list(one.left) for one in kvd.snapshots] == [[], [], [0]]
        await client.queue.reported()


async def test_what_swallows_a_cancellation_is_cancelled_again():
    """As calls of grpc.aio do that end at that very moment; else nobody would attach again."""
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


def test_the_states_of_a_connection(tmp_path):
    """Whether loads and stores may be asked for is notified at each change of it, and only then."""
    client = KvdClient(tmp_path, LAYOUT, "test")
    changes = []
    client.on_change.append(changes.append)
    for event in ("attached", "draining", "draining", "ended", "attached", "ended"):
        client._move(event, "stopping")
    assert changes == [True, False, True, False]
    with pytest.raises(AssertionError, match="draining cannot happen to what is detached"):
        client._move("draining", "it is not there")
