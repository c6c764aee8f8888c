"""What published traces lack, and what is put in its place."""

import pytest

from kvd.plan.formats.filling import (
    MAX_NEW_TOKENS,
    NEAR,
    Filling,
    Request,
    drawn_sessions,
    poisson_begins,
    session_of,
)


def test_a_longer_prompt_continues_and_a_shorter_one_begins_anew():
    """Thinking begins when the answer is complete, as measured, or as guessed by its length."""
    requests = [
        Request(10.0, 100, 20, service_s=4.0),
        Request(30.0, 150, 100),
        Request(60.0, 90, 10, service_s=1.0),
        Request(70.0, 260, 10),
    ]
    session = session_of(requests)
    assert session.start_s == 10.0
    assert [(t.history_tokens, t.new_tokens, t.output_tokens) for t in session.turns] == [
        (0, 100, 20),
        (120, 30, 100),
        (0, 90, 10),  # shorter than what was kept: nobody knows what it shares
        (250, 10, 10),
    ]
    assert [turn.think_s for turn in session.turns] == [0, 16, 60 - 30 - 1 - 3, 9]


def test_an_answer_that_outlasts_the_next_request_leaves_no_time_to_think():
    """Impatient users do not think for less than no time."""
    session = session_of([Request(0.0, 10, 5, service_s=50.0), Request(3.0, 20, 5)])
    assert session.turns[1].think_s == 0.0


def _crowd(number: int) -> list[Request]:
    """Prompts of all lengths, one every two seconds."""
    return [Request(2.0 * index, 50 + 97 * index % 4000, 40) for index in range(number)]


def test_drawn_sessions_use_every_request_once():
    """Each as it is in the trace: its lengths, and a begin at its time."""
    requests = _crowd(600)
    sessions = drawn_sessions(requests, seed=3)
    used = sorted(
        (turn.history_tokens + turn.new_tokens, turn.output_tokens)
        for session in sessions
        for turn in session.turns
    )
    assert used == sorted((request.input_tokens, request.output_tokens) for request in requests)
    assert {session.start_s for session in sessions} <= {request.at_s for request in requests}
    assert len(sessions) < len(requests)


def test_drawn_sessions_only_grow():
    """A turn has the one before it as its history, and adds no more than a prompt's length."""
    for session in drawn_sessions(_crowd(600), seed=3):
        for before, turn in zip(session.turns, session.turns[1:], strict=False):
            assert turn.history_tokens == before.kept_tokens
            assert 0 < turn.new_tokens <= MAX_NEW_TOKENS


def test_a_seed_draws_other_sessions_and_the_same_seed_the_same():
    """So that it can be seen how much hangs on the draw."""
    first, again, other = (drawn_sessions(_crowd(300), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_who_comes_too_late_continues_nothing():
    """A successor comes within twice the gap that was drawn, an hour and its answer at most."""
    far_s = NEAR[1] * (3600.0 + 1.0 + 0.03 * 10) + 1
    requests = [Request(0.0, 100, 10), Request(far_s, 200, 10)]
    for seed in range(40):
        assert len(drawn_sessions(requests, seed)) == 2


def test_begins_come_at_the_rate_that_is_asked_for():
    """For traces without times."""
    begins = poisson_begins(4000, Filling(seed=1, rate=5.0))
    assert begins == sorted(begins)
    assert 4000 / begins[-1] == pytest.approx(5.0, rel=0.1)
    assert begins != poisson_begins(4000, Filling(seed=2, rate=5.0))
