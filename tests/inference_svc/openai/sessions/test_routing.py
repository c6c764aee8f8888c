"""Histories as digests."""

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.openai.messages import Message
from inference_svc.openai.sessions.routing import HistoryChain, beginnings
from inference_svc.openai.sessions.store_file import KEY_BYTES

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
