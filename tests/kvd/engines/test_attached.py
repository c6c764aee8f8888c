"""Holders of slots: attached engines, and live processes whose connections have ended."""

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest

from kvd.core.engine import CacheEngine
from kvd.core.state.limits import Limits
from kvd.engines.attached import ENGINE_MOVES, Engine, Engines, EngineState
from kvd.engines.copiers import OpenChannel
from kvd.engines.data_socket import DataConnection
from kvd.errors import LimitReachedError, NotAttachedError
from kvd.host.process_identity import ProcessIdentity, start_ticks_of, watch_identity, watch_peer
from kvd.tiers.journal import JournaledWrite
from shared.types.errors import InvalidInputError
from tests.kvd.core.turns import A, B
from tests.property.cache_world import LAYOUT, salt_of, to_bytes

INSTANCE = secrets.token_hex(16)
WAITING = "import sys; print('up', flush=True); sys.stdin.read()"


class LiveCache:
    """A real cache engine without a daemon: its actions are not performed."""

    layout = LAYOUT
    arena = None

    def __init__(self):
        limits = Limits(num_slots=4, num_extents=8)
        self.engine = CacheEngine(LAYOUT, limits, salt_of)

    def act(self, step):
        answer = step(self.engine)
        self.engine.drain()
        self.engine.check()
        return answer

    def store(self, engine, key=A):
        """Lease slots for a store; return the lease."""
        tokens = to_bytes([1, 2, 3, 4])
        return self.act(lambda core: core.stores.prepare(key, tokens, 0, engine.engine_id)).lease_id

    def leases(self):
        return [(info.lease_id, info.is_orphan) for info in self.engine.inspection.leases()]


@contextmanager
def process():
    """Start a process that waits."""
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def connection_of(pid):
    """Make a connection, as the data socket does."""
    watch = watch_identity(ProcessIdentity(pid, start_ticks_of(pid), b""))
    connection = DataConnection("token", pid, os.getuid(), watch)
    watch.start(connection.gone.set)
    return connection


async def until(is_so):
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0)


@pytest.fixture
def cache():
    return LiveCache()


@pytest.fixture
async def engines():
    made = Engines(max_engines=3)
    yield made
    made.close()


def end(engines, connection):
    """End a connection, as the data socket does."""
    connection.gone.set()
    engines.on_connection_gone(connection)
    connection.close()


async def test_a_store_survives_its_connection(engines, cache):
    """Its process keeps the slots; the same client finds its lease again, and completes it."""
    with process() as child:
        first = connection_of(child.pid)
        engine, _, _ = engines.attach("e", cache, first, INSTANCE, ())
        lease, other = cache.store(engine), cache.store(engine, B)
        end(engines, first)
        assert cache.leases() == [(lease, True), (other, True)]
        (info,) = engines.infos()
        assert (info.pid, info.is_quarantined) == (child.pid, True)
        with pytest.raises(NotAttachedError):
            engines.get(engine.engine_id)

        again = connection_of(child.pid)
        engine, confirmed, lost = engines.attach("e", cache, again, INSTANCE, [lease, 12345])
        assert (confirmed, lost) == ([lease], [12345])
        assert cache.leases() == [(lease, False)]
        assert [info.is_quarantined for info in engines.infos()] == [False]
        done = cache.act(lambda core: core.stores.complete(lease, engine.engine_id, success=True))
        assert done == 4
        end(engines, again)
        assert not engines.infos()


@pytest.mark.parametrize("how", ["dead", "has left"])
async def test_an_engine_that_can_no_longer_write_is_forgotten(engines, cache, how):
    """Its slots are free at once."""
    with process() as child:
        connection = connection_of(child.pid)
        engine, _, _ = engines.attach("e", cache, connection, INSTANCE, ())
        cache.store(engine)
        if how == "dead":
            child.kill()
            await asyncio.wait_for(connection.gone.wait(), 30)
        else:
            connection.has_left = True
        end(engines, connection)
        assert (cache.leases(), engines.infos()) == ([], [])


@pytest.mark.parametrize("ends_first", ["process", "connection"])
async def test_slots_are_held_while_a_copier_may_write_to_them(engines, cache, ends_first):
    """The engine is dead: its copier reports when nothing is copied for it any more."""
    asked = []
    with process() as child:
        connection = connection_of(child.pid)
        first, second = (OpenChannel(partial(asked.append, name)) for name in ("1st", "2nd"))
        connection.channels = [first, second]
        engine, _, _ = engines.attach("e", cache, connection, INSTANCE, ())
        lease = cache.store(engine)
        if ends_first == "process":
            child.kill()
            await asyncio.wait_for(connection.gone.wait(), 30)
            end(engines, connection)
        else:
            end(engines, connection)
            assert not asked
            child.kill()
            await until(lambda: asked)
        assert asked == ["1st"]
        assert [lease_id for lease_id, _ in cache.leases()] == [lease]
        assert [info.is_quarantined for info in engines.infos()] == [True]
        with pytest.raises(NotAttachedError):
            engines.get(engine.engine_id)
        first.mark_over()
        assert asked == ["1st", "2nd"]
        assert [lease_id for lease_id, _ in cache.leases()] == [lease]
        second.mark_over()
        second.mark_over()
        assert (cache.leases(), engines.infos()) == ([], [])


async def test_a_connection_without_stores_leaves_no_holder(engines, cache):
    """Engines that come and go without writing do not accumulate."""
    with process() as child:
        for _ in range(5):
            connection = connection_of(child.pid)
            engines.attach("e", cache, connection, INSTANCE, ())
            end(engines, connection)
        assert not engines.infos()


async def test_a_holder_that_dies_frees_its_slots(engines, cache):
    """Also one that was stopped and then killed by an operator through its pidfd."""
    with process() as child:
        connection = connection_of(child.pid)
        engine, _, _ = engines.attach("e", cache, connection, INSTANCE, ())
        lease = cache.store(engine)
        os.kill(child.pid, signal.SIGSTOP)
        end(engines, connection)
        assert cache.leases() == [(lease, True)]
        await until(lambda: engines.infos()[0].process_status == "stopped")
        assert not engines.kill(os.getpid())
        assert engines.kill(child.pid)
        await until(lambda: not cache.leases())
        assert not engines.infos()
        assert not engines.kill(child.pid)


async def test_another_client_gets_no_lease(engines, cache):
    """Neither another process with this instance, nor another instance of this process."""
    with process() as child, process() as thief:
        connection = connection_of(child.pid)
        engine, _, _ = engines.attach("e", cache, connection, INSTANCE, ())
        lease = cache.store(engine)
        end(engines, connection)
        for pid, instance in ((thief.pid, INSTANCE), (child.pid, secrets.token_hex(16))):
            other = connection_of(pid)
            _, confirmed, lost = engines.attach("t", cache, other, instance, [lease])
            assert (confirmed, lost) == ([], [lease])
            end(engines, other)
        assert cache.leases() == [(lease, True)]


async def test_a_client_that_reconnects_before_its_connection_has_ended(engines, cache):
    """The older attachment of the same client ends with the newer one."""
    with process() as child:
        first = connection_of(child.pid)
        engine, _, _ = engines.attach("e", cache, first, INSTANCE, ())
        lease = cache.store(engine)
        second = connection_of(child.pid)
        _, confirmed, _ = engines.attach("e", cache, second, INSTANCE, [lease])
        assert confirmed == [lease]
        assert first.gone.is_set()
        end(engines, first)
        assert cache.leases() == [(lease, False)]
        assert len(engines.infos()) == 1
        end(engines, second)


async def test_engines_and_holders_are_bounded_together(engines, cache):
    """At the bound only existing holders are attached."""
    with process() as child:
        instances = [secrets.token_hex(16) for _ in range(3)]
        for number, instance in enumerate(instances):
            connection = connection_of(child.pid)
            engine, _, _ = engines.attach("e", cache, connection, instance, ())
            cache.store(engine, A if number else B)
            end(engines, connection)
        held = len(engines.infos())
        assert held == 3
        connection = connection_of(child.pid)
        with pytest.raises(LimitReachedError, match="kvd leases"):
            engines.attach("e", cache, connection, INSTANCE, ())
        engines.attach("e", cache, connection, instances[0], ())
        assert len(engines.infos()) == 3
        end(engines, connection)


async def test_writers_of_an_earlier_kvd(engines, cache):
    """A live one keeps its slots; one that is dead, or was started later, does not."""
    with process() as child, process() as dead:
        living = ProcessIdentity(child.pid, start_ticks_of(child.pid), bytes.fromhex(INSTANCE))
        younger = ProcessIdentity(child.pid, living.start_ticks - 1, b"y" * 16)
        gone = ProcessIdentity(dead.pid, start_ticks_of(dead.pid), b"g" * 16)
        dead.kill()
        dead.wait()
        foreign = ProcessIdentity(0, 0, b"f" * 16)
        writers = [living, younger, gone, foreign, living]
        writing = [JournaledWrite(n, 1, 90 + n % 4, who) for n, who in enumerate(writers)]
        orphans = engines.watch_orphans(cache, writing)
        assert [orphan.slot_id for orphan in orphans] == [0, 4]
        engine_id = orphans[0].writing.engine_id
        assert engine_id == orphans[1].writing.engine_id
        assert engines.identity_of(engine_id) == living
        assert [info.pid for info in engines.infos()] == [child.pid]
        child.kill()
        await until(lambda: not engines.infos())


def test_impossible_transitions_of_an_engine(cache):
    """A move that its state does not have is refused, and none leads back from the end."""
    possible = {state: ENGINE_MOVES.events(state) for state in EngineState}
    for state, events in possible.items():
        for event in frozenset[str]().union(*possible.values()) - events:
            engine = Engine(1, "e", cache, ProcessIdentity(1, 1, b""), state=state)
            with pytest.raises(AssertionError, match=event):
                engine.move(event)
            assert engine.state is state
    assert not possible[EngineState.GONE]


async def test_questions_about_unknown_engines(engines):
    """An engine that is gone is unknown, and cannot be notified."""
    assert engines.identity_of(5).pid == 0
    engines.wake_of(5)()


@pytest.mark.parametrize("instance", ["xyz", "ab", "00" * 15])
async def test_an_invalid_instance(engines, cache, instance):
    """It is refused before anything is registered."""
    with process() as child:
        connection = connection_of(child.pid)
        with pytest.raises(InvalidInputError):
            engines.attach("e", cache, connection, instance, ())
        assert not engines.infos()
        connection.close()


def test_the_process_at_the_other_end_of_a_socket():
    """Its pid and start time; not those of the descriptor's present owner."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watch = watch_peer(ours, os.getpid())
    assert (watch.pid, watch.start_ticks) == (os.getpid(), start_ticks_of(os.getpid()))
    assert not watch.is_dead
    watch.close()


def test_start_times():
    """An unknown process has none; a command with spaces and parentheses does not confuse."""
    assert start_ticks_of(1 << 22) == 0
    assert start_ticks_of(1) < start_ticks_of(os.getpid())
    script = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') S 1 (', 0, 0, 0);" + WAITING
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert start_ticks_of(child.pid) >= start_ticks_of(os.getpid())
        child.stdin.close()
