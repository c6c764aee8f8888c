"""Measurements of turns, by their usage."""

from dataclasses import replace

from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.core.turn_record import Usage

FIRST = Usage(new_tokens=10, output_tokens=5, ttft_s=0.2, tpot_s=0.1, total_s=0.6)
NEXT = replace(FIRST, history_tokens=15, reused_tokens=15, tier_tokens={"dram": 10, "hbm": 5})
HALF = replace(NEXT, reused_tokens=5, recomputed_tokens=10, tier_tokens={"dram": 5})
HALF = replace(HALF, recompute_reason="evicted")
LOST = replace(HALF, reused_tokens=0, recomputed_tokens=15, tier_tokens={})


def test_times_are_measured_by_the_fate_of_the_history():
    """First tokens have separate series: without history, reused, in part, recomputed."""
    histograms = TurnHistograms()
    for usage in (FIRST, NEXT, NEXT, HALF, HALF, HALF, LOST):
        histograms.on_finish("default", "stop", usage, cancelled=False)
    counts = {labels[0]: series.count for labels, series in histograms.ttft_s.series.items()}
    assert counts == {"none": 1, "reused": 2, "partial": 3, "recomputed": 1}
    assert histograms.load_s.series[()].count == 6  # those with a history
    assert histograms.reused_tokens.counts == {("dram",): 35, ("hbm",): 10}
    assert histograms.recomputed_tokens.counts == {("evicted",): 45}


def test_only_configured_tenants_are_labels():
    """All others share one label, however many there are."""
    histograms = TurnHistograms({"acme"})
    for tenant in ("acme", "default", "x", "y"):
        histograms.on_finish(tenant, "stop", FIRST, cancelled=False)
    histograms.name_tenants({"x"})
    histograms.on_refusal("x", "rate_limited")
    histograms.on_failure("acme", "engine_failed", cancelled=False)
    assert histograms.tenant_turns.counts == {
        ("acme", "finished"): 1,
        ("default", "finished"): 1,
        ("other", "finished"): 2,
        ("x", "refused"): 1,
        ("other", "failed"): 1,
    }
    assert histograms.refused.counts == {("rate_limited",): 1}


def test_cancelled_turns_are_not_timed():
    """They are counted, with their tokens."""
    histograms = TurnHistograms()
    histograms.on_finish("default", "cancelled", NEXT, cancelled=True)
    assert histograms.ended.counts == {("cancelled",): 1}
    assert histograms.tenant_turns.counts == {("default", "cancelled"): 1}
    assert histograms.tenant_tokens.counts["default", "output"] == 5
    assert not histograms.ttft_s.series


def test_computed_tokens_of_a_turn():
    """Recomputed ones, new ones, and the answer."""
    assert LOST.computed_tokens == 15 + 10 + 5
    assert NEXT.computed_tokens == 10 + 5


def test_read_buffers_are_counted_by_the_slowest_tier():
    """A load waits for its slowest part."""
    histograms = TurnHistograms()
    histograms.on_join(4.5, {"dram": 10})
    histograms.on_join(6, {"dram": 10, "ssd": 20})
    found = {labels: each.total for labels, each in histograms.buffer_layers.series.items()}
    assert found == {("dram",): 4.5, ("ssd",): 6}


def test_steps_are_measured_by_their_contents():
    """Turns, tokens and time, each separately."""
    histograms = TurnHistograms()
    for num_turns, num_tokens, seconds in ((1, 40, 0.5), (3, 3, 0.25)):
        histograms.on_step(num_turns, num_tokens, seconds)
    sums = [
        h.series[()].total
        for h in (histograms.step_turns, histograms.step_tokens, histograms.step_s)
    ]
    assert sums == [4, 43, 0.75]


def test_each_time_has_its_own_histogram():
    """Of answered turns; a time per token only with at least two of them."""
    histograms = TurnHistograms()
    usage = replace(
        NEXT, queue_s=1.0, load_s=2.0, stall_s=3.0, prefill_s=4.0, ttft_s=5.0, total_s=6.0
    )
    histograms.on_finish("default", "stop", usage, cancelled=False)
    histograms.on_finish("default", "stop", replace(usage, output_tokens=1), cancelled=False)
    histograms.on_finish("default", "stop", replace(usage, output_tokens=2), cancelled=False)
    found = {
        name: (getattr(histograms, name).total.count, getattr(histograms, name).total.total)
        for name in ("queue_s", "load_s", "stall_s", "prefill_s", "ttft_s", "total_s")
    }
    assert found == {
        "queue_s": (3, 3.0),
        "load_s": (3, 6.0),
        "stall_s": (3, 9.0),
        "prefill_s": (3, 12.0),
        "ttft_s": (3, 15.0),
        "total_s": (3, 18.0),
    }
    assert (histograms.tpot_s.total.count, histograms.tpot_s.total.total) == (2, 0.2)


def test_people_see_the_measured_values():
    """Unmeasured ones are left out."""
    histograms = TurnHistograms()
    assert histograms.as_gauges() == {"timed_turns": 0, "ttft_total_s": 0.0}
    histograms.on_finish("default", "stop", replace(FIRST, output_tokens=1), cancelled=False)
    gauges = histograms.as_gauges()
    assert set(gauges) == {"timed_turns", "ttft_total_s", "ttft_p50_s", "ttft_p95_s"}
    assert (gauges["timed_turns"], gauges["ttft_total_s"]) == (1, 0.2)
    histograms.on_finish("default", "stop", FIRST, cancelled=False)
    assert "tpot_p50_s" in histograms.as_gauges()


def test_tokens_of_tenants_are_counted_by_kind():
    """Computed (again, or new), reused, and the answer's."""
    histograms = TurnHistograms()
    histograms.on_finish("default", "stop", HALF, cancelled=False)
    assert histograms.tenant_tokens.counts == {
        ("default", "computed"): 20,
        ("default", "reused"): 5,
        ("default", "output"): 5,
    }
