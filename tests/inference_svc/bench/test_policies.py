"""Part `policies`: the figures of turns, and the planner's equal input."""

import asyncio
import shlex

import pytest

from inference_svc.bench.local_engine import TurnTimes
from inference_svc.bench.options import ModelChoice, PoliciesOptions, RunOptions
from inference_svc.bench.replay import ReplayedTurn, ReplayLog
from inference_svc.bench.runner import run
from inference_svc.bench.trace import PlannedTurn, write_plan_trace
from kvd.plan.trace import Session, Turn, read_trace
from tests.inference_svc.bench.test_trace import SAMPLE
from tests.processes import run_cli

CHOICE = ModelChoice(random="4x256", layers=2, threads=1)


def make_replayed_turn(history, num_ahead=0, ttft_s=1.0, **tier_tokens):
    times = TurnTimes(0.0, (ttft_s,), sum(tier_tokens.values()), tier_tokens, 0.0, 0.0, None, ())
    return ReplayedTurn(times, history, history + 10, num_ahead)


def values_of(*turns):
    return ReplayLog(list(turns), elapsed_s=10.0, busy_s=5.0).placement()


def test_a_first_turn_cannot_hit():
    """It counts among all turns, not among those with history."""
    values = values_of(make_replayed_turn(0), make_replayed_turn(100, dram=100))
    assert (values["all_share"], values["fu_share"], values["tok_share"]) == (0.5, 1.0, 1.0)


def test_a_partly_found_history_is_no_hit():
    """The rest of a session is a prefix, and is used."""
    values = values_of(make_replayed_turn(100, dram=60), make_replayed_turn(300, ssd=300))
    assert (values["all_share"], values["fu_share"]) == (0.5, 0.5)
    assert values["tok_share"] == pytest.approx(0.9)
    assert values["dram_share"] == pytest.approx(60 / 360)
    assert values["computed_prompt_tokens"] == 10 + 40 + 10


def test_turns_behind_many_have_their_own_share():
    """There was time to read their histories ahead; without such turns there is no share."""
    few, many = (
        make_replayed_turn(100, num_ahead=3, ssd=100),
        make_replayed_turn(100, num_ahead=4, dram=100),
    )
    assert values_of(few, many)["dram_4_ahead_share"] == 1.0
    assert values_of(few, many)["dram_share"] == 0.5
    assert "dram_4_ahead_share" not in values_of(few)


def test_times_and_queues_are_summed_up():
    values = values_of(make_replayed_turn(0, 2, ttft_s=1.0), make_replayed_turn(0, 4, ttft_s=3.0))
    assert (values["ttft_mean_s"], values["queue_mean"]) == (2.0, 3.0)
    assert 2.9 < values["ttft_p99_s"] <= 3.0
    assert (values["turns_per_s"], values["busy_s"]) == (0.2, 5.0)
    assert values["tok_share"] == 0.0, "nothing to find"


def test_the_planner_reads_the_written_trace(tmp_path):
    """Sessions begin as they do here; histories are the tokens so far."""
    path = tmp_path / "trace.jsonl"
    first = (PlannedTurn(10, 5, 0.0), PlannedTurn(3, 7, 2.5))
    write_plan_trace(path, [first, (PlannedTurn(1, 1, 0.0),)], [4.0, 1.0])
    assert sorted(read_trace(path), key=lambda session: session.start_s) == [
        Session(1.0, (Turn(1, 1, 0, 0.0),)),
        Session(4.0, (Turn(10, 5, 0, 0.0), Turn(3, 7, 15, 2.5))),
    ]


def test_policies_are_replayed_one_after_another(tmp_path, forked_children):
    """Each with its own kvd; the document has the `kvd plan` command, which accepts the trace."""
    trace = tmp_path / "plan.jsonl"
    work = tmp_path / "work"
    work.mkdir()
    options = PoliciesOptions(
        ("lru", "fifo"), SAMPLE, 5, scale=0.05, end_hints=True, plan_trace=trace
    )
    report = run(options, CHOICE, RunOptions(work))
    assert not list(work.iterdir()), "everything it made is removed"
    (case,) = report.cases
    assert [found.variant for found in case.variants] == ["lru", "fifo"]
    shares = ("all_share", "fu_share", "tok_share", "dram_share")
    for found in case.variants:
        assert all(0 <= found.values[share].median <= 1 for share in shares)
        assert found.values["queue_mean"].median > 0, "all began at once"
        assert "evictions_dram" in found.values
    assert sum(len(session.turns) for session in read_trace(trace)) == case.facts["turns"]
    (note,) = case.notes
    command = shlex.split(note.partition(": ")[2])
    assert command[:4] == ["kvd", "plan", "--trace", str(trace)]
    assert command[command.index("--dram") + 1] == str(case.facts["dram_bytes"])
    code, planned, problems = asyncio.run(run_cli(*command[1:]))
    assert code == 0, problems
    assert all(name in planned for name in ("lru", "fifo"))
