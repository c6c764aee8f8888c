"""What is measured of turns, by their usage."""

from dataclasses import replace

from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.core.turn_record import Usage

FIRST = Usage(new_tokens=10, output_tokens=5, ttft_s=0.2, tpot_s=0.1, total_s=0.6)
NEXT = replace(FIRST, history_tokens=15, reused_tokens=15, tier_tokens={"dram": 10, "hbm": 5})
HALF = replace(NEXT, reused_tokens=5, recomputed_tokens=10, tier_tokens={"dram": 5})
HALF = replace(HALF, recompute_reason="evicted")
LOST = replace(HALF, reused_tokens=0, recomputed_tokens=15, tier_tokens={})


def test_times_tell_what_became_of_the_history():
    """First tokens are measured apart: without history, reused, in part, recomputed."""
    histograms = TurnHistograms()
    for usage in (FIRST, NEXT, NEXT, HALF, HALF, HALF, LOST):
        histograms.answered("default", "stop", usage, cancelled=False)
    counts = {labels[0]: series.count for labels, series in histograms.ttft_s.series.items()}
    assert counts == {"none": 1, "reused": 2, "partial": 3, "recomputed": 1}
    assert histograms.load_s.series[()].count == 6  # those that have a history
    assert histograms.reused_tokens.counts == {("dram",): 35, ("hbm",): 10}
    assert histograms.recomputed_tokens.counts == {("evicted",): 45}


def test_tenants_are_labels_only_by_name():
    """A tenant that nobody has named is one of the others, however many there are."""
    histograms = TurnHistograms({"acme"})
    for tenant in ("acme", "default", "x", "y"):
        histograms.answered(tenant, "stop", FIRST, cancelled=False)
    histograms.name_tenants({"x"})
    histograms.turned_away("x", "rate_limited")
    histograms.failed("acme", "engine_failed", cancelled=False)
    assert histograms.tenant_turns.counts == {
        ("acme", "finished"): 1,
        ("default", "finished"): 1,
        ("other", "finished"): 2,
        ("x", "refused"): 1,
        ("other", "failed"): 1,
    }
    assert histograms.refused.counts == {("rate_limited",): 1}


def test_who_left_is_not_timed():
    """A cancelled turn counts, with its tokens, and its times do not."""
    histograms = TurnHistograms()
    histograms.answered("default", "cancelled", NEXT, cancelled=True)
    assert histograms.ended.counts == {("cancelled",): 1}
    assert histograms.tenant_turns.counts == {("default", "cancelled"): 1}
    assert histograms.tenant_tokens.counts["default", "output"] == 5
    assert not histograms.ttft_s.series


def test_what_the_model_computed_of_a_turn():
    """What was computed again, what is new, and the answer."""
    assert LOST.computed_tokens == 15 + 10 + 5
    assert NEXT.computed_tokens == 10 + 5


def test_steps_are_measured_by_what_is_in_them():
    """Turns, tokens and time, each apart."""
    histograms = TurnHistograms()
    for num_turns, num_tokens, seconds in ((1, 40, 0.5), (3, 3, 0.25)):
        histograms.stepped(num_turns, num_tokens, seconds)
    sums = [
        h.series[()].total
        for h in (histograms.step_turns, histograms.step_tokens, histograms.step_s)
    ]
    assert sums == [4, 43, 0.75]
