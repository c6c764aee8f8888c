"""What is stored of answers over HTTP; which sessions make room, and recovery after a kill."""

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from random import Random

import pytest

from inference_svc.core.chat import Message
from inference_svc.core.errors import UnknownSessionError
from inference_svc.core.misses import Resembled
from inference_svc.core.transcript_format import Header, Transcript
from inference_svc.core.turn_record import Finished, TurnRecord, Usage
from inference_svc.http_api.sessions.completion import Completion, supersedes
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import (
    Conversation,
    ConversationTurn,
    ResponseInfo,
    Route,
)
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.store_calls import StoreCalls
from shared.access.identity import Identity
from shared.process.backoff import Backoff
from shared.types.session_key import SessionKey
from tests.faulty_store import FaultyStore, Odds, View
from tests.inference_svc.http_api.scripted_calls import READING, calling
from tests.inference_svc.http_api.sessions.test_routing import turn
from tests.memory_engine import loaded_model
from tests.turn_service import Service, make_turn, serving

MODEL = "m"
ANN = Caller(Identity("ann", "token", ("acme",), frozenset({"client"})), "acme")
ASKED = Message("user", "What is a lease?")
ANSWER = Finished("stop", "A right to slots.", Usage(), 1)
CALLING = replace(calling(), turns=1)


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


@dataclass
class World:
    """A completion over a real store and real sessions, each of one short turn."""

    service: Service
    store: ApiStore
    completion: Completion

    async def begin(self, session_id, max_tokens=1):
        """Begin a turn of a session; return it."""
        key = SessionKey("acme", MODEL, session_id)
        names = {"key": key, "request_id": f"r-{session_id}-{max_tokens}"}
        return await self.service.turns.submit(make_turn([5, 6, 7], max_tokens, **names))

    async def make(self, *session_ids):
        """Make sessions of one turn each."""
        for session_id in session_ids:
            turn = await self.begin(session_id)
            _ = [event async for event in turn.follow()]

    async def record(self, session_id, answer=ANSWER, *, route=None, is_temporary=False, **fields):
        """Record an answer of a session."""
        turn = HttpTurn((ASKED,), {}, "", True, "", f"r-{session_id}", b"", **fields)
        at = route or Route(session_id, 0, 0, self.completion.chain(ANN).start)
        await self.completion.record(ANN, turn, at, answer, is_temporary=is_temporary)

    async def left(self, *session_ids):
        """Return those of some sessions that still exist."""
        found = set()
        for session_id in session_ids:
            with suppress(UnknownSessionError):
                await self.service.turns.sessions.get(SessionKey("acme", MODEL, session_id))
                found.add(session_id)
        return found

    async def is_ended(self, session_id):
        """Return whether a session accepts no turn any more."""
        found, _ = await self.service.turns.sessions.get(SessionKey("acme", MODEL, session_id))
        return found.has_ended

    async def until_so(self, is_so):
        """Wait for the same with a condition that does not await."""

        async def ask():
            return is_so()

        await self.until(ask)

    async def until(self, is_so):
        """Wait for background cleaning."""
        async with asyncio.timeout(30):
            while not await is_so():  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.01)


@asynccontextmanager
async def world_in(model, directory, max_sessions=10, subagent_idle_s=900.0, calls=None):
    async with serving(model, directory, calls=calls) as service:
        store = ApiStore(directory, 1000, 2**20, 2**20)
        completion = Completion(service.turns.sessions, MODEL, store, max_sessions, subagent_idle_s)
        running = asyncio.create_task(completion.run())
        await store.temporary_sessions()  # `run` has begun
        yield World(service, store, completion)
        running.cancel()
        await asyncio.wait([running])
        store.close()


async def test_a_history_leads_to_its_session(model, tmp_path):
    """With its answer at the end, without surrounding white space."""
    async with world_in(model, tmp_path) as world:
        await world.record("s-1")
        chain = world.completion.chain(ANN)
        said = (ASKED, Message("assistant", "  A right to slots.\n"))
        digest = chain.along(chain.start, said)[-1]
        found = await world.store.find_histories([digest, chain.within(digest, "s-1")])
        assert len(found) == 2
        assert {(point.session_id, point.turns) for point in found.values()} == {("s-1", 1)}


async def test_a_session_awaits_the_called_tools(model, tmp_path):
    """By name, once each; without calls it awaits nothing, nor does an ended one."""
    async with world_in(model, tmp_path) as world:
        names = ("speaks", "ends", "repeats", "calls")
        await world.make(*names)
        answers = {"speaks": ANSWER, "ends": CALLING, "calls": CALLING}
        for name, answer in answers.items():
            await world.record(name, answer, reading=READING, is_final=name == "ends")
        await world.record("repeats", replace(CALLING, turns=2), reading=READING)
        expected = world.service.engine.store.expected
        await world.until_so(lambda: expected)
        assert expected == [("calls", ("look", "see"), False)]
        await world.record("calls", route=Route("calls", 0, 0, None), reading=READING)
        await world.record("calls", CALLING, route=Route("calls", 0, 0, None), reading=READING)
        await world.until_so(lambda: len(expected) == 2)


async def test_a_session_that_another_replaces_is_superseded(model, tmp_path):
    """Unless it has continued, or is gone."""
    async with world_in(model, tmp_path) as world:
        await world.make("old", "left", "new", "newer")
        expected = world.service.engine.store.expected
        for name, resembled in (
            ("new", Resembled("left", 3, was_known=True)),
            ("new", Resembled("deleted", 1, was_known=True)),
            ("new", Resembled("new", 1, was_known=True)),
            ("new", Resembled(was_known=True)),
            ("newer", Resembled("old", 1, was_known=True)),
        ):
            await world.record(name, route=Route(name, 0, 0, None, resembles=resembled))
        await world.until_so(lambda: expected)
        assert expected == [("old", (), True)]


async def test_a_session_without_a_known_history_stores_none(model, tmp_path):
    """Its response is found all the same."""
    async with world_in(model, tmp_path) as world:
        route = Route("s-1", 0, 0, None)
        info = ResponseInfo(1.0, "m")
        await world.record("s-1", route=route, response_id="resp-1", info=info)
        stored = await world.store.find_response("acme", "resp-1")
        assert stored is not None
        assert (stored.history, stored.at.session_id) == (None, "s-1")


async def test_the_least_recently_used_of_too_many_unnamed_sessions_is_removed(model, tmp_path):
    """A session named by its client stays, however old it is."""
    async with world_in(model, tmp_path, max_sessions=2) as world:
        names = ("mine", "s-0", "s-1", "s-2")
        await world.make(*names)
        named = Route("mine", 0, 0, world.completion.chain(ANN).start, is_named=True)
        await world.record("mine", route=named)
        for name in names[1:]:
            await world.record(name)

        async def is_gone():
            return "s-0" not in await world.left(*names)

        await world.until(is_gone)
        assert await world.left(*names) == {"mine", "s-1", "s-2"}


async def test_room_is_made_by_an_unused_session(model, tmp_path):
    """Those with a running turn are skipped; if all have one, there is no room."""
    async with world_in(model, tmp_path) as world:
        names = ("s-0", "s-1", "s-2")
        await world.make(*names)
        for name in names:
            await world.record(name)
        busy = await world.begin("s-0", max_tokens=100)
        assert await world.completion.make_room(ANN)
        assert await world.left(*names) == {"s-0", "s-2"}
        also_busy = await world.begin("s-2", max_tokens=100)
        assert not await world.completion.make_room(ANN)
        for turn in (busy, also_busy):
            world.service.turns.cancel(turn.submission.key, turn.submission.request_id)


async def test_temporary_sessions_of_a_killed_service_are_removed(model, tmp_path):
    """One whose answer was stored is not temporary any more, and stays."""
    async with world_in(model, tmp_path) as world:
        await world.make("lost", "kept")
        for name in ("lost", "kept"):
            await world.completion.record_temporary(ANN, name)
        await world.record("kept", is_temporary=True)
        assert await world.store.temporary_sessions() == [("acme", "lost")]
    async with world_in(model, tmp_path) as again:

        async def is_tidy():
            return await again.store.temporary_sessions() == []

        await again.until(is_tidy)
        assert await again.left("lost", "kept") == {"kept"}


@pytest.mark.parametrize(("most", "is_removed"), [(None, True), (1, True), (0, False)])
async def test_a_session_that_continued_is_not_removed(model, tmp_path, most, is_removed):
    """It has a turn that the removing code does not know; its inputs are removed with it."""
    async with world_in(model, tmp_path) as world:
        await world.make("s")
        info = ResponseInfo(1.0, "m")
        await world.record("s", response_id="resp_1", info=info, stored_input="[]")
        assert await world.completion.remove(ANN, "s", most) is is_removed
        assert await world.left("s") == (set() if is_removed else {"s"})
        found = await world.store.find_input("acme", "resp_1")
        assert found == (None if is_removed else "[]")


async def test_an_idle_session_of_a_sub_agent_is_ended(model, tmp_path):
    """It is not deleted; nor is one with a client's name, or of a main agent."""
    async with world_in(model, tmp_path, subagent_idle_s=0.05) as world:
        await world.make("s-1", "s-2", "s-3")
        named = Route("s-2", 0, 0, world.completion.chain(ANN).start, is_named=True)
        await world.record("s-2", route=named, is_subagent=True)
        await world.record("s-3")
        await world.record("s-1", is_subagent=True)
        await world.until(lambda: world.is_ended("s-1"))
        assert not await world.is_ended("s-2")
        assert not await world.is_ended("s-3")
        assert await world.left("s-1") == {"s-1"}


async def test_a_subagents_session_that_continued_is_not_ended(model, tmp_path):
    """At another server, or under its name."""
    async with world_in(model, tmp_path, subagent_idle_s=0.05) as world:
        await world.make("s-1", "s-2")
        turn = await world.begin("s-1", max_tokens=2)
        _ = [event async for event in turn.follow()]
        for name in ("s-1", "s-2"):
            await world.record(name, is_subagent=True)
        await world.until(lambda: world.is_ended("s-2"))
        assert not await world.is_ended("s-1")


async def test_no_session_is_ended_while_the_store_is_silent(model, tmp_path):
    """It may have continued."""
    blobs = FaultyStore(Random(1))  # noqa: S311
    calls = StoreCalls(View(blobs), 60.0, Backoff(Random(1), first_s=0.0, longest_s=0.0))  # noqa: S311
    async with world_in(model, tmp_path, subagent_idle_s=0.05, calls=calls) as world:
        await world.make("s-1", "s-2")
        blobs.odds = Odds(fails=1.0)
        await world.record("s-1", is_subagent=True)
        await world.until_so(lambda: calls.is_silent)
        blobs.odds = Odds()
        await world.record("s-2", is_subagent=True)
        await world.until(lambda: world.is_ended("s-2"))
        assert not await world.is_ended("s-1")
    calls.close()


async def test_a_missing_session_is_not_ended(model, tmp_path, caplog):
    """The others' end is not affected."""
    async with world_in(model, tmp_path, subagent_idle_s=0.05) as world:
        await world.make("s-2")
        await world.record("s-1", is_subagent=True)
        await world.record("s-2", is_subagent=True)
        await world.until(lambda: world.is_ended("s-2"))
    assert "openai_tidying_failed" not in caplog.text


def turn_of(conversation, session_id, *, release=None):
    """Make the first turn of a conversation, to be answered in a session."""
    item = {"id": f"msg_{session_id}"}
    going = ConversationTurn(conversation, None, "", [item], lambda _: (), release or (lambda: 0))
    fields = {"session_id": session_id, "conversation": going}
    return HttpTurn((ASKED,), {}, request_id=f"r-{session_id}", body=b"", **KEPT, **fields)


KEPT = {"is_kept": True, "overflow": ""}


async def test_a_conversation_is_free_when_its_turn_is_stored(model, tmp_path):
    """Before its client is answered; the session that it has left is removed."""
    async with world_in(model, tmp_path) as world:
        await world.make("conv_a", "conv_a-2")
        made = Conversation("conv_a", 1.0, {}, session_id="conv_a")
        await world.store.conversations.create("acme", made, ())
        released = []
        turn = turn_of(made, "conv_a-2", release=lambda: released.append(True))
        at = Route("conv_a-2", 0, 0, None, is_named=True)
        await world.completion.record(ANN, turn, at, ANSWER, is_temporary=True)
        assert released
        assert (await world.store.conversations.find("acme", "conv_a")).session_id == "conv_a-2"

        async def is_gone():
            return await world.left("conv_a", "conv_a-2") == {"conv_a-2"}

        await world.until(is_gone)


async def test_a_turn_abandoned_at_its_end_is_not_added_to_the_conversation(model, tmp_path):
    """The session made for it is removed with the turn; not if a repeat still follows it."""
    async with world_in(model, tmp_path) as world:
        await world.make("conv_a-2", "conv_a-3")
        made = Conversation("conv_a", 1.0, {}, session_id="conv_a-3")
        await world.store.conversations.create("acme", made, ())
        for session_id in ("conv_a-2", "conv_a-3"):
            route = Route(session_id, 0, 0, None, is_named=True)
            await world.completion.abandon(ANN, turn_of(made, session_id), route)
        assert await world.left("conv_a-2", "conv_a-3") == {"conv_a-3"}


RESEMBLED = Resembled("old", 2, was_known=True)
ROUTE = Route("new", 0, 0, b"history", resembles=RESEMBLED)


def session(num_turns=2, *, is_ended=False):
    """Make a session of some turns."""
    made = Transcript(Header("acme", "model", "old"))
    for number in range(num_turns):
        ids = (number,)
        record = TurnRecord(
            number, f"r-{number}", "d", ids, ids, ("x",), (), (), 1, "stop", Usage(), 1.0
        )
        made = made.with_turn(record, is_final=is_ended and number == num_turns - 1)
    return made


def test_the_left_session_is_superseded_where_the_other_begins():
    """An edit, a compaction, or a dropped thought: its newest answer is in the other one."""
    assert supersedes(turn(), ROUTE, RESEMBLED, session())


@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_session_that_continued_is_an_independent_branch(num_turns):
    """The client went back to an earlier answer; or another client's turn came in between."""
    assert not supersedes(turn(), ROUTE, RESEMBLED, session(num_turns))


def test_a_session_named_by_its_client_is_not_superseded():
    named = replace(RESEMBLED, is_named=True)
    assert not supersedes(turn(), ROUTE, named, session())


def test_a_subagent_supersedes_nothing():
    """Its agent continues beside it."""
    assert not supersedes(turn(is_subagent=True), ROUTE, RESEMBLED, session())


def test_a_conversation_that_stays_in_its_session_supersedes_nothing():
    """Nor does one that has ended."""
    assert not supersedes(turn(), replace(ROUTE, session_id="old"), RESEMBLED, session())
    assert not supersedes(turn(), ROUTE, RESEMBLED, session(is_ended=True))
