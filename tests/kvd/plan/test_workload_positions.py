"""What a context overflow costs if positions are stored with the keys."""

from kvd.plan.trace import Session, Turn
from kvd.plan.workload import Workload, coupled

SESSION = Session(
    1.0, (Turn(10, 20, 0, 0), Turn(5, 15, 30, 1), Turn(7, 3, 25, 2), Turn(1, 1, 35, 3))
)


def test_a_truncation_costs_one_turn_its_history() -> None:
    """With positions stored, the turn after a truncation computes all of its prompt anew."""
    turns = coupled(SESSION, is_for_good=False).turns
    assert turns[2] == Turn(32, 3, 0, 2)
    assert turns[:2] + turns[3:] == SESSION.turns[:2] + SESSION.turns[3:]


def test_a_truncation_may_cost_all_turns_that_follow() -> None:
    """The prompts stay as long as they were."""
    turns = coupled(SESSION, is_for_good=True).turns
    assert [turn.history_tokens for turn in turns] == [0, 30, 0, 0]
    assert [turn.kept_tokens for turn in turns] == [turn.kept_tokens for turn in SESSION.turns]


def test_where_the_window_had_room_nothing_was_truncated() -> None:
    """A conversation was gone on with from an earlier place: what is stored up to there is good."""
    assert coupled(SESSION, window_tokens=57) == SESSION  # 50 kept and 7 new ones: they fit
    assert coupled(SESSION, window_tokens=56) == coupled(SESSION)


def test_states_are_useless_after_a_truncation_to_the_model_s_window() -> None:
    """A trace whose prompts outgrow the window is another model's, and nothing was truncated."""
    workload = Workload("a trace", [SESSION])
    assert workload.with_states(56).sessions == [coupled(SESSION)]
    assert workload.with_states(57).sessions == [SESSION]
    assert workload.with_states(35) is workload
    assert workload.with_states(56).origin == "a trace"


def test_a_workload_says_that_positions_are_stored() -> None:
    """Its turns are as many and its prompts as long; only what can be reused shrinks."""
    workload = Workload("a trace", [SESSION])
    of = workload.with_coupled_positions()
    assert of.origin == "a trace, coupled positions"
    assert (of.num_turns, of.longest_tokens) == (workload.num_turns, workload.longest_tokens)
    assert of.sessions == [coupled(SESSION)]
