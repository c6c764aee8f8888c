"""The durations of steps and loads, by the names that the scheduler uses."""

import pytest

from inference_svc.core.rates.rates import (
    DRAM,
    SSD,
    TRY_EVERY,
    DecodeTimes,
    LoadChooser,
    LoadPolicy,
    LoadTimes,
    Rates,
    StepTimes,
    pairs,
)
from shared.types.load_choice import IDLE, Traffic


def step_s(tokens, num_pairs):
    """Return the true duration of a step in these tests."""
    return 1e-3 + 1e-4 * tokens + 1e-8 * num_pairs


def measured_steps():
    """Return step times after some prefills and decodes."""
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
    """A prefill may be longer than any observed step."""
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


def test_tiers_are_measured_separately():
    """Loads from SSD say nothing about DRAM."""
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


def test_known_rates_are_shown():
    """Prefill as tokens per second of a prompt of 1,024."""
    rates = Rates()
    rates.steps = measured_steps()
    shown = rates.as_dict()
    assert set(shown) == {
        "step_constant_s", "step_token_s", "step_pair_s", "prefill_tokens_per_s"
    }  # fmt: skip
    assert shown["prefill_tokens_per_s"] == pytest.approx(1024 / step_s(1024, 524800), rel=0.01)


# ------------------------------------------------------------------------------- load or recompute


def measured_rates(load_latency_s=0.05, load_token_s=1e-5):
    """Return rates of a machine that computes a token in 0.1 ms, and loads it after a latency."""
    rates = Rates()
    for start in range(0, 4096, 512):
        num_pairs = pairs(start, start + 512)
        rates.steps.note(512, num_pairs, 1e-3 + 512 * 1e-4 + num_pairs * 1e-8)
        rates.steps.note(1, start + 513, 1e-3 + 1e-4 + (start + 513) * 1e-8)
    for tokens in (100, 1000, 3000, 9000):
        rates.loads.note("ssd", tokens, load_latency_s + tokens * load_token_s)
    return rates


@pytest.mark.parametrize(("start", "end", "is_loaded"), [(0, 4000, True), (0, 300, False)])
def test_a_short_history_is_recomputed_and_a_long_one_loaded(start, end, is_loaded):
    """The latency of a load has to pay off."""
    assert (
        LoadChooser(measured_rates()).should_load(LoadPolicy.AUTO, "ssd", start, end, IDLE)
        is is_loaded
    )


def test_late_tokens_of_a_session_cost_more_to_recompute():
    """They attend to more keys, so that the same number of tokens is worth a load."""
    chooser = LoadChooser(measured_rates())
    assert not chooser.should_load(LoadPolicy.AUTO, "ssd", 0, 500, IDLE)
    assert chooser.should_load(LoadPolicy.AUTO, "ssd", 8000, 8500, IDLE)


def test_a_turn_waits_for_ssd_if_computing_would_delay_others():
    """Copying delays them as well: a load counts for them like one from DRAM."""
    busy = Traffic(num_waiting=3, num_places=100)
    rates = measured_rates()
    assert LoadChooser(rates).should_load(LoadPolicy.AUTO, SSD, 0, 300, busy)
    for tokens in (100, 1000, 3000, 9000):
        rates.loads.note(DRAM, tokens, 0.04 + tokens * 1e-5)
    assert not LoadChooser(rates).should_load(LoadPolicy.AUTO, SSD, 0, 300, busy)
    assert not LoadChooser(rates).should_load(LoadPolicy.AUTO, DRAM, 0, 300, busy)


def test_an_unmeasured_tier_is_loaded_from():
    """Otherwise it would never be measured."""
    assert LoadChooser(Rates()).should_load(LoadPolicy.AUTO, "ssd", 0, 10, IDLE)
    assert LoadChooser(measured_rates()).should_load(LoadPolicy.AUTO, "dram", 0, 10, IDLE)


def test_a_refused_load_is_tried_now_and_then():
    """So that a wrong estimate is corrected; the tiers count separately."""
    rates = measured_rates()
    for tokens in (100, 1000, 3000, 9000):
        rates.loads.note("remote", tokens, 1.0)
    chooser = LoadChooser(rates)
    answers = []
    for _ in range(2 * TRY_EVERY):
        answers.append(chooser.should_load(LoadPolicy.AUTO, "ssd", 0, 300, IDLE))
        chooser.should_load(LoadPolicy.AUTO, "remote", 0, 300, IDLE)
    assert [index for index, answer in enumerate(answers) if answer] == [
        TRY_EVERY - 1, 2 * TRY_EVERY - 1
    ]  # fmt: skip


def test_always_and_never_use_no_estimate():
    """For ablations and tests."""
    chooser = LoadChooser(measured_rates())
    assert chooser.should_load(LoadPolicy.ALWAYS, "ssd", 0, 1, IDLE)
    assert not chooser.should_load(LoadPolicy.NEVER, "ssd", 0, 100_000, IDLE)


def test_the_shown_rate_is_of_a_prefill_of_a_thousand_tokens():
    """From the first one on, with a step's constant; and the time of one token."""
    steps = measured_steps()
    pace = steps.as_dict()["prefill_tokens_per_s"]
    assert pace == 1024 / steps.seconds(1024, pairs(0, 1024))
    assert pace == pytest.approx(1024 / step_s(1024, pairs(0, 1024)), rel=0.01)


def test_only_computed_tokens_count():
    """However many come before them, which are only attended to."""
    rates = Rates()
    rates.steps = measured_steps()
    for _ in range(8):
        rates.loads.note("dram", 1000, 5.0)
    assert not LoadChooser(rates).should_load(LoadPolicy.AUTO, "dram", 100_000, 101_000, IDLE)


def test_the_cost_of_a_drafted_token_is_known_once_steps_differ():
    """Batches of one size tell a step's duration, but not a token's."""
    times = DecodeTimes()
    for _ in range(10):
        times.note(4, 1.4, is_replayed=False)
    assert times.cost(4) is None
    for num_tokens in (1, 2, 9, 17):
        for _ in range(4):
            times.note(num_tokens, 1.0 + 0.1 * num_tokens, is_replayed=False)
    cost = times.cost(4)
    assert cost.plain == cost.drafted == pytest.approx(1.4)
    assert cost.token == pytest.approx(0.1)


def test_a_replayed_step_has_its_own_cost():
    """By its number of tokens; one that was not replayed yet costs what computing does."""
    times = DecodeTimes()
    for num_tokens in (1, 2, 4, 9, 17) * 4:
        times.note(num_tokens, 1.0 + 0.1 * num_tokens, is_replayed=False)
    for _ in range(100):
        times.note(2, 0.3, is_replayed=True)
    cost = times.cost(2)
    assert (cost.plain, cost.drafted) == (pytest.approx(0.3), pytest.approx(1.2))
    assert times.cost(3).plain == times.cost(3).drafted


def test_a_fetched_session_is_waited_for_while_it_may_pay():
    """As long as computing takes, without its copying; longer with others behind."""
    rates, policy = measured_rates(), LoadPolicy.AUTO
    computed_s = rates.steps.added_seconds(2000, pairs(0, 2000))
    chooser = LoadChooser(rates)
    assert chooser.fetch_wait_s(policy, 2000, IDLE, 9.0) == computed_s
    busy = Traffic(num_waiting=1, num_places=100)
    assert computed_s < chooser.fetch_wait_s(policy, 2000, busy, 9.0) < 2 * computed_s
    for tokens in (100, 1000, 3000, 9000):
        rates.loads.note(DRAM, tokens, tokens * 1e-5)
    copied_s = rates.loads.seconds(DRAM, 2000)
    waited_s = LoadChooser(rates).fetch_wait_s(policy, 2000, IDLE, 9.0)
    assert waited_s == pytest.approx(computed_s - copied_s)


def test_a_wait_without_an_estimate():
    """It has the bound of a load, if its turn is to be loaded, or nothing is known yet."""
    assert LoadChooser(Rates()).fetch_wait_s(LoadPolicy.AUTO, 2000, IDLE, 9.0) == 9.0
    for policy, wait_s in ((LoadPolicy.ALWAYS, 9.0), (LoadPolicy.NEVER, 0.0)):
        assert LoadChooser(measured_rates()).fetch_wait_s(policy, 2000, IDLE, 9.0) == wait_s
