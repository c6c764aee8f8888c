"""How data that published traces lack is filled in."""

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


def test_a_longer_prompt_continues_and_a_shorter_one_starts_over():
    """Think time starts after the answer, as measured, or as estimated from its length."""
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
        (0, 90, 10),  # shorter than the kept part: it is unknown what it shares
        (250, 10, 10),
    ]
    assert [turn.think_s for turn in session.turns] == [0, 16, 60 - 30 - 1 - 3, 9]


def test_an_answer_longer_than_the_gap_leaves_no_think_time():
    """Think times are never negative."""
    session = session_of([Request(0.0, 10, 5, service_s=50.0), Request(3.0, 20, 5)])
    assert session.turns[1].think_s == 0.0


def _crowd(number: int) -> list[Request]:
    """Prompts of all lengths, one every two seconds."""
    return [Request(2.0 * index, 50 + 97 * index % 4000, 40) for index in range(number)]


def test_drawn_sessions_use_every_request_once():
    """With its lengths as in the trace, and its start at its time."""
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
    """A turn has the previous one as its history, and adds at most a prompt's length."""
    for session in drawn_sessions(_crowd(600), seed=3):
        for before, turn in zip(session.turns, session.turns[1:], strict=False):
            assert turn.history_tokens == before.kept_tokens
            assert 0 < turn.new_tokens <= MAX_NEW_TOKENS


def test_the_seed_determines_the_drawn_sessions():
    """Different seeds show how much depends on the draw."""
    first, again, other = (drawn_sessions(_crowd(300), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_late_request_continues_nothing():
    """A successor comes within twice the drawn gap, or an hour and its answer."""
    far_s = NEAR[1] * (3600.0 + 1.0 + 0.03 * 10) + 1
    requests = [Request(0.0, 100, 10), Request(far_s, 200, 10)]
    for seed in range(40):
        assert len(drawn_sessions(requests, seed)) == 2


def test_sessions_begin_at_the_requested_rate():
    """For traces without times."""
    begins = poisson_begins(4000, Filling(seed=1, rate=5.0))
    assert begins == sorted(begins)
    assert 4000 / begins[-1] == pytest.approx(5.0, rel=0.1)
    assert begins != poisson_begins(4000, Filling(seed=2, rate=5.0))
