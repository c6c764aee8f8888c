"""What steps and loads take, by the names that the scheduler uses."""

import pytest

from inference_svc.core.rates.rates import LoadTimes, Rates, StepTimes, pairs


def step_s(tokens, num_pairs):
    """What steps take in these tests."""
    return 1e-3 + 1e-4 * tokens + 1e-8 * num_pairs


def measured_steps():
    """Step times after some prefills and decodes."""
    steps = StepTimes()
    for start in range(0, 4096, 512):
        steps.note(512, pairs(start, start + 512), step_s(512, pairs(start, start + 512)))
        steps.note(1, start + 513, step_s(1, start + 513))
    return steps


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 1), (3, 4), (0, 10), (7, 20)])
def test_pairs_are_the_sum_of_context_lengths(start, end):
    """A token at position p attends to p + 1 keys."""
    assert pairs(start, end) == sum(position + 1 for position in range(start, end))


def test_steps_are_estimated_with_and_without_their_constant():
    """A prefill may be longer than any step that was seen."""
    steps = measured_steps()
    whole = steps.seconds(8192, pairs(0, 8192))
    assert whole == pytest.approx(step_s(8192, pairs(0, 8192)), rel=0.01)
    assert whole - steps.added_seconds(8192, pairs(0, 8192)) == pytest.approx(1e-3, rel=0.05)


def test_nothing_is_known_at_first():
    """Callers treat None as: try it."""
    rates = Rates()
    assert rates.steps.seconds(1, 1) is None
    assert rates.steps.added_seconds(1, 1) is None
    assert rates.loads.seconds("dram", 1) is None
    assert rates.as_dict() == {}


def test_tiers_are_measured_apart():
    """What SSD takes says nothing of DRAM."""
    loads = LoadTimes()
    for tokens in (100, 1000, 4000, 9000):
        loads.note("ssd", tokens, 0.01 + tokens * 1e-4)
        loads.note("dram", 1000, 0.01)
    assert loads.seconds("ssd", 2000) == pytest.approx(0.21, rel=0.01)
    assert loads.seconds("dram", 1010) == pytest.approx(0.01, rel=0.05)
    assert loads.seconds("dram", 100_000) is None
    assert loads.as_dict() == pytest.approx(
        {"load_latency_s_ssd": 0.01, "load_tokens_per_s_ssd": 1e4}, rel=0.01
    )


def test_people_see_what_is_known():
    """Prefill as tokens per second of a prompt of 1,024."""
    rates = Rates()
    rates.steps = measured_steps()
    shown = rates.as_dict()
    assert set(shown) == {
        "step_constant_s", "step_token_s", "step_pair_s", "prefill_tokens_per_s"
    }  # fmt: skip
    assert shown["prefill_tokens_per_s"] == pytest.approx(1024 / step_s(1024, 524800), rel=0.01)
