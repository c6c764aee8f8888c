"""Whether loading pays on the machine of a plan, and how `auto` decides."""

from dataclasses import replace

import pytest

from kvd.plan.generate import sharegpt_like
from kvd.plan.hardware import EngineConstants, Hardware, ReplayOptions, engine_at_load
from kvd.plan.replay import replay
from kvd.plan.report import history_text
from tests.kvd.plan.plans import OPTIONS, plan, result

KV_BYTES = 780_000  # a token: 31 µs from DRAM, 187 µs from SSD
REPORT = plan(result("lru", 8, 100, 0.5, 4.0))


def _history_text(prefill_us, load_policy):
    engine = replace(REPORT.engine, prefill_s_per_token=prefill_us * 1e-6)
    report = replace(REPORT, engine=engine, options={**OPTIONS, "load_policy": load_policy})
    return history_text(report)


def test_load_times_are_shown_with_their_consequences():
    """None if loading is faster; else where it is slower, and what the load policy does."""
    assert _history_text(500, "always") == (
        "500 µs a token to compute, 31.2 µs to load from DRAM, 187 µs from SSD"
    )
    assert "loading from SSD loses time; --load-policy auto" in _history_text(100, "always")
    assert "loading from both loses time" in _history_text(13, "always")
    assert "what does not pay, from both, is computed" in _history_text(13, "auto")
    assert _history_text(13, "never").endswith("187 µs from SSD")


@pytest.mark.parametrize(
    "load", [pytest.param(load, marks=pytest.mark.long) for load in (0.02, 1.0, 2.0)]
)
def test_auto_is_no_slower_than_recomputing_or_loading_always(load):
    """Computing may be faster than DRAM, or only faster than SSD."""
    sessions = sharegpt_like(200, 1.0, 4096, seed=1)
    engine = engine_at_load(sessions, EngineConstants(), load)
    hardware = Hardware(20 * 10**9, 200 * 10**9, engine=engine)
    found = {
        policy: replay(
            sessions, hardware, ReplayOptions("predictive", KV_BYTES, load_policy=policy)
        ).ttft_mean_s
        for policy in ("never", "always", "auto")
    }
    assert found["auto"] <= 1.001 * min(found["never"], found["always"])
    assert found["always"] > found["never"] or load == 2.0
    if load >= 1.0:  # DRAM is faster than computing, SSD is not: a mix is better than either
        assert found["auto"] < 0.9 * min(found["never"], found["always"])
