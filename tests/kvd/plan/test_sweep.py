"""Many replays, here or in other processes."""

from dataclasses import replace

import pytest

from kvd.plan.fleet import FleetOptions
from kvd.plan.generate import sharegpt_like
from kvd.plan.hardware import Hardware, ReplayOptions
from kvd.plan.sizes import GB
from kvd.plan.sweep import Cell, WorkerEndedError, run_cells

SESSIONS = sharegpt_like(60, 1.0, 4096, 3)
NUM_TURNS = sum(len(session.turns) for session in SESSIONS)
LRU = ReplayOptions("lru", 819200)
CELLS = [Cell(Hardware(GB, size * GB), LRU) for size in (40, 5, 20)]


def test_outcomes_do_not_depend_on_the_process():
    """They have the cells' order, whichever was ready first; all turns are reported."""
    progress = []
    here = run_cells(SESSIONS, CELLS, 1, progress.append)
    assert (progress == sorted(progress), progress[-1]) == (True, 3 * NUM_TURNS)
    progress.clear()
    there = run_cells(SESSIONS, CELLS, 2, progress.append)
    assert (there, progress[-1]) == (here, 3 * NUM_TURNS)
    hits = [found.hits_tok for found in here]
    assert hits[1] < hits[2] < hits[0]


def test_a_worker_that_dies_ends_the_plan():
    """A bug in a replay, or the system, ends it: the error says so, and no process stays."""
    broken = Cell(Hardware(GB, GB), replace(LRU, policy="none"))
    with pytest.raises(WorkerEndedError, match="ended with code 1") as raised:
        run_cells(SESSIONS, [broken, broken], 2, lambda _: None)
    assert "--jobs 1" in raised.value.remedy


def test_a_cell_replays_its_share_of_the_sessions():
    """With its share of the warm-up; progress counts the turns of all of them."""
    sessions = sharegpt_like(200, 1.0, 4096, seed=0)
    num_turns = sum(len(session.turns) for session in sessions)
    told: list[int] = []
    cell = Cell(
        Hardware(GB, GB), replace(LRU, warmup_turns=num_turns // 2), FleetOptions(8, 2), 0.25
    )
    (outcome,) = run_cells(sessions, [cell], 1, told.append)
    assert 0.15 < outcome.num_turns / num_turns < 0.35
    assert outcome.num_turns_measured == pytest.approx(outcome.num_turns / 2, abs=1)
    assert told[-1] == pytest.approx(num_turns, abs=4)
