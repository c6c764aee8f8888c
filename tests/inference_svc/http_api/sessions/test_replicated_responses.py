"""Stored responses can be continued at every server that shares their session."""

from dataclasses import replace

import pytest

from inference_svc.core.errors import TranscriptUnavailableError
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.http_api.sessions.lookup import ResponseInfo, Route, UnansweredResponse
from inference_svc.runtime.turns.shared_responses import Standing
from shared.access.identity import Identity
from shared.blobs.release import RESPONSES
from shared.types.session_key import SessionKey
from tests.faulty_store import Odds
from tests.inference_svc.http_api.sessions import test_remote_histories
from tests.inference_svc.http_api.sessions.test_routing import ANN, MORE, QUESTION, turn

model, servers, here, there = (
    test_remote_histories.model,
    test_remote_histories.servers,
    test_remote_histories.here,
    test_remote_histories.there,
)
INFO = ResponseInfo(1.0, "m", "Be brief.", metadata={"a": "é"})
ITEMS = '[{"type": "message"}]'
BOB = Caller(Identity("bob", "token", ("other",), frozenset({"client"})), "other")


def make_response_id(number):
    return f"resp_{number}"


class Talk:
    """A conversation of responses, each of which follows the one before it.

    Attributes:
        session_id: the session of its next response.
        num: the number of its next response.
    """

    def __init__(self, session_id="s-1", *, is_named=False):
        self.session_id = session_id
        self.num = 0
        self._is_named = is_named

    async def ask(self, server, **fields):
        """Create the next response at one server; return its id."""
        response_id = f"{self.session_id}-{self.num}".replace("s-", "resp_")
        asked = turn(
            messages=(MORE if self.num else QUESTION,),
            request_id=f"r-{response_id}",
            **{"response_id": response_id, "info": INFO, "stored_input": ITEMS, **fields},
        )
        route = Route(self.session_id, self.num, 0, b"" if not self.num else None)
        if self.num:
            await server.sessions.get(self.key, is_fresh=True)
        await server.record(asked, replace(route, is_named=self._is_named), "Yes.")
        self.num += 1
        return response_id

    @property
    def key(self):
        return SessionKey("acme", "model", self.session_id)


async def find(server, response_id, caller=ANN, **how):
    return await server.completion.responses.find(caller, response_id, **how)


async def delete(server, response_id):
    """As a client does."""
    responses = server.completion.responses
    at = (await find(server, response_id)).at
    if not at.is_named and await responses.is_last(ANN, response_id, at):
        await server.sessions.delete(SessionKey("acme", "model", at.session_id))
    await responses.delete(ANN, response_id, at)


def silence(server, *, is_silent=True):
    server.calls._store._store.odds = Odds(fails=1.0 if is_silent else 0.0)


async def test_a_response_is_the_same_everywhere(here, there):
    """With its input; the digest of its history is usable where it was created only."""
    first = await Talk().ask(here)
    made = await find(here, first)
    assert here.num_calls("asked") == 1, "whether it was deleted"
    found = await find(there, first)
    assert found == replace(made, history=None)
    assert await there.store.find_input("acme", first) == ITEMS
    num_asked = there.num_calls("asked")
    assert await find(there, first, is_followed=True) == found
    assert there.num_calls("asked") == num_asked, "it is here now"
    route = await there.router.find_after(ANN, found.at, found.history)
    assert (route.session_id, route.turns, route.may_append) == ("s-1", 1, True)
    assert await there.store.take_oldest(0) == [("acme", "s-1")], "it is counted like others"


async def test_a_conversation_goes_back_and_forth(here, there):
    """A server may have none of its responses yet, or lack the last one."""
    talk = Talk()
    for server, other in ((here, there), (there, here), (here, there)):
        last = await talk.ask(server)
        found = await find(other, last)
        assert (await other.router.find_after(ANN, found.at, None)).may_append
    transcript = await here.service.store.get(talk.key)
    assert [made.response for made in transcript.turns] == ["resp_1-0", "resp_1-1", "resp_1-2"]
    assert not [made.response for made in transcript.forked("fork", 3).turns if made.response]


async def test_calls_have_the_same_ids_at_every_server(here, there):
    """Whichever server is asked."""
    first = await Talk().ask(here)
    stored = await find(here, first)
    await here.completion.responses.share(ANN, "resp_c", stored, "", ["call_7"])
    found = await find(there, "resp_c")
    made = "call_here_{}".format
    assert [found.info.call_id_by(made)(index) for index in range(2)] == ["call_7", "call_here_1"]
    assert stored.info.call_id_by(made)(0) == "call_here_0"


async def test_other_tenants_cannot_see_responses(here, there):
    first = await Talk().ask(here)
    assert await find(there, first, BOB) is None
    assert await find(there, "resp_unknown") is None


async def test_unstored_responses_are_in_no_store(here, there):
    """Nor are those that stay local: without a place in a shared session."""
    first = await Talk().ask(here, info=None)
    assert await find(there, first) is None
    assert here.num_calls("told") == 1, "the history"
    temporary_sessions = await Talk("s-2").ask(here, is_final=True)
    assert await find(there, temporary_sessions) is None


async def test_a_deleted_response_is_deleted_everywhere(here, there):
    """Also where it was created, or repeatedly; whether it is its session's last one or not."""
    talk = Talk()
    first, second = await talk.ask(here), await talk.ask(here)
    assert await find(there, first)
    await delete(there, first)
    for server in (here, there):
        assert await find(server, first) is None
        assert await find(server, second), "it is another one"
    assert await here.store.find_response("acme", first) is None


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
async def test_a_session_is_deleted_with_its_last_response(here, there, order):
    """Wherever its responses were created, and in whatever order they are deleted."""
    talk = Talk()
    made = [await talk.ask(server) for server in (here, there, here)]
    for turns_left, (server, number) in enumerate(zip((there, here, there), order, strict=True)):
        found = await there.service.store.find(talk.key)
        assert found is not None, turns_left
        await delete(server, made[number])
    for server in (here, there):
        await server.service.store.refresh(talk.key)
        assert await server.service.store.find(talk.key) is None


async def test_a_response_missing_in_the_store_counts_locally(here, there):
    """It was never sent, or was swept: its session stays for it."""
    talk = Talk()
    first, second = await talk.ask(here), await talk.ask(here)
    await find(there, first)
    blobs = here.calls._store._store.blobs
    for name in [name for name in blobs if name.startswith(f"{RESPONSES}/")]:
        del blobs[name]
    await delete(here, first)
    assert await find(here, second)


async def test_a_named_session_stays(here, there):
    """Its responses move with it."""
    talk = Talk("mine", is_named=True)
    first = await talk.ask(here)
    assert (await find(there, first)).at.is_named
    await delete(there, first)
    assert await there.service.store.find(talk.key)
    assert await there.store.take_oldest(0) == []


async def test_responses_are_deleted_with_their_session(here, there):
    """Whoever deletes it; a remaining entry leads nowhere."""
    talk = Talk()
    first, second = await talk.ask(here), await talk.ask(here)
    await find(there, first)
    entry = await here.sessions.responses.find("acme", second)
    await there.sessions.delete(talk.key)
    for one in (first, second):
        assert await find(here, one) is None
        assert await find(there, one) is None
    await here.sessions.responses.keep("acme", "resp_left", entry)
    assert await find(there, "resp_left") is None


async def test_entries_of_the_store_are_verified(here, there):
    """The session's own turns list its responses."""
    first = await Talk().ask(here)
    entry = await here.sessions.responses.find("acme", first)
    for number, wrong in enumerate(
        (
            replace(entry, request="another"),
            replace(entry, turns=2),
            replace(entry, session="s-other"),
            replace(entry, info={"model": "m"}),
        )
    ):
        await here.sessions.responses.keep("acme", make_response_id(number), wrong)
        assert await find(there, make_response_id(number)) is None
        assert await there.store.find_response("acme", make_response_id(number)) is None


async def test_a_silent_store_leaves_responses_unknown(here, there):
    """A local one is found, and stays when it has to be deleted."""
    talk = Talk()
    first = await talk.ask(here)
    second = await talk.ask(here)
    await find(there, first)
    silence(there)
    assert await find(there, first)
    at = (await find(here, second)).at
    for asked in (
        find(there, second),
        find(there, "resp_unknown"),
        there.completion.responses.is_last(ANN, first, at),
        there.completion.responses.delete(ANN, first, at),
    ):
        with pytest.raises(TranscriptUnavailableError):
            await asked
    assert await there.store.find_response("acme", first)
    silence(there, is_silent=False)
    assert await find(there, second)


async def test_a_response_of_a_deleted_local_session_is_fetched_again(here, there):
    """Another server continues it: it has the response's turn."""
    talk = Talk()
    first = await talk.ask(here)
    await find(there, first)
    await talk.ask(there)
    await here.sessions.release(talk.key)
    assert await here.service.store.find(talk.key) is None
    silence(here)
    with pytest.raises(TranscriptUnavailableError):
        await find(here, first, is_followed=True)
    silence(here, is_silent=False)
    assert await find(here, first, is_followed=True)
    assert len((await here.service.store.get(talk.key)).turns) == 2


async def test_responses_during_the_stores_silence_are_sent_later(here, there):
    """Their session is sent as well."""
    silence(here)
    first = await Talk().ask(here)
    silence(here, is_silent=False)
    await here.service.store.catch_up()
    assert (await there.sessions.responses.standing("acme", [first]))[first] is Standing.THERE
    assert await find(there, first)


async def test_a_response_without_an_answer_is_not_looked_up(here):
    """It is known where it runs."""
    await here.store.keep_unanswered("acme", "resp_1", UnansweredResponse(INFO))
    silence(here)
    assert await find(here, "resp_1") is None
