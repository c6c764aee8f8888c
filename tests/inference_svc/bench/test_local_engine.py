"""Figures of one turn, and of the turns of a replay or a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.bench.bench_session import ttft_values
from inference_svc.bench.decode import decode_tokens_per_s
from inference_svc.bench.local_engine import TurnTimes, is_from, whole_blocks


def times(token_s=(1.5,), tiers=None, reused=None):
    tiers = tiers or {}
    return TurnTimes(
        submitted_s=1.0,
        token_s=tuple(token_s),
        reused_tokens=sum(tiers.values()) if reused is None else reused,
        tier_tokens=tiers,
        load_s=0.0,
        stall_s=0.0,
        buffer_layers=None,
        output_ids=tuple(range(len(token_s))),
    )


def test_ttft_is_from_submission_and_tpot_between_tokens():
    turn = times([1.5, 2.0, 3.5])
    assert (turn.ttft_s, turn.tpot_s, turn.end_s) == (0.5, 1.0, 3.5)


def test_throughput_counts_the_history_as_the_paper_does():
    assert ttft_values(times([1.5]), 1000) == {"ttft_s": 0.5, "prefill_tokens_per_s": 2000}
    assert "tpot_s" in ttft_values(times([1.5, 2.0]), 1000)


@pytest.mark.parametrize(
    ("tiers", "tier", "is_so"),
    [
        ({}, "", True),
        ({"dram": 100}, "", False),
        ({"dram": 100}, "dram", True),
        ({"hbm": 100}, "hbm", True),
        ({"hbm": 100}, "dram", False),
        ({"dram": 84}, "dram", False),  # a block is missing
        ({"dram": 116}, "dram", False),  # new tokens were known already
        ({"dram": 90, "ssd": 10}, "dram", False),
        ({"dram": 4, "ssd": 96}, "ssd", True),
        ({"dram": 10, "ssd": 90}, "ssd", False),
        ({"ssd": 96}, "ssd", False),
    ],
)
def test_a_turn_counts_only_if_its_whole_history_was_where_it_should_be(tiers, tier, is_so):
    assert is_from(times(tiers=tiers), tier, 100) is is_so


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([16, 32, 128]))
def test_histories_are_whole_blocks_and_turns_keep_their_length(history, new, block_tokens):
    whole, rest = whole_blocks(history, new, block_tokens)
    assert whole % block_tokens == 0
    assert whole >= block_tokens
    assert rest >= 1
    if history >= block_tokens:
        assert whole + rest == history + new


def test_decode_speed_is_of_the_time_in_which_the_whole_batch_decodes():
    slow_start = times([3.0, 4.0, 5.0, 6.0])
    early = times([1.0, 2.0, 3.0, 4.0, 5.0])
    # From 3 to 5: two tokens of each.
    assert decode_tokens_per_s([slow_start, early]) == pytest.approx(2.0)


@pytest.mark.parametrize("num_steps", [2, 9])
def test_decode_speed_does_not_depend_on_the_order_of_a_steps_tokens(num_steps):
    """They are sampled one after the other; three in each second here."""
    batch = [times([step + 0.01 * n for step in range(num_steps)]) for n in range(3)]
    assert decode_tokens_per_s(batch) == pytest.approx(3.0)
    assert decode_tokens_per_s(batch[::-1]) == pytest.approx(3.0)


def test_a_batch_that_never_decodes_together_has_no_speed():
    assert decode_tokens_per_s([times([1.0, 2.0]), times([3.0, 4.0])]) == 0.0
