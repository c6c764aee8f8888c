"""Loading when it pays."""

import pytest

from inference_svc.core.rates.rates import TRY_EVERY, LoadChooser, LoadPolicy, Rates, pairs


def measured(load_latency_s=0.05, load_token_s=1e-5):
    """Rates of a machine on which a token takes 0.1 ms, or less to load after a latency."""
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
    """The latency of a load has to pay."""
    assert LoadChooser(measured()).wants(LoadPolicy.AUTO, "ssd", start, end) is is_loaded


def test_tokens_late_in_a_session_are_dearer_to_recompute():
    """They attend to more keys, so that the same number of tokens is worth a load."""
    chooser = LoadChooser(measured())
    assert not chooser.wants(LoadPolicy.AUTO, "ssd", 0, 500)
    assert chooser.wants(LoadPolicy.AUTO, "ssd", 8000, 8500)


def test_what_was_never_measured_is_loaded():
    """Else it would never be."""
    assert LoadChooser(Rates()).wants(LoadPolicy.AUTO, "ssd", 0, 10)
    assert LoadChooser(measured()).wants(LoadPolicy.AUTO, "dram", 0, 10)


def test_a_refusal_is_put_to_the_test_now_and_then():
    """So that an estimate from a bad moment is corrected; the tiers count apart."""
    rates = measured()
    for tokens in (100, 1000, 3000, 9000):
        rates.loads.note("remote", tokens, 1.0)
    chooser = LoadChooser(rates)
    answers = []
    for _ in range(2 * TRY_EVERY):
        answers.append(chooser.wants(LoadPolicy.AUTO, "ssd", 0, 300))
        chooser.wants(LoadPolicy.AUTO, "remote", 0, 300)
    assert [index for index, answer in enumerate(answers) if answer] == [
        TRY_EVERY - 1, 2 * TRY_EVERY - 1
    ]  # fmt: skip


def test_always_and_never_ask_no_estimate():
    """For ablations and tests."""
    chooser = LoadChooser(measured())
    assert chooser.wants(LoadPolicy.ALWAYS, "ssd", 0, 1)
    assert not chooser.wants(LoadPolicy.NEVER, "ssd", 0, 100_000)
