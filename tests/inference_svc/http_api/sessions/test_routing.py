"""Histories as digests, and what is submitted at the end of a route."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.chat import Message, Tool, ToolCall
from inference_svc.core.errors import EmptyTurnError, InvalidSamplingError
from inference_svc.core.submission import ChatInput, ModelTraits, TurnDefaults
from inference_svc.core.truncation import OverflowPolicy
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.sessions.lookup import Route
from inference_svc.http_api.sessions.routing import HistoryChain, HttpTurn, beginnings
from inference_svc.http_api.sessions.store_file import KEY_BYTES
from shared.types.session_key import SessionKey

KEY = bytes(range(KEY_BYTES))
CHAIN = HistoryChain(KEY, "acme", "model")

messages = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant"]), st.text(max_size=6)),
    max_size=5,
)


def stripped(message):
    is_answer = message.role == "assistant"
    return Message(message.role, message.content.strip()) if is_answer else message


@given(messages, messages)
def test_equal_histories_and_only_those_have_equal_digests(one, other):
    """White space around an answer does not count; every other character does."""
    digests = [CHAIN.along(CHAIN.start, said)[-1] for said in (one, other)]
    same = list(map(stripped, one)) == list(map(stripped, other))
    assert (digests[0] == digests[1]) == same


def test_roles_and_contents_do_not_run_together():
    """A message is not another one that is written differently."""
    said = [Message("user", "ab"), Message("user", "")]
    other = [Message("user", "a"), Message("user", "b")]
    assert CHAIN.along(CHAIN.start, said)[-1] != CHAIN.along(CHAIN.start, other)[-1]


def test_a_history_goes_on_where_it_was():
    """The digest of a whole is that of its beginning and the rest."""
    said = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    digests = CHAIN.along(CHAIN.start, said)
    assert CHAIN.along(digests[1], said[1:]) == digests[1:]


def test_nobody_shares_a_history():
    """Not another tenant, model or service."""
    others = [
        HistoryChain(KEY, "other", "model"),
        HistoryChain(KEY, "acme", "another"),
        HistoryChain(bytes(KEY_BYTES), "acme", "model"),
        HistoryChain(KEY, "acmem", "odel"),
    ]
    assert len({chain.start for chain in (CHAIN, *others)}) == 5


def test_a_sessions_own_histories():
    """The same history of two sessions has two digests of their own."""
    assert len({CHAIN.start, CHAIN.within(CHAIN.start, "a"), CHAIN.within(CHAIN.start, "b")}) == 3


def test_ids_depend_on_all_of_their_parts():
    """And on the tenant."""
    ids = {CHAIN.id_of("a", "b"), CHAIN.id_of("ab"), CHAIN.id_of("a", "b", "")}
    assert len(ids | {HistoryChain(KEY, "x", "model").id_of("a", "b")}) == 4


def test_beginnings_end_with_an_answer_and_something_follows():
    """The longest comes first."""
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert beginnings([Message(role, "x") for role in roles]) == [5, 3]
    assert beginnings([Message("user", "x")]) == []


KEY_OF = SessionKey("acme", "model", "s")
DEFAULTS = TurnDefaults(64, OverflowPolicy("sinks", 0.25), "snapkv", 0.75, ModelTraits("ragged"))
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


def test_what_is_new_at_the_end_of_a_route_is_submitted():
    """After as many turns as the route has; what the client does not say is the settings'."""
    made = turn().as_submission(Route("s", 1, 2, None), KEY_OF, DEFAULTS)
    assert made.key == KEY_OF
    assert made.input == ChatInput((Message("user", "More"),))
    assert (made.expected_turn, made.is_final, made.waits) == (1, False, False)
    assert (made.sampling.temperature, made.sampling.max_tokens) == (0.5, 64)
    assert not made.has_max_tokens
    assert made.overflow == DEFAULTS.overflow
    assert (made.compression.name, made.compression.keep_ratio) == ("snapkv", 0.75)
    assert (made.request_id, made.digest) == ("r", "")


def test_what_the_client_says_goes_before_the_settings():
    """And a turn that is not to be kept is its session's last."""
    asked = turn(sampling={"max_tokens": 5, "seed": 7}, is_kept=False, overflow="reject")
    made = asked.as_submission(Route("s", 0, 0, None), KEY_OF, DEFAULTS)
    assert (made.sampling.max_tokens, made.sampling.seed, made.has_max_tokens) == (5, 7, True)
    assert made.is_final
    assert made.overflow == OverflowPolicy("reject", 0.25)
    assert len(made.input.messages) == 3


def test_a_turn_that_brings_nothing_is_refused():
    """Or one whose sampling cannot be: as by gRPC."""
    route = Route("s", 0, 0, None)
    with pytest.raises(EmptyTurnError):
        turn(messages=(Message("user", ""),)).as_submission(route, KEY_OF, DEFAULTS)
    with pytest.raises(InvalidSamplingError, match="top_p 0"):
        turn(sampling={"top_p": 0.0}).as_submission(route, KEY_OF, DEFAULTS)


def test_calls_of_tools_are_part_of_a_history():
    """By name and arguments, whose order does not count; not by ids, which clients may change."""
    call = ToolCall("look", '{"a": 1, "b": [2]}', "c1")
    said = Message("assistant", "I look.\n", (call,))
    same = [
        replace(said, content="I\n\nlook."),
        replace(said, tool_calls=(ToolCall("look", '{"b":[2],"a":1}', "other"),)),
    ]
    others = [
        replace(said, tool_calls=()),
        replace(said, tool_calls=(call, call)),
        replace(said, tool_calls=(replace(call, name="see"),)),
        replace(said, tool_calls=(replace(call, arguments="{}"),)),
        replace(said, content="I see."),
    ]
    digest = CHAIN.after(CHAIN.start, said)
    assert {CHAIN.after(CHAIN.start, one) for one in same} == {digest}
    assert len({digest, *(CHAIN.after(CHAIN.start, one) for one in others)}) == len(others) + 1


def test_what_a_tool_returned_is_of_a_call():
    """Two results are not those of one another's calls."""
    result = Message("tool", "4", tool_call_id="c1", name="look")
    digests = [
        CHAIN.after(CHAIN.start, one)
        for one in (result, replace(result, tool_call_id="c2"), replace(result, content="5"))
    ]
    assert len(set(digests)) == 3
    assert CHAIN.after(CHAIN.start, replace(result, name="")) == digests[0]


def test_tools_begin_a_history():
    """Others begin another, and none the one that there always was."""
    tools = (Tool("look", "Looks."),)
    openings = [CHAIN.opening(()), CHAIN.opening(tools), CHAIN.opening((*tools, Tool("see")))]
    assert openings[0] == CHAIN.start
    assert len(set(openings)) == 3


def test_what_arguments_make_of_it_begins_a_history():
    """Beside the tools; none is the one that there always was."""
    tools = (Tool("look", "Looks."),)
    openings = [CHAIN.opening(of, framing) for of in ((), tools) for framing in ("", "a", "b")]
    assert len(set(openings)) == 6
    assert openings[0] == CHAIN.start
    assert openings[3] == CHAIN.opening(tools)


def test_who_says_a_question_is_part_of_a_history():
    """Who says an answer is known: clients put names there, or leave them out."""
    for role, num in (("user", 3), ("system", 3), ("assistant", 1), ("tool", 1)):
        named = [Message(role, "x", name=name) for name in ("", "Ann", "Bo")]
        assert len({CHAIN.after(CHAIN.start, one) for one in named}) == num


def test_an_answer_that_is_begun_is_submitted_with_its_beginning():
    """And with the arguments of the template."""
    asked = turn(arguments={"style": 1}, reading=Reading(beginning="Well, "))
    made = asked.as_submission(Route("s", 1, 2, None), KEY_OF, DEFAULTS)
    assert (made.input.arguments, made.input.beginning) == ({"style": 1}, "Well, ")
    assert made.input.is_prompt
