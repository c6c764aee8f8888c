"""The place of turns in sessions that clients have named, and what is submitted."""

import json
from dataclasses import dataclass, replace

import pytest

from inference_svc.core.chat import ChoiceKind, Message, Tool, ToolCall, ToolUse
from inference_svc.core.errors import EmptyTurnError, InvalidSamplingError
from inference_svc.core.submission import ChatInput, ModelTraits, TextInput, TurnDefaults
from inference_svc.core.template_arguments import canonical_arguments
from inference_svc.core.truncation import OverflowPolicy
from inference_svc.core.turn_record import ConversationDigests, Finished, TurnRecord, Usage
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.errors import UnknownHistoryError
from inference_svc.http_api.sessions.completion import Completion
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import Conversation, ConversationTurn, Route
from inference_svc.http_api.sessions.routing import Router
from inference_svc.http_api.sessions.store import ApiStore
from shared.access.identity import Identity
from shared.types.session_key import SessionKey
from tests.inference_svc.http_api.scripted_calls import FORCED, FORCED_TEXT, READING, TEXT
from tests.memory_engine import loaded_model
from tests.turn_service import Service, serving

KEY_OF = SessionKey("acme", "model", "s")
DEFAULTS = TurnDefaults(64, OverflowPolicy("sinks", 0.25), "snapkv", 0.75, ModelTraits("ragged"))
NOTHING_SAID = ConversationDigests()
SAID = (Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "More"))


def turn(**fields):
    given = {
        "messages": SAID,
        "sampling": {"temperature": 0.5},
        "session_id": "",
        "is_kept": True,
        "overflow": "",
        "request_id": "r",
        "body": b"digest",
    }
    return HttpTurn(**{**given, **fields})


def test_new_messages_are_submitted_at_the_end_of_a_route():
    """After as many turns as the route has; omitted values come from the settings."""
    made = turn().as_submission(Route("s", 1, 2, None), KEY_OF, DEFAULTS)
    assert made.key == KEY_OF
    assert made.input == ChatInput((Message("user", "More"),))
    assert (made.expected_turn, made.is_final, made.waits) == (1, False, False)
    assert (made.sampling.temperature, made.sampling.max_tokens) == (0.5, 64)
    assert not made.has_max_tokens
    assert made.overflow == DEFAULTS.overflow
    assert (made.compression.name, made.compression.keep_ratio) == ("snapkv", 0.75)
    assert (made.request_id, made.digest) == ("r", "")


def test_the_clients_values_override_the_settings():
    """And a turn that is not to be kept is its session's last."""
    asked = turn(sampling={"max_tokens": 5, "seed": 7}, is_kept=False, overflow="reject")
    made = asked.as_submission(Route("s", 0, 0, None), KEY_OF, DEFAULTS)
    assert (made.sampling.max_tokens, made.sampling.seed, made.has_max_tokens) == (5, 7, True)
    assert made.is_final
    assert made.overflow == OverflowPolicy("reject", 0.25)
    assert len(made.input.messages) == 3


def test_a_turn_without_input_is_refused():
    """As is one with impossible sampling: as over gRPC."""
    route = Route("s", 0, 0, None)
    with pytest.raises(EmptyTurnError):
        turn(messages=(Message("user", ""),)).as_submission(route, KEY_OF, DEFAULTS)
    with pytest.raises(InvalidSamplingError, match="top_p 0"):
        turn(sampling={"top_p": 0.0}).as_submission(route, KEY_OF, DEFAULTS)


def test_a_continued_answer_is_submitted_with_its_beginning():
    """And with the arguments of the template."""
    asked = turn(arguments={"style": 1}, reading=Reading(beginning="Well, "))
    made = asked.as_submission(Route("s", 1, 2, None), KEY_OF, DEFAULTS)
    assert (made.input.arguments, made.input.beginning) == ({"style": 1}, "Well, ")
    assert made.input.is_prompt


ANN = Caller(Identity("ann", "token", ("acme",), frozenset({"client"})), "acme")
NAME = "s"
QUESTION, MORE = Message("user", "Hi"), Message("user", "And then?")
ANSWERS = ("Yes?", "Then this.", "No more.")


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


async def framing(arguments):
    return canonical_arguments(arguments)


class Server:
    """One server's own memory of answers, with shared sessions."""

    def __init__(self, service: Service, directory):
        directory.mkdir()
        self.service = service
        self._transcripts = service.store
        self.store = ApiStore(directory, 1000, 2**20)
        sessions = service.turns.sessions
        self.completion = Completion(sessions, "model", self.store, 10, 900.0)
        self.router = Router(sessions, "model", self.store, framing)
        self.chain = self.completion.chain(ANN)

    async def find(self, messages, session_id=NAME, **fields):
        """Find the place of a turn; return both."""
        asked = turn(messages=tuple(messages), session_id=session_id, **fields)
        return await self.router.find(ANN, self.chain, asked), asked

    async def answer(self, messages, text, session_id=NAME, **fields):
        """Find the place of a turn, and answer it there; return the place."""
        route, asked = await self.find(messages, session_id, **fields)
        await self.record(asked, route, text)
        return route

    async def record(self, asked, route, text):
        key = SessionKey("acme", "model", route.session_id)
        before = await self.router.digest_before_answer(ANN, asked, route)
        is_local = self.router.is_local(asked, route, before)
        submission = asked.as_submission(route, key, DEFAULTS, before, is_local=is_local)
        record = make_record(route.turns, text, submission.digests_in(route.session_id, text))
        record = replace(record, request_id=asked.request_id, response=submission.response_id)
        await self._transcripts.append(key, record, is_final=False, is_local=is_local)
        finished = Finished("stop", text, Usage(), route.turns + 1)
        await self.completion.record(ANN, asked, route, finished, is_temporary=False)

    async def knows(self, digest):
        """Return whether it has stored where a history of the session ends."""
        own = self.chain.within(digest, NAME)
        return own in await self.store.find_histories([own])


def make_record(num, text, told=NOTHING_SAID):
    """Return the record of a session's turn."""
    return TurnRecord(
        turn=num,
        request_id="r",
        request_digest="",
        input_ids=(5, 6, 7),
        output_ids=(8,),
        pieces=(text,),
        logprobs=(),
        top_logprobs=(),
        uncomputed_tokens=1,
        finish_reason="stop",
        usage=Usage(),
        created_unix_s=1.5,
        said=told.said,
        history=told.history,
    )


@dataclass
class Two:
    """Two servers with the same transcripts, each with its own memory and secret."""

    service: Service
    here: Server
    there: Server

    async def transcript(self, session_id=NAME):
        return await self.service.store.get(SessionKey("acme", "model", session_id))


@pytest.fixture
async def two(model, tmp_path):
    async with serving(model, tmp_path) as service:
        servers = [Server(service, tmp_path / name) for name in ("here", "there")]
        yield Two(service, *servers)
        for server in servers:
            server.store.close()


def talk(num_answers, answers=ANSWERS):
    """Make a whole conversation, with so many answers and a question."""
    said = [one for text in answers[:num_answers] for one in (Message("assistant", text), MORE)]
    return [QUESTION, *said]


async def test_a_conversation_continues_where_its_transcript_is(two):
    """Whichever server has answered before; the answering one knows it itself from then on."""
    await two.here.answer(talk(0), ANSWERS[0])
    route = await two.there.answer(talk(1), ANSWERS[1])
    digests = two.there.chain.along(two.there.chain.start, talk(2))
    assert route == Route(NAME, 1, 2, digests[2], is_named=True)
    assert await two.there.knows(digests[4])
    assert not await two.there.knows(digests[2])
    assert (await two.here.answer(talk(2), ANSWERS[2])).turns == 2  # at the original server
    route, _ = await two.there.find(talk(3))
    assert (route.turns, route.first) == (3, 6)


WHOLE = talk(2)


@pytest.mark.parametrize(
    "messages",
    [
        [*WHOLE[:3], Message("assistant", "Then that."), MORE],  # another last answer
        [QUESTION, Message("assistant", "No."), *WHOLE[2:]],  # another one before
        [Message("user", "Ho"), *WHOLE[1:]],
        [Message("system", "Be brief."), *WHOLE],
        WHOLE[2:],  # a part of it
        talk(1),  # a turn less
        WHOLE[:4],  # nothing new
    ],
)
async def test_another_conversation_is_refused_where_the_transcript_is(two, messages):
    """Edited or cut anywhere: as by the server that has answered."""
    for num, text in enumerate(ANSWERS[:2]):
        await two.here.answer(talk(num), text)
    for server in (two.here, two.there):
        with pytest.raises(UnknownHistoryError):
            await server.find(messages)


async def test_an_answer_behind_the_sessions_end_is_new(two):
    """Whoever wrote it: as at the server that has answered."""
    await two.here.answer(talk(0), ANSWERS[0])
    found = [(await server.find(talk(2)))[0] for server in (two.here, two.there)]
    assert [(route.turns, route.first) for route in found] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    "fields",
    [{"reading": Reading(use=ToolUse((Tool("look"),)))}, {"arguments": {"style": 1}}],
)
async def test_tools_and_framing_are_part_of_the_history(two, fields):
    """Equal ones continue; without them the turn is refused, at both servers."""
    await two.here.answer(talk(0), ANSWERS[0], **fields)
    for server in (two.here, two.there):
        assert (await server.find(talk(1), **fields))[0].first == 2
        with pytest.raises(UnknownHistoryError):
            await server.find(talk(1))


AS_IT_LIKES = replace(FORCED, use=ToolUse(FORCED.use.tools), heads={})
NOT_AT_ALL = replace(FORCED, use=ToolUse(FORCED.use.tools, ChoiceKind.NONE), heads={})


@pytest.mark.parametrize(
    ("reading", "text", "then"),
    [
        (READING, TEXT, READING),  # a thought, a sentence, two calls
        (READING, TEXT[: TEXT.index("words.")], READING),  # cut in a thought
        (READING, TEXT[: TEXT.index("1}")], READING),  # cut before it is a call
        (FORCED, FORCED_TEXT, AS_IT_LIKES),
        (FORCED, FORCED_TEXT[:60], AS_IT_LIKES),  # cut in its arguments
        (FORCED, FORCED_TEXT, NOT_AT_ALL),
        (AS_IT_LIKES, FORCED_TEXT, NOT_AT_ALL),
        (Reading(beginning="Well, "), "yes.", Reading()),
        (Reading(), "", Reading()),
    ],
)
async def test_an_answer_counts_as_its_client_has_it(two, reading, text, then):
    """Without thoughts, with calls by value, whatever tools the next turn offers."""
    await two.here.answer(talk(0), text, reading=reading)
    sent = reading.message(text)
    calls = tuple(encode_anew(call) for call in sent.tool_calls)
    sent = replace(sent, content=f" {sent.content}\n", tool_calls=calls)
    results = [Message("tool", "4", tool_call_id=call.call_id) for call in calls]
    messages = [QUESTION, sent, *results, MORE]
    for server in (two.here, two.there):
        route, _ = await server.find(messages, reading=then)
        assert (route.turns, route.first) == (1, 2)


def encode_anew(call):
    """Encode a call as a client sends it back: with other spaces, in another order."""
    values = dict(reversed(call.values.items()))
    return ToolCall(call.name, json.dumps(values, indent=1), f"own-{call.name}")


async def test_only_new_messages_say_nothing_about_the_rest(two):
    """They go to the session's end; the session's history is unknown afterwards."""
    await two.here.answer(talk(0), ANSWERS[0])
    route = await two.there.answer([MORE], ANSWERS[1])
    assert route == Route(NAME, 1, 0, None, is_named=True)
    assert [bool(one.said) for one in (await two.transcript()).turns] == [True, False]
    for server in (two.here, two.there):
        with pytest.raises(UnknownHistoryError):
            await server.find(talk(2))


async def test_a_turn_without_a_digest_is_not_continued(two):
    """It came over gRPC, or from an older release."""
    key = SessionKey("acme", "model", NAME)
    await two.service.store.append(key, make_record(0, ANSWERS[0]), is_final=False)
    with pytest.raises(UnknownHistoryError):
        await two.there.find(talk(1))


async def test_digests_belong_to_a_session(two):
    """Equal conversations have different ones, and a fork by gRPC is no session of the client's."""
    for name in (NAME, "t"):
        await two.here.answer(talk(0), ANSWERS[0], name)
    transcripts = [await two.transcript(name) for name in (NAME, "t")]
    assert len({found.turns[-1].said for found in transcripts}) == 2
    await two.service.store.fork(SessionKey("acme", "model", NAME), "fork", 1)
    for server in (two.here, two.there):
        with pytest.raises(UnknownHistoryError):
            await server.find(talk(1), "fork")


async def test_a_known_history_under_a_new_name_is_known_elsewhere(two):
    """The fork's first turn has all earlier digests, too."""
    route, asked = await two.here.find(talk(0), "")
    await two.here.record(asked, replace(route, session_id="unnamed"), ANSWERS[0])
    route, asked = await two.here.find(talk(1), "new")
    await two.service.store.fork(SessionKey("acme", "model", "unnamed"), "new", 1)
    assert (route.turns, route.first, route.name) == (1, 2, "new")
    await two.here.record(asked, replace(route, session_id="new"), ANSWERS[1])
    assert (await two.there.find(talk(2), "new"))[0].turns == 2


async def test_incomplete_histories_are_not_recorded(two):
    """Those of unnamed sessions, raw turns, and turns that follow a stored object."""
    route = Route(NAME, 0, 0, b"", is_named=True)
    going = ConversationTurn(Conversation("conv_1", 1.0, {}), None, "", (), lambda _: (), bool)
    before = two.here.router.digest_before_answer
    assert await before(ANN, turn(), route) is not None
    for asked, at in (
        (turn(), replace(route, is_named=False)),
        (turn(messages=(), raw=TextInput("Hi")), route),
        (turn(), replace(route, turns=1)),
        (turn(conversation=going), route),
    ):
        assert await before(ANN, asked, at) is None
        assert asked.as_submission(at, KEY_OF, DEFAULTS, None).make_digests is None
