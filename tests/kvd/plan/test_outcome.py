"""Measurements of turns in a replay."""

from dataclasses import asdict

from kvd.core.records.tier import Tier
from kvd.plan.outcome import Tally, Totals, TurnRecord
from shared.types.units import NS_PER_S


def test_shares_have_the_right_totals():
    """All, follow-up and token hit rates, and DRAM shares with and without a queue."""
    tally = Tally()
    for turn in (
        TurnRecord(0, 0, history_tokens=0, new_tokens=10),
        TurnRecord(0, 1, 100, 10, loaded_tokens=100, found_in=Tier.DRAM),
        TurnRecord(0, 4, 300, 10, loaded_tokens=300, found_in=Tier.SSD),
        TurnRecord(0, 9, 400, 10, loaded_tokens=400, found_in=Tier.DRAM),
        TurnRecord(0, 9, 200, 10, loaded_tokens=0, found_in=Tier.SSD),
    ):
        tally.add(turn)
    outcome = tally.outcome(7, 0.5, Totals(), Totals())
    assert (outcome.num_turns, outcome.num_turns_measured) == (7, 5)
    assert (outcome.hits_all, outcome.hits_fu, outcome.hits_tok) == (0.6, 0.75, 0.8)
    assert (outcome.dram_share, outcome.dram_share_4_ahead) == (2 / 3, 0.5)
    assert (outcome.num_guarded, outcome.queue_mean, outcome.queue_p99) == (1, 4.6, 9)
    assert outcome.recompute_load == 0.5


def test_returns_are_counted_by_their_sessions_tier():
    """At their arrival, whatever they found later; returns of tools have their own share."""
    tally = Tally()
    for turn in (
        TurnRecord(0, 0, 0, 10, was_resident=True, is_of_tools=True),
        TurnRecord(0, 0, 100, 10, loaded_tokens=60, found_in=Tier.SSD, was_resident=True),
        TurnRecord(0, 0, 100, 10, was_resident=True, is_of_tools=True),
        TurnRecord(0, 0, 100, 10, loaded_tokens=100, found_in=Tier.DRAM, is_of_tools=True),
    ):
        tally.add(turn)
    outcome = tally.outcome(4, 0.5, Totals(), Totals())
    assert outcome.resident_fu == 2 / 3
    assert (outcome.num_tool_returns, outcome.resident_tools) == (2, 0.5)
    assert outcome.recomputed_per_turn == (40 + 100) / 4


def test_without_turns_everything_is_zero():
    """A warm-up longer than the trace leaves no turn, and no division by zero."""
    values = asdict(Tally().outcome(3, 0.0, Totals(), Totals()))
    assert values.pop("num_turns") == 3
    assert not any(values.values())


def test_times_are_measured_from_arrival_and_from_start():
    """The 99th percentile is the value that 99 % of the turns do not exceed."""
    tally = Tally()
    for index in range(1, 101):
        answered_ns = (index + 1) * NS_PER_S
        tally.add(TurnRecord(0, 0, 0, 1, started_ns=NS_PER_S, answered_ns=answered_ns))
    outcome = tally.outcome(100, 0.0, Totals(), Totals())
    assert (outcome.ttft_mean_s, outcome.ttft_p99_s) == (51.5, 100.0)
    assert (outcome.start_ttft_mean_s, outcome.start_ttft_p99_s) == (50.5, 99.0)


def test_counters_of_the_warm_up_are_subtracted():
    """Engine time, span and bytes are those after the warm-up."""
    since = Totals(10 * NS_PER_S, 3 * NS_PER_S, NS_PER_S, 100, 1000)
    until = Totals(20 * NS_PER_S, 3603 * NS_PER_S, 1801 * NS_PER_S, 250, 1500)
    outcome = Tally(prompt_tokens=3600).outcome(1, 0.0, since, until)
    assert (outcome.gpu_hours, outcome.prefill_hours, outcome.span_s) == (1.0, 0.5, 10.0)
    assert (outcome.ssd_bytes_written, outcome.ssd_bytes_read) == (150, 500)
    assert outcome.prefill_tokens_per_s == 2.0
