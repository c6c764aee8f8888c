"""Recompute load: the share of an engine's time that a trace takes without a cache."""

import pytest

from kvd.plan.hardware import (
    Costs,
    EngineConstants,
    Hardware,
    ReplayOptions,
    engine_at_load,
    recompute_load,
)
from kvd.plan.trace import Session, Turn
from shared.types.units import NS_PER_S

ENGINE = EngineConstants(slots=2, prefill_s_per_token=0.01, decode_step_s=0.1, fixed_s=0.5)
TURNS = (Turn(100, 20, 0, 0.0), Turn(30, 20, 120, 5.0))  # 0.5 + 1.0 + 1.0 s and 0.5 + 1.5 + 1.0 s


def test_load_is_work_over_the_span_of_arrivals():
    """All prompt tokens are computed, and a decode takes its slot's share of the engine."""
    sessions = [Session(0.0, TURNS), Session(22.0, TURNS)]
    assert recompute_load(sessions, ENGINE) == pytest.approx(2 * 5.5 / 22)
    assert recompute_load(sessions[:1], ENGINE) == 0


def test_stray_sessions_do_not_make_a_trace_idle():
    """One of two hundred sessions that comes much later hardly changes the load."""
    sessions = [Session(float(second), TURNS) for second in range(200)]
    even = recompute_load(sessions, ENGINE)
    assert even == pytest.approx(200 * 5.5 / 199)
    assert recompute_load([*sessions[:-1], Session(1e6, TURNS)], ENGINE) == pytest.approx(even)


def test_an_engine_is_scaled_to_a_load():
    """All its times are multiplied by one factor; arrivals do not change."""
    sessions = [Session(0.0, TURNS), Session(22.0, TURNS)]
    engine = engine_at_load(sessions, ENGINE, 2.0)
    assert recompute_load(sessions, engine) == pytest.approx(2.0)
    assert engine.slots == ENGINE.slots
    assert engine.decode_step_s / ENGINE.decode_step_s == pytest.approx(
        engine.fixed_s / ENGINE.fixed_s
    )
    assert engine_at_load(sessions[:1], ENGINE, 2.0) == ENGINE


@pytest.mark.parametrize(("pcie_bytes_per_s", "stall_s"), [(200, 0.0), (100, 0.4), (50, 1.6)])
def test_a_prefill_stalls_for_loading_that_computing_does_not_hide(pcie_bytes_per_s, stall_s):
    """120 tokens of a byte, beside the 0.5 s and 0.3 s that the new ones take."""
    machine = Hardware(0, 0, pcie_bytes_per_s=pcie_bytes_per_s, engine=ENGINE)
    costs = Costs([], machine, ReplayOptions("lru", 1.0))
    assert costs.stall_ns(TURNS[1], 120) == pytest.approx(stall_s * NS_PER_S)
    assert costs.prefill_ns(TURNS[1], 120) == pytest.approx((0.8 + stall_s) * NS_PER_S)
