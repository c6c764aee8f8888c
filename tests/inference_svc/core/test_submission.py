"""A turn's cost, its expectations of its session, and names of counters."""

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.chat import Message
from inference_svc.core.counters import COUNTERS, Counters
from inference_svc.core.errors import SessionEndedError, TurnMismatchError
from inference_svc.core.submission import ChatInput, Submission, TextInput, TokenInput
from inference_svc.core.transcript_format import ExpectedSession
from shared.types.session_key import SessionKey
from tests.inference_svc.core.test_transcript_format import transcript as transcript_of

MESSAGES = ChatInput((Message("system", "be brief"), Message("user", "once upon")))


@pytest.mark.parametrize(
    ("given", "num_input"),
    [(TokenInput((5, 6, 7)), 3), (TextInput("x" * 41), 10), (MESSAGES, 4)],
)
def test_a_turn_costs_its_input_and_the_longest_answer(given, num_input):
    """Tokens as given; for text and messages a quarter of the characters."""
    submission = Submission(
        key=SessionKey("t", "m", "s"),
        input=given,
        sampling=SamplingParams(max_tokens=7),
        has_max_tokens=True,
        request_id="",
        digest="",
        expected_turn=None,
        waits=False,
        is_final=False,
        arrived_ns=0,
    )
    assert submission.most_tokens == num_input + 7


def test_templates_get_messages_in_order():
    """Role and content of each."""
    assert MESSAGES.as_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "once upon"},
    ]


def test_a_session_must_match_its_clients_expectation():
    """Turns and context tokens, if given; an ended session accepts nothing."""
    transcript, ended = transcript_of(2), transcript_of(2, has_ended=True)  # 10 tokens
    for expected in (ExpectedSession(), ExpectedSession(2), ExpectedSession(2, 10)):
        expected.check(transcript)
        with pytest.raises(SessionEndedError):
            expected.check(ended)
    for expected in (ExpectedSession(1), ExpectedSession(0, 10)):
        with pytest.raises(TurnMismatchError, match="has 2 complete turns"):
            expected.check(transcript)
    for expected in (ExpectedSession(None, 9), ExpectedSession(2, 0)):
        with pytest.raises(TurnMismatchError, match="context of 10 tokens"):
            expected.check(transcript)


def test_every_counter_has_a_name():
    """All counters begin at zero; a snapshot does not change."""
    counters = Counters()
    counters.add("steps")
    before = counters.snapshot()
    counters.add("steps", 2)
    assert before == {**dict.fromkeys(COUNTERS, 0), "steps": 1}
    assert counters.snapshot()["steps"] == 3
    with pytest.raises(AssertionError, match="stepps"):
        counters.add("stepps")
