"""A load that waits for a session to be fetched: for how long, and how it ends."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvd.core.records.errors import SessionChangedError, UnknownSessionError
from kvd.session_files.file_format import SessionFileError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.kvd.rpc.service_bench import OF_ACME, TOKENS, as_caller, session_name
from tests.kvd.rpc.test_operator_service import operating
from tests.kvd.session_files.test_growing_imports import file_of
from tests.synthetic_engine import encode, key_of

RESULTS = ("fetched", "absent", "unanswered", "late", "partly")
LONG = 50.0  # seconds: no test waits for so long


@asynccontextmanager
async def fetching(directory):
    """Serve an engine, an operator, and a follower that has answered once."""
    async with operating(directory) as (served, operator):
        builder = served.caches._builder
        limits = replace(builder.limits(20, 20), wants_sessions=True)
        served.cache.act(lambda core: core.set_limits(limits))
        await answer(operator, "other", coming=False)
        yield served, operator


async def answer(operator, session_id="a", *, coming, **fields):
    request = pb.AnswerWantedRequest(session=session_name(session_id, **fields), coming=coming)
    await operator.AnswerWanted(request, None)


def waits(served):
    """Return how waits have ended so far."""
    counters = served.cache.stats().counters
    return {name: n for name in RESULTS if (n := counters[f"fetch_waits_{name}"])}


async def complete_load(served, found):
    """Complete a load."""
    engine_id = served.engine.engine_id
    ended = pb.CompleteLoadRequest(engine_id=engine_id, lease_id=found.lease_id)
    await served.service.CompleteLoad(ended, None)


async def begin_load(served, **fields):
    """Begin a load that waits; it has requested its session."""
    task = asyncio.create_task(served.load(**{"fetch_wait_s": LONG, **fields}))
    while not served.cache._waiters:  # noqa: ASYNC110  # nothing says that a task waits
        await asyncio.sleep(0)
    return task


async def test_a_session_that_arrives_in_time_is_loaded(tmp_path):
    """As if it had been stored; the time of the wait is recorded."""
    async with fetching(tmp_path) as (served, operator):
        load = await begin_load(served)
        await answer(operator, coming=True)
        await served.store()
        found = await load
        assert (found.lookup, found.end_token) == (pb.LOOKUP_HIT, 16)
        assert found.fetch_waited_s > 0
        assert waits(served) == {"fetched": 1}
        again = await served.load(fetch_wait_s=LONG)
        assert (again.lookup, again.fetch_waited_s) == (pb.LOOKUP_HIT, 0)


async def test_the_rest_of_a_session_is_waited_for(tmp_path):
    """Its history is stored in part; the turn's new tokens are nowhere."""
    longer = encode(range(32))
    async with fetching(tmp_path) as (served, operator):
        await served.store()
        for history in (0, 16, 31):
            found = await served.load(token_ids=longer, fetch_wait_s=LONG, history_tokens=history)
            assert (found.end_token, found.fetch_waited_s) == (16, 0)
            await complete_load(served, found)
        load = await begin_load(served, token_ids=longer, history_tokens=40)
        await answer(operator, coming=True)
        await served.store(token_ids=longer)
        found = await load
        assert found.end_token == 32
        assert found.fetch_waited_s > 0
        assert waits(served) == {"fetched": 1}


async def test_the_wait_is_bounded_by_the_value_of_the_rest(tmp_path):
    """Then the stored part is loaded."""
    async with fetching(tmp_path) as (served, _):
        await served.store()
        found = await served.load(token_ids=encode(range(32)), fetch_wait_s=0.04, history_tokens=32)
        assert found.end_token == 16
        assert waits(served) == {"late": 1}


@pytest.mark.parametrize("was_coming", [True, False])
async def test_a_missing_session_is_a_plain_miss(tmp_path, was_coming):
    """At once when that is known; no load waits for it again then."""
    async with fetching(tmp_path) as (served, operator):
        load = await begin_load(served)
        if was_coming:
            await answer(operator, coming=True)
        await answer(operator, coming=False)
        found = await load
        assert (found.lookup, found.miss_reason) == (pb.LOOKUP_MISS, "unknown_session")
        assert (await served.load(fetch_wait_s=LONG)).fetch_waited_s == 0
        assert waits(served) == {"absent": 1}


async def test_a_session_that_arrives_too_late_is_a_plain_miss(tmp_path):
    """Equal tokens that others have stored are granted all the same."""
    async with fetching(tmp_path) as (served, _):
        await served.store("other")
        found = await served.load(fetch_wait_s=0.01)
        assert (found.lookup, found.end_token) == (pb.LOOKUP_HIT, 16)
        assert found.fetch_waited_s > 0
        assert waits(served) == {"late": 1}
        found = await served.load(token_ids=TOKENS[::-1], fetch_wait_s=LONG)
        assert (found.lookup, found.miss_reason) == (pb.LOOKUP_MISS, "unknown_session")
        assert waits(served) == {"late": 1}


@pytest.mark.parametrize("wait_s", [0.0, -1.0, float("nan")])
async def test_an_engine_may_refuse_to_wait(tmp_path, wait_s):
    """Then nothing is requested."""
    async with fetching(tmp_path) as (served, _):
        found = await served.load(fetch_wait_s=wait_s)
        assert (found.miss_reason, found.fetch_waited_s) == ("unknown_session", 0)
        assert waits(served) == {}
        assert not served.cache.stats().counters["sessions_wanted"]


@pytest.mark.parametrize(("bound", "ended"), [("10ms", {"late": 1}), ("0s", {})])
async def test_the_operator_limits_waits(tmp_path, monkeypatch, bound, ended):
    """However long an engine would wait; with 0 none waits."""
    monkeypatch.setenv("KVD_REMOTE__WAIT", bound)
    async with fetching(tmp_path) as (served, _):
        await served.load(fetch_wait_s=float("inf"))
        assert waits(served) == ended


async def test_without_a_follower_no_load_waits(tmp_path):
    """The session is requested all the same."""
    async with operating(tmp_path) as (served, _):
        assert (await served.load(fetch_wait_s=LONG)).fetch_waited_s == 0
        limits = replace(served.caches._builder.limits(20, 20), wants_sessions=True)
        served.cache.act(lambda core: core.set_limits(limits))
        assert (await served.load(fetch_wait_s=LONG)).fetch_waited_s == 0
        counters = served.cache.stats().counters
        assert (counters["sessions_wanted"], waits(served)) == (1, {})


async def test_a_cancelled_wait_ends(tmp_path):
    """Its turn has ended, too."""
    async with fetching(tmp_path) as (served, _):
        load = await begin_load(served)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert waits(served) == {"late": 1}


async def test_a_follower_may_answer_for_its_own_tenants_only(tmp_path):
    """As with all that is about a session."""
    async with fetching(tmp_path) as (_, operator):
        as_caller(OF_ACME)
        await answer(operator, coming=True, tenant="acme")
        with pytest.raises(UnknownSessionError):
            await answer(operator, coming=True, tenant="globex")


BLOCK = 16  # tokens
HISTORY = encode(range(6 * BLOCK))


class Coming:
    """An import of session "a", for which a load waits: tests deliver it block by block."""

    def __init__(self, operator, pieces):
        header, first, *rest = pieces
        self._pieces = iter([header + first, *rest])
        self._allowed, self._taken = asyncio.Queue(), asyncio.Semaphore(0)
        self.ended = asyncio.create_task(operator.ImportSession(self._requests(), None))

    async def _requests(self):
        yield pb.ImportSessionRequest(target=pb.ImportTarget(grow_bytes=1))
        while await self._allowed.get():
            yield pb.ImportSessionRequest(data=next(self._pieces))
            self._taken.release()  # more was requested: it has been processed

    async def comes(self, num_pieces):
        for _ in range(num_pieces):
            self._allowed.put_nowait(True)
            await self._taken.acquire()

    def breaks_off(self):
        self._allowed.put_nowait(False)


@asynccontextmanager
async def coming(directory):
    """Let a load of six blocks wait, of which two have arrived."""
    pieces = await file_of(directory / "elsewhere")
    async with fetching(directory) as (served, operator):
        load = await begin_load(served, token_ids=HISTORY, history_tokens=6 * BLOCK)
        await answer(operator, coming=True)
        fetched = Coming(operator, pieces)
        await fetched.comes(2)
        assert not load.done()
        yield served, fetched, load


async def test_a_growing_session_is_waited_for(tmp_path):
    """Until all of the history has arrived; the end of the session does not matter."""
    async with coming(tmp_path) as (served, fetched, load):
        await fetched.comes(4)
        found = await load
        assert (found.lookup, found.end_token) == (pb.LOOKUP_HIT, 6 * BLOCK)
        assert waits(served) == {"fetched": 1}
        await complete_load(served, found)
        await fetched.comes(1)
        fetched.breaks_off()
        assert (await fetched.ended).num_tokens == 6 * BLOCK


async def test_the_arrived_part_is_loaded_when_time_is_up(tmp_path, monkeypatch):
    """The session still grows beside the load; only missing tokens are computed."""
    async with coming(tmp_path) as (served, fetched, load):

        def left_s(_):
            key = key_of("a")
            there = served.cache.act(lambda core: core.inspection.info(key)).num_tokens
            return 0.0 if there == 3 * BLOCK else LONG

        monkeypatch.setattr("kvd.rpc.service._remaining_s", left_s)
        await fetched.comes(1)
        found = await load
        assert (found.lookup, found.end_token) == (pb.LOOKUP_HIT, 3 * BLOCK)
        assert found.miss_reason == "not_fetched"
        assert waits(served) == {"partly": 1}
        await fetched.comes(1)
        again = await served.load(token_ids=HISTORY, fetch_wait_s=LONG, history_tokens=6 * BLOCK)
        assert (again.end_token, again.fetch_waited_s) == (4 * BLOCK, 0)
        await fetched.comes(3)
        fetched.breaks_off()
        assert (await fetched.ended).num_tokens == 6 * BLOCK


async def test_an_interrupted_import_is_loaded_as_far_as_it_arrived(tmp_path):
    """At once: no load waits for missing blocks."""
    async with coming(tmp_path) as (served, fetched, load):
        fetched.breaks_off()
        found = await load
        assert (found.lookup, found.end_token) == (pb.LOOKUP_HIT, 2 * BLOCK)
        assert waits(served) == {"partly": 1}
        with pytest.raises(SessionFileError):
            await fetched.ended


async def test_a_turn_that_stores_ends_the_fetch(tmp_path):
    """The session continues here: it has the tokens that the turn has stored."""
    async with coming(tmp_path) as (served, fetched, load):
        await served.store(token_ids=HISTORY[: 4 * BLOCK * 4])
        found = await load
        assert found.end_token == 4 * BLOCK
        fetched._allowed.put_nowait(True)
        with pytest.raises(SessionChangedError):
            await fetched.ended
        assert served.keys() == {"a"}
