"""A turn's answer for one HTTP client: when it begins."""

from dataclasses import replace

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.chat import Message
from inference_svc.core.errors import DrainingError, SessionMovedError, TurnCancelledError
from inference_svc.core.submission import Submission, TextInput
from inference_svc.core.turn_record import Accepted, AnswerToken, Finished, Started, Tokens, Usage
from inference_svc.http_api.sessions.answers import Answers, LiveAnswer
from inference_svc.http_api.sessions.completion import Completion
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import (
    Conversation,
    ConversationTurn,
    Point,
    Route,
    StoredRequest,
)
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.sessions import Sessions
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn import Turn
from inference_svc.service.gateway import TurnStream
from shared.access.identity import socket_identity
from shared.types.session_key import SessionKey
from tests.inference_svc.http_api.sessions import test_remote_histories
from tests.inference_svc.http_api.sessions.test_routing import ANN, make_record, turn
from tests.inference_svc.service.gateways import gateway_to

model, servers, here, there = (
    test_remote_histories.model,
    test_remote_histories.servers,
    test_remote_histories.here,
    test_remote_histories.there,
)
CALLER = Caller(socket_identity("socket", ("a",), ("client",)), "a")
WAITS = Accepted("s", 0, "r", 3, is_replayed=False)
LOADED = Started(5, 5, 0.1, 3)
SAID = Tokens((AnswerToken(7, "yes"),))


def answer_of(turn):
    return LiveAnswer(
        None,
        CALLER,
        None,
        Route("s", 0, 0, None),
        TurnStream(turn, lambda: None),
        is_temporary=False,
    )


def new_turn():
    return Turn(
        Submission(
            key=SessionKey("a", "m", "s"),
            input=TextInput("x"),
            sampling=SamplingParams(max_tokens=1, seed=1),
            has_max_tokens=True,
            request_id="r",
            digest="d",
            expected_turn=None,
            waits=False,
            is_final=False,
            arrived_ns=0,
        )
    )


async def test_a_loaded_turn_that_is_handed_back_is_refused():
    """No stream has begun, so that the client gets a status that allows a retry."""
    turn = new_turn()
    turn.publish(WAITS, LOADED)
    turn.close(DrainingError("about to stop", "submit again"))
    with pytest.raises(DrainingError):
        await answer_of(turn).wait_begun()


async def test_a_turn_cancelled_while_it_waits_is_no_failure():
    """It ends with an event, and has no answer."""
    turn = new_turn()
    turn.publish(WAITS, Finished("cancelled", "", Usage(), 0))
    turn.close()
    with pytest.raises(TurnCancelledError):
        await answer_of(turn).wait_begun()


async def test_the_first_tokens_of_an_answer_are_not_lost():
    """They are repeated."""
    turn = new_turn()
    turn.publish(WAITS, LOADED, SAID)
    answer = answer_of(turn)
    await answer.wait_begun()
    assert await anext(answer.events()) == SAID


async def test_a_turn_of_a_conversation_that_continued_elsewhere_may_be_retried(here, there):
    """Its session has more turns than expected."""
    key = SessionKey("acme", "model", "conv_a")
    first = make_record(0, "Yes?")
    await here.service.store.append(key, first, is_final=False)
    await there.sessions.get(key, is_fresh=True)
    await here.service.store.append(key, make_record(1, "And?"), is_final=False)
    before = Conversation("conv_a", 1.0, {}, "", "conv_a", 1, first.request_id)
    at = Point("conv_a", 1, first.request_id, is_named=True)
    going = ConversationTurn(before, at, "", (), lambda _: (), lambda: None)
    answers = Answers(gateway_to(there.service, "model"), there.store, there.completion)
    with pytest.raises(SessionMovedError, match="conversation conv_a") as refused:
        await answers.open(ANN, turn(session_id="conv_a", conversation=going, request_id="r-9"))
    assert refused.value.retryable


async def test_an_overtaken_turn_has_its_place(tmp_path):
    """Its session's id, its history, and the place for a repeat of its request."""
    store = ApiStore(tmp_path, 100)
    sessions = Sessions(TranscriptStore(tmp_path), None, None, None, None, None)
    completion = Completion(sessions, "m", store, 10, 900.0)
    asked = HttpTurn((Message("user", "Hi"),), {}, "", True, "", "r", b"body", repeat_key=b"key")
    route = Route("s", 2, 0, completion.chain(CALLER).start)
    turn = new_turn()
    turn.publish(WAITS, LOADED, SAID, Finished("stop", "yes", Usage(), 3, moved_to="mine"))
    turn.close()
    stream = TurnStream(turn, lambda: None)
    answer = LiveAnswer(completion, CALLER, asked, route, stream, is_temporary=False)
    await answer.whole()
    assert answer.session_id == "mine"
    assert await store.find_request(b"key") == StoredRequest(
        b"body", replace(route, session_id="mine")
    )
    assert await store.take_oldest(0) == [("a", "mine")]
    store.close()
