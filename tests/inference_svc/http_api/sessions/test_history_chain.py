"""Histories as digests."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.chat import Message, Tool, ToolCall
from inference_svc.http_api.sessions.history_chain import HistoryChain, beginnings, open_chain
from inference_svc.http_api.sessions.store_file import KEY_BYTES

KEY = bytes(range(KEY_BYTES))
CHAIN = HistoryChain(KEY, "acme", "model")

messages = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant"]), st.text(max_size=6)),
    max_size=5,
)


def strip_answer(message):
    is_answer = message.role == "assistant"
    return Message(message.role, message.content.strip()) if is_answer else message


@given(messages, messages)
def test_digests_are_equal_exactly_for_equal_histories(one, other):
    """White space around an answer does not count; every other character does."""
    digests = [CHAIN.along(CHAIN.start, said)[-1] for said in (one, other)]
    same = list(map(strip_answer, one)) == list(map(strip_answer, other))
    assert (digests[0] == digests[1]) == same


def test_roles_and_contents_are_separated():
    """A message is not another one that is split differently."""
    said = [Message("user", "ab"), Message("user", "")]
    other = [Message("user", "a"), Message("user", "b")]
    assert CHAIN.along(CHAIN.start, said)[-1] != CHAIN.along(CHAIN.start, other)[-1]


def test_a_digest_can_be_continued():
    """The digest of a whole is that of its beginning and the rest."""
    said = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    digests = CHAIN.along(CHAIN.start, said)
    assert CHAIN.along(digests[1], said[1:]) == digests[1:]


def test_histories_are_not_shared():
    """With another tenant, model or service."""
    others = [
        HistoryChain(KEY, "other", "model"),
        HistoryChain(KEY, "acme", "another"),
        HistoryChain(bytes(KEY_BYTES), "acme", "model"),
        HistoryChain(KEY, "acmem", "odel"),
    ]
    assert len({chain.start for chain in (CHAIN, *others)}) == 5


def test_a_sessions_histories_have_their_own_digests():
    """Equal histories of two sessions have different ones."""
    assert len({CHAIN.start, CHAIN.within(CHAIN.start, "a"), CHAIN.within(CHAIN.start, "b")}) == 3


def test_ids_depend_on_all_of_their_parts():
    """And on the tenant."""
    ids = {CHAIN.id_of("a", "b"), CHAIN.id_of("ab"), CHAIN.id_of("a", "b", "")}
    assert len(ids | {HistoryChain(KEY, "x", "model").id_of("a", "b")}) == 4


def test_beginnings_end_with_an_answer():
    """Something follows each; the longest comes first."""
    roles = ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert beginnings([Message(role, "x") for role in roles]) == [5, 3]
    assert beginnings([Message("user", "x")]) == []


def test_calls_are_part_of_a_history():
    """By name and arguments in any order; not by ids, which clients may change."""
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


def test_a_result_belongs_to_its_call():
    """Exchanged results are another history."""
    result = Message("tool", "4", tool_call_id="c1", name="look")
    digests = [
        CHAIN.after(CHAIN.start, one)
        for one in (result, replace(result, tool_call_id="c2"), replace(result, content="5"))
    ]
    assert len(set(digests)) == 3
    assert CHAIN.after(CHAIN.start, replace(result, name="")) == digests[0]


def test_tools_begin_a_history():
    """Different tools give different digests; without tools it is the original one."""
    tools = (Tool("look", "Looks."),)
    openings = [CHAIN.opening(()), CHAIN.opening(tools), CHAIN.opening((*tools, Tool("see")))]
    assert openings[0] == CHAIN.start
    assert len(set(openings)) == 3


def test_template_arguments_begin_a_history():
    """Beside the tools; without any it is the original one."""
    tools = (Tool("look", "Looks."),)
    openings = [CHAIN.opening(of, framing) for of in ((), tools) for framing in ("", "a", "b")]
    assert len(set(openings)) == 6
    assert openings[0] == CHAIN.start
    assert openings[3] == CHAIN.opening(tools)


def test_the_names_of_users_are_part_of_a_history():
    """Those of answers are not: clients may add or omit them."""
    for role, num in (("user", 3), ("system", 3), ("assistant", 1), ("tool", 1)):
        named = [Message(role, "x", name=name) for name in ("", "Ann", "Bo")]
        assert len({CHAIN.after(CHAIN.start, one) for one in named}) == num


def test_shared_digests_never_change():
    """Other releases find them in transcripts; they depend on the tenant and the model."""
    said = [Message("user", "Hi"), Message("assistant", "Yes?")]
    chain = open_chain("acme", "model")
    digest = chain.along(chain.opening((Tool("look"),), "framed"), said)[-1]
    assert chain.within(digest, "s").hex() == "7ddd6793a4dacf8b816ae0b25868c6bf"
    assert digest.hex() == "6f7992aaeded6a4f39fc21eec0652ce8"
    others = [("acme", "model"), ("other", "model"), ("acme", "another")]
    assert len({CHAIN.start, *(open_chain(*one).start for one in others)}) == 4
