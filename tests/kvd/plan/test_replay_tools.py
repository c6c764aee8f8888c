"""Replays of sessions that call tools, and of those that supersede others."""

from dataclasses import replace

from kvd.plan.replay import replay
from kvd.plan.trace import Session
from tests.kvd.plan.small_machine import FIRST, LRU, MACHINE, SECOND, SSD_ONLY, at


def test_a_session_that_supersedes_another_comes_after_its_last_answer():
    """8 s after 12 s, whatever its own start; it has no history, and the other goes first."""
    follower = Session(1.0, (replace(FIRST, think_s=8.0),), supersedes=0)
    outcome = replay([at(0.0, FIRST), follower], MACHINE, LRU)
    assert outcome.span_s == 12 + 8 + 12
    assert (outcome.num_turns_measured, outcome.num_hits, outcome.queue_mean) == (2, 0, 0.0)
    # There is room for two. A third is stored: the superseded one goes, though used later.
    back = at(0.0, FIRST, replace(SECOND, think_s=200.0))
    sessions = [back, at(20.0, FIRST), Session(21.0, (FIRST,), supersedes=1), at(80.0, FIRST)]
    machine = replace(MACHINE, dram_bytes=55_000)
    assert replay(sessions, machine, LRU).num_hits == 1
    assert replay(sessions, machine, replace(LRU, tool_hints=False)).num_hits == 0


def test_returns_are_counted_by_their_sessions_tier():
    """In DRAM, not on SSD; those of tools separately.

    Sessions that were not stored are recomputed.
    """
    calls = replace(FIRST, tools=("shell",))
    sessions = [at(0.0, calls, SECOND), at(100.0, FIRST, SECOND)]
    outcome = replay(sessions, MACHINE, LRU)
    assert (outcome.resident_fu, outcome.resident_tools, outcome.num_tool_returns) == (1, 1, 1)
    assert outcome.recomputed_per_turn == 0
    outcome = replay(sessions, SSD_ONLY, LRU)
    assert (outcome.resident_fu, outcome.resident_tools, outcome.num_tool_returns) == (0, 0, 1)
    outcome = replay(sessions, replace(MACHINE, dram_bytes=0), LRU)
    assert outcome.recomputed_per_turn == (16 + 16) / 4


def test_sessions_that_wait_for_tools_stay_longer_than_those_of_people():
    """They were used earlier, and nothing was learned; only the hint tells."""
    calls, answer = replace(FIRST, tools=("read",)), replace(SECOND, think_s=20.0)
    sessions = [at(0.0, calls, answer), at(12.0, FIRST, replace(answer, think_s=900.0))]
    machine = replace(MACHINE, dram_bytes=20_000, ssd_bytes=100_000)
    predictive = replace(LRU, policy="predictive")
    assert replay(sessions, machine, predictive).resident_tools == 1
    assert replay(sessions, machine, replace(predictive, tool_hints=False)).resident_tools == 0
