"""Policies in a replay of a generated chat trace rank as in an independent simulator.

A tenth of the paper's experiment: sessions, capacities, slots and bandwidths are divided alike;
`make test` has half of the sessions.
"""

import pytest

from kvd.plan.generate import sharegpt_like
from kvd.plan.hardware import EngineConstants, Hardware, ReplayOptions
from kvd.plan.outcome import Outcome
from kvd.plan.replay import replay

WINDOW_TOKENS = 4096
SLOT_BYTES = 3_200_000_000
ENGINE = EngineConstants(slots=24, prefill_s_per_token=5e-3, decode_step_s=0.2, fixed_s=0.2)


def outcome_of(policy: str, num_sessions: int, ssd_slots: int, dram_slots: int = 4) -> Outcome:
    sessions = sharegpt_like(num_sessions, 0.1, WINDOW_TOKENS, seed=3)
    hardware = Hardware(dram_slots * SLOT_BYTES, ssd_slots * SLOT_BYTES, 0, 5e8, 25e8, ENGINE)
    return replay(
        sessions,
        hardware,
        ReplayOptions(
            policy,
            780_000,
            charge="window",
            window_tokens=WINDOW_TOKENS,
            tiers="exclusive",
            warmup_turns=num_sessions + num_sessions // 9,
            load_policy="always",
            think_scale=0.0,
        ),
    )


@pytest.mark.parametrize(
    ("num_sessions", "ssd_slots"),
    [
        pytest.param(450, 62, marks=pytest.mark.long),
        pytest.param(900, 62, marks=pytest.mark.long),
        pytest.param(900, 313, marks=pytest.mark.long),
    ],
)
def test_policies_that_see_more_of_the_queue_hit_more(num_sessions, ssd_slots):
    """The paper's window beats LRU, the whole queue beats the window, and no policy beats it."""
    tok = {
        policy: outcome_of(policy, num_sessions, ssd_slots).hits_tok
        for policy in ("lru", "lookahead", "lookahead_queue", "belady")
    }
    assert tok["lru"] + 0.05 < tok["lookahead"]
    assert tok["lookahead"] < tok["lookahead_queue"]
    assert tok["lookahead_queue"] == pytest.approx(tok["belady"], abs=0.02)


@pytest.mark.parametrize("num_sessions", [450, pytest.param(900, marks=pytest.mark.long)])
def test_with_a_long_queue_histories_are_in_dram_in_time(num_sessions):
    """LRU reads on demand; with a window of 16 jobs, hits are in DRAM when their turns start."""
    assert outcome_of("lru", num_sessions, 313, 16).dram_share < 0.25
    assert outcome_of("lookahead_queue", num_sessions, 313, 16).dram_share_4_ahead >= 0.99
