"""The figures of a replay's turns."""

import pytest

from inference_svc.bench.replay import ReplayedTurn, ReplayLog
from tests.inference_svc.bench.test_local_engine import times


def test_a_replay_is_summed_up_over_its_turns():
    first = ReplayedTurn(times([1.5]), history_tokens=0, prompt_tokens=100)
    second = ReplayedTurn(times([2.0, 2.5], {"dram": 60, "hbm": 20}), 100, 150)
    values = ReplayLog([first, second], elapsed_s=10.0, busy_s=4.0).serving()
    assert values["ttft_p50_s"] == pytest.approx(0.75)
    assert values["tpot_p99_s"] == pytest.approx(0.5)
    assert values["output_tokens_per_s"] == pytest.approx(0.3)
    assert values["prompt_tokens_per_s"] == pytest.approx(25.0)
    assert values["busy_share"] == pytest.approx(0.4)
    shares = [values[f"{name}_share"] for name in ("hbm", "dram", "ssd", "recomputed")]
    assert shares == pytest.approx([0.2, 0.6, 0.0, 0.2])


def test_a_replay_of_first_turns_and_single_tokens_has_no_division_by_zero():
    values = ReplayLog([ReplayedTurn(times([1.5]), 0, 1)], 1.0, 0.5).serving()
    assert values["recomputed_share"] == 0.0
    assert "tpot_p50_s" not in values
