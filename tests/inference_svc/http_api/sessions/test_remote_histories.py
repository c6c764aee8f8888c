"""Unnamed conversations continue at every server that shares their store."""

from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from random import Random

import pytest

from inference_svc.core.chat import Message
from inference_svc.core.submission import TextInput
from inference_svc.http_api.sessions.history_chain import open_chain
from inference_svc.http_api.sessions.lookup import ResponseInfo, Route
from inference_svc.runtime.turns.store_calls import StoreCalls
from shared.process.backoff import Backoff
from shared.types.session_key import SessionKey
from tests.faulty_store import FaultyStore, Odds, View
from tests.inference_svc.http_api.sessions.test_routing import (
    ANN,
    ANSWERS,
    DEFAULTS,
    MORE,
    QUESTION,
    Server,
    talk,
    turn,
)
from tests.memory_engine import loaded_model
from tests.turn_service import serving


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


class SharingServer(Server):
    """One server, with its own transcripts and memory."""

    names = count()

    def __init__(self, service, directory):
        super().__init__(service, directory)
        self.sessions = service.turns.sessions
        self.calls = service.store.sharing.store.calls

    async def answer(self, messages, text):
        """Answer a conversation in its session, or in a new one; return which."""
        route, asked = await self.find(messages, "")
        route = replace(route, session_id=route.session_id or f"s-{next(self.names)}")
        await self.record(asked, route, text)
        return route

    async def say(self, num_answers, start=0):
        """Run a whole conversation; return the session of its last turn."""
        for num in range(start, num_answers):
            route = await self.answer(talk(num), ANSWERS[num])
        return route

    def asked(self):
        """Return how often conversations were looked up, by result."""
        return {result: num for (result,), num in self.sessions.histories.asked.counts.items()}

    def num_calls(self, kind):
        return self.calls.ended.counts[(kind,)]


@pytest.fixture
async def servers(model, tmp_path):
    blobs = FaultyStore(Random(3))  # noqa: S311
    async with AsyncExitStack() as stack:
        made = []
        for name in ("here", "there"):
            backoff = Backoff(Random(1), first_s=0.0, longest_s=0.0)  # noqa: S311
            calls = StoreCalls(View(blobs), 60.0, backoff)
            stack.callback(calls.close)
            directory = tmp_path / f"{name}-sessions"
            directory.mkdir()
            service = await stack.enter_async_context(serving(model, directory, calls=calls))
            made.append(SharingServer(service, tmp_path / name))
            stack.callback(made[-1].store.close)
        yield made


@pytest.fixture
def here(servers):
    return servers[0]


@pytest.fixture
def there(servers):
    return servers[1]


async def test_a_conversation_continues_anywhere(here, there):
    """In its session, whichever server has answered before; each adds it to its own."""
    begun = await here.say(1)
    route = await there.answer(talk(1), ANSWERS[1])
    assert (route.session_id, route.turns, route.first) == (begun.session_id, 1, 2)
    assert route.may_append
    assert not route.is_named
    route, _ = await here.find(talk(2), "")
    assert (route.session_id, route.turns, route.first) == (begun.session_id, 2, 4)
    assert here.asked() == there.asked() == {"found": 1}
    for server in (here, there):
        assert await server.store.take_oldest(0) == [("acme", begun.session_id)]


async def test_known_and_new_conversations_are_not_looked_up(here):
    """Of an unknown one only the two longest beginnings are looked up."""
    await here.say(3)
    assert (await here.find(talk(3), ""))[0].turns == 3
    assert here.asked() == {}
    # Once for the session itself; then the transcript and its history, after each answer.
    assert here.calls.ended.counts == {("read",): 1, ("replaced",): 3, ("told",): 3}
    others = [replace(QUESTION, content="Ho"), *talk(3)[1:]]
    route, _ = await here.find(others, "")
    assert (route.session_id, route.turns) == ("", 0)
    assert here.asked() == {"absent": 1}
    assert here.num_calls("asked") == 2


async def test_a_client_that_goes_back_by_one_answer_gets_a_fork(here, there):
    """As at the original server."""
    begun = await here.say(2)
    edited = [*talk(1), Message("assistant", "Other"), MORE]
    route, _ = await there.find(edited, "")
    assert (route.session_id, route.turns, route.first) == (begun.session_id, 1, 2)
    assert not route.may_append


async def test_only_longer_histories_are_looked_up(here, there):
    """A server that knows a beginning continues it if others know no more."""
    await here.say(1)
    await there.say(2, start=1)
    messages = [*talk(1), Message("assistant", "Other"), MORE]
    route, _ = await here.find(messages, "")
    assert (route.turns, route.first) == (1, 2)
    assert here.num_calls("asked") == 1


async def test_a_deleted_session_is_not_found(here, there):
    """Its entries are removed with it; a remaining one leads nowhere."""
    begun = await here.say(1)
    key = SessionKey("acme", "model", begun.session_id)
    await here.sessions.delete(key)
    assert (await there.find(talk(1), ""))[0].session_id == ""
    (digest,) = digests(1)
    await here.sessions.histories.keep(key, digest)
    assert (await there.find(talk(1), ""))[0].session_id == ""
    assert there.asked() == {"absent": 1, "gone": 1}


@pytest.mark.parametrize("name", ["other", "no/name"])
async def test_entries_of_the_store_are_verified(here, there, name):
    """The session's own turns have their histories."""
    await here.say(1)
    route, asked = await here.find([replace(QUESTION, content="Ho")], "")
    await here.record(asked, replace(route, session_id="other"), ANSWERS[0])
    (digest,) = digests(1)
    await here.sessions.histories.keep(SessionKey("acme", "model", name), digest)
    assert (await there.find(talk(1), ""))[0].session_id == ""
    assert there.asked() == {"gone": 1}


def digests(num_answers):
    """Return the digests of a conversation's histories, which every server computes."""
    chain = open_chain("acme", "model")
    along = chain.along(chain.start, talk(num_answers)[:-1])
    return [digest.hex() for digest in along[2::2]]


async def test_a_silent_store_is_not_asked(servers, here, there):
    """Local conversations continue; others are new. Later everything works again."""
    await here.say(1)
    begun = await there.say(1)
    blobs = there.calls._store._store
    blobs.odds = Odds(fails=1.0)
    for result in range(1, 4):
        other = [QUESTION, Message("assistant", "Other"), MORE]
        assert (await there.find(other, ""))[0].session_id == ""
        assert there.asked() == {"silent": result}
    assert there.num_calls("failed") == 1, "by the first one"
    route = await there.answer(talk(1), ANSWERS[1])
    assert (route.session_id, route.turns) == (begun.session_id, 1)
    blobs.odds = Odds()
    await there.service.store.catch_up()
    assert (await here.find(talk(2), ""))[0].session_id == begun.session_id


async def test_histories_that_others_could_not_find_are_not_shared(here):
    """Without a history, with a temporary answer, or with only a part of one."""
    route = Route("s", 0, 0, b"")
    assert (await submission_of(here, turn(), route)).is_local is False
    for asked, at in (
        (turn(messages=(), raw=TextInput("Hi")), route),
        (turn(is_kept=False), route),
        (turn(is_final=True), route),
        (turn(), replace(route, turns=1)),
    ):
        made = await submission_of(here, asked, at)
        assert made.is_local
        assert made.fork_id
    info = ResponseInfo(1.0, "m")
    stored = await submission_of(
        here, turn(info=info, response_id="resp_1"), replace(route, turns=1)
    )
    assert (stored.is_local, stored.response_id) == (False, "resp_1"), "it is found by its id"
    assert (await submission_of(here, turn(response_id="resp_1"), route)).response_id == ""
    named = await submission_of(here, turn(), replace(route, is_named=True))
    assert (named.is_local, named.fork_id) == (False, "")
    assert named.digests_in("s", "Yes.").history == ""


async def submission_of(server, asked, route):
    before = await server.router.digest_before_answer(ANN, asked, route)
    is_local = server.router.is_local(asked, route, before)
    key = SessionKey("acme", "model", "s")
    return asked.as_submission(route, key, DEFAULTS, before, is_local=is_local)
