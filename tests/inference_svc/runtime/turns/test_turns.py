"""What changes a session is done to its end, whoever waits for it; nobody else is let in before."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from inference_svc.core.counters import Counters
from inference_svc.core.errors import InvalidDiscardError, SessionBusyError, UnknownSessionError
from inference_svc.core.expected_session import ExpectedSession
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.turn_record import TurnRecord, Usage
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turns import Turns
from shared.session_key import SessionKey

KEY = SessionKey("default", "model", "s")
RECORD = TurnRecord(0, "r", "d", tuple(range(9)), (9,), ("x",), (), (), 1, "stop", Usage(), 1.0)
ANYTHING = ExpectedSession()


class SlowStore(TranscriptStore):
    """Writes when it may."""

    def __init__(self, directory):
        super().__init__(directory)
        self.is_writing, self.may_write = asyncio.Event(), asyncio.Event()
        self.may_write.set()

    async def _write(self, *args):
        self.is_writing.set()
        await self.may_write.wait()
        await super()._write(*args)


class ToldEngine:
    """Notes what it is told."""

    def __init__(self):
        self.told = []

    async def discard(self, _key, token_ids, ranges, _lineage):
        """See EngineLoop."""
        self.told.append((token_ids, ranges))

    async def forget(self, key, _token_ids):
        """See EngineLoop."""
        self.told.append(("forget", key))

    async def end_session(self, key):
        """See EngineLoop."""
        self.told.append(("end", key))


@asynccontextmanager
async def turns_of(store, engine):
    """The turns of a service that runs none; one session has one turn."""
    await store.append(KEY, RECORD, is_final=False)
    session_turns = SessionTurns(4, 2, lambda: 1.0)
    turns = Turns(None, store, engine, session_turns, Counters())
    running = asyncio.create_task(turns.run())
    await asyncio.sleep(0)
    yield turns
    assert not running.done(), "one change that fails ends nothing else"
    running.cancel()
    await asyncio.wait([running])


async def left_in_the_middle(store, change):
    """The caller leaves while its change is being written."""
    store.may_write.clear()
    store.is_writing.clear()
    caller = asyncio.create_task(change)
    await store.is_writing.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def until(is_so):
    while not is_so():
        await asyncio.to_thread(time.sleep, 0.001)


async def test_a_discard_is_done_although_its_caller_left(tmp_path):
    """Record and KV go together; until then the session is in use."""
    store, engine = SlowStore(tmp_path), ToldEngine()
    async with turns_of(store, engine) as turns:
        await left_in_the_middle(store, turns.discard(KEY, [(0, 4)], ANYTHING))
        with pytest.raises(SessionBusyError):
            await turns.discard(KEY, [(0, 4)], ANYTHING)
        store.may_write.set()
        await until(lambda: engine.told and not turns._is_busy(KEY))
        assert engine.told == [(tuple(range(9)), ((0, 4),))]
        assert await turns.discard(KEY, [(0, 2)], ANYTHING) == (4, 2)
        transcript, is_busy = await turns.get_session(KEY)
    assert (transcript.context_ids, is_busy) == ((6, 7, 8, 9), False)
    assert (await TranscriptStore(tmp_path).get(KEY)).context == transcript.context


async def test_so_are_the_end_of_a_session_and_a_fork(tmp_path):
    """A fork that its caller did not wait for is there."""
    store, engine = SlowStore(tmp_path), ToldEngine()
    async with turns_of(store, engine) as turns:
        await left_in_the_middle(store, turns.fork(KEY, None, "other"))
        store.may_write.set()
        other = KEY._replace(session_id="other")
        await until(lambda: other in store._cache and not turns._is_busy(other))
        await left_in_the_middle(store, turns.end(KEY))
        store.may_write.set()
        await until(lambda: engine.told and not turns._is_busy(KEY))
        assert (await turns.get_session(KEY))[0].has_ended
        assert len((await turns.get_session(other))[0].turns) == 1
        await turns.delete(other)
    assert engine.told == [("end", KEY), ("forget", other)]


async def test_a_change_that_fails_says_why_and_holds_nothing(tmp_path):
    """The session is as it was."""
    store = SlowStore(tmp_path)
    async with turns_of(store, ToldEngine()) as turns:
        with pytest.raises(InvalidDiscardError):
            await turns.discard(KEY, [(5, 99)], ANYTHING)
        with pytest.raises(UnknownSessionError):
            await turns.delete(KEY._replace(session_id="nobody"))
        assert await turns.discard(KEY, [(5, 6)], ANYTHING) == (9, 1)
