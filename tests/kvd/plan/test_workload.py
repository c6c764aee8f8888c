"""The sessions of a replay, and their arrival rate."""

import json
from pathlib import Path

import pytest

from kvd.plan.trace import Session, Turn
from kvd.plan.workload import NoRateError, Workload, read_workload

TURN = Turn(100, 10, 0, 0.0)


def test_both_kinds_of_trace_are_read(tmp_path: Path):
    """The file's contents determine which it is."""
    raw = tmp_path / "raw.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    raw.write_text(json.dumps(line) + "\n", encoding="utf-8")
    own = read_workload(Path("tests/data/trace_sample.jsonl.gz"))
    assert (len(own.sessions), own.num_turns, own.origin) == (12, 88, "trace_sample.jsonl.gz")
    assert (read_workload(raw).num_turns, "inferred" in read_workload(raw).origin) == (1, True)


def test_facts_of_a_workload():
    """Footprint is the sum of the sessions' largest contexts."""
    sessions = [
        Session(1.0, (TURN, Turn(10, 10, 110, 5.0))),
        Session(4.0, (Turn(300, 10, 0, 0.0), Turn(5, 5, 100, 1.0))),
    ]
    workload = Workload("two", sessions)
    assert (workload.num_turns, workload.footprint_tokens) == (4, 130 + 310)
    assert (workload.longest_tokens, workload.span_s) == (310, 3.0)


def test_an_arrival_rate_moves_the_starts():
    """So many per second in the mean; the sessions are the same."""
    workload = Workload("five", [Session(10.0 + 2 * index, (TURN,)) for index in range(5)])
    faster = workload.with_arrival_rate(2.0)
    assert faster.span_s == pytest.approx(2.0)
    assert [session.turns for session in faster.sessions] == [(TURN,)] * 5


def test_simultaneous_starts_cannot_be_stretched_to_a_rate():
    """Its begins cannot be stretched."""
    workload = Workload("one", [Session(1.0, (TURN,)), Session(1.0, (TURN,))])
    with pytest.raises(NoRateError, match="--arrival-rate"):
        workload.with_arrival_rate(1.0)
    with pytest.raises(NoRateError, match="--load"):
        workload.check_rate("--load")
