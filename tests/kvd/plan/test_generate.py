"""Generated sessions have the statistics of their specification."""

import numpy as np
import pytest

from kvd.plan.generate import sharegpt_like
from kvd.plan.trace import footprint_tokens, truncated

WINDOW = 4096


@pytest.fixture(scope="module")
def sessions():
    """Draw as many sessions as the paper has."""
    return sharegpt_like(9000, 1.0, WINDOW, seed=7)


def _values(sessions, name, *, first=True):
    return np.array(
        [
            getattr(turn, name)
            for session in sessions
            for index, turn in enumerate(session.turns)
            if first or index
        ]
    )


def test_the_numbers_of_turns_are_the_papers(sessions):
    """5.75 in the mean, 73 % with more than one, 40 at most."""
    counts = np.array([len(session.turns) for session in sessions])
    assert counts.mean() == pytest.approx(5.75, abs=0.01)
    assert np.mean(counts > 1) == pytest.approx(0.73, abs=0.02)
    assert np.percentile(counts, [50, 95]) == pytest.approx([3, 20], abs=1)
    assert counts.max() == 40


@pytest.mark.parametrize(
    ("name", "quantiles", "of_value"),
    [
        ("output_tokens", {5: 4, 25: 134, 50: 355, 75: 800, 95: 2048}, 0.05),
        ("new_tokens", {25: 8, 50: 23, 75: 61, 95: 245}, 0.1),
        ("think_s", {5: 17.0, 25: 51.3, 50: 110.3, 75: 237.0, 95: 703.2}, 0.05),
        ("history_tokens", {25: 364, 50: 1960, 75: 2890, 95: 3789}, 0.05),
    ],
)
def test_lengths_and_times_are_those_of_the_shared_trace(sessions, name, quantiles, of_value):
    """Quantiles of sharegpt_like_w4096, a draw of the same generator with another seed."""
    values = _values(sessions, name, first=name != "think_s")
    found = np.percentile(values, list(quantiles))
    assert found == pytest.approx(list(quantiles.values()), rel=of_value, abs=1.5)


def test_contexts_are_those_of_the_specification(sessions):
    """27 % of the sessions have more than 4,096 tokens (specification), and none keeps more."""
    said = [
        sum(turn.new_tokens + turn.output_tokens for turn in session.turns) for session in sessions
    ]
    assert np.mean(np.array(said) > WINDOW) == pytest.approx(0.27, abs=0.02)
    prompts = _values(sessions, "history_tokens") + _values(sessions, "new_tokens")
    assert prompts.max() <= WINDOW
    assert footprint_tokens(sessions) == pytest.approx(20e6, rel=0.1)


def test_history_follows_from_truncation(sessions):
    """Every turn's history follows from the turn before it."""
    for session in sessions[:500]:
        context = 0
        for turn in session.turns:
            assert turn.history_tokens == truncated(context, turn.new_tokens, WINDOW)
            context = truncated(turn.kept_tokens, 0, WINDOW)


@pytest.mark.parametrize(
    ("context", "new", "left"), [(4000, 96, 4000), (4000, 97, 1952), (1000, 3500, 0), (0, 9999, 0)]
)
def test_half_a_window_is_dropped_until_a_turn_fits(context, new, left):
    """Truncation ratio 0.5."""
    assert truncated(context, new, WINDOW) == left


def test_sessions_begin_at_the_rate(sessions):
    """Poisson arrivals, in order, and no think time before a first turn."""
    starts = np.array([session.start_s for session in sessions])
    gaps = np.diff(starts)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert gaps.std() == pytest.approx(1.0, rel=0.05)
    assert {session.turns[0].think_s for session in sessions} == {0.0}


def test_the_seed_determines_everything():
    """The same seed draws the same sessions, another one others."""
    assert sharegpt_like(50, 2.0, 2048, 1) == sharegpt_like(50, 2.0, 2048, 1)
    assert sharegpt_like(50, 2.0, 2048, 1) != sharegpt_like(50, 2.0, 2048, 2)


def test_one_session_can_be_drawn():
    """However few sessions there are, each has a turn."""
    (session,) = sharegpt_like(1, 1.0, 2048, 0)
    assert len(session.turns) >= 1
