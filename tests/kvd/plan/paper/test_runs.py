"""The replays for the paper's figures."""

import pytest

from kvd.plan.paper.runs import (
    LONG_MODEL,
    LONG_SESSIONS,
    RECOMPUTE,
    Run,
    Sample,
    Workload,
    cell_of,
    long_engine,
    sessions_of,
    window_bytes,
)
from kvd.plan.trace import Session, Turn

SESSION = Session(
    1.0, (Turn(10, 20, 0, 0), Turn(5, 15, 30, 1), Turn(7, 3, 25, 2), Turn(1, 1, 35, 3))
)


def test_a_sample_shrinks_sessions_tiers_and_warmup_alike() -> None:
    """The arrival rate stays, so that the queue stays in proportion to the tiers."""
    sample = Sample(seed=3, scale=0.01)
    run = Run()
    sessions, cell = sessions_of(run.workload, sample), cell_of(run, sample)
    assert len(sessions) == 90
    assert cell.options.warmup_turns == 100
    assert cell.hardware.dram_bytes == 1_280_000_000
    assert sessions[-1].start_s == pytest.approx(90, rel=0.5)


def test_recomputing_reuses_nothing() -> None:
    """RE is a policy that never loads."""
    assert cell_of(Run(policy=RECOMPUTE), Sample(1)).options.load_policy == "never"
    assert cell_of(Run(), Sample(1)).options.load_policy == "always"
    assert cell_of(Run(is_guarded=True), Sample(1)).options.load_policy == "auto"


def test_models_differ_by_their_window() -> None:
    """LLaMA-65B has a window of 2K; the others get the same sessions."""
    workloads = {model: Run(model=model).workload for model in ("llama-13b", "falcon-40b")}
    assert len(set(workloads.values())) == 1
    assert Run(model="llama-65b").workload == Workload(2048)
    assert window_bytes("llama-13b") == 4096 * 780_000


def test_the_preprints_documents() -> None:
    """Six questions about 28K tokens each, on the engine that its RE's numbers describe."""
    run = Run(model=LONG_MODEL)
    sessions = sessions_of(run.workload, Sample(1, 0.01))
    assert len(sessions) == LONG_SESSIONS
    assert [turn.history_tokens > 28_000 for turn in sessions[0].turns] == [False] + [True] * 5
    engine = cell_of(run, Sample(1, 0.01)).hardware.engine
    assert engine == long_engine()
    prefill_s = engine.prefill_s_per_token * (28 * 1024 + 256)
    assert prefill_s == pytest.approx(2.5)
    assert prefill_s / (prefill_s + 64 * engine.decode_step_s) == pytest.approx(0.41)
