"""The cost of a context overflow if positions are stored with the keys."""

from kvd.plan.trace import Session, Turn
from kvd.plan.workload import Workload, coupled

SESSION = Session(
    1.0, (Turn(10, 20, 0, 0), Turn(5, 15, 30, 1), Turn(7, 3, 25, 2), Turn(1, 1, 35, 3))
)


def test_a_truncation_costs_one_turn_its_history() -> None:
    """With stored positions the turn after a truncation computes all of its prompt anew."""
    turns = coupled(SESSION, is_for_good=False).turns
    assert turns[2] == Turn(32, 3, 0, 2)
    assert turns[:2] + turns[3:] == SESSION.turns[:2] + SESSION.turns[3:]


def test_a_truncation_may_cost_all_later_turns_their_history() -> None:
    """Prompts are as long as before."""
    turns = coupled(SESSION, is_for_good=True).turns
    assert [turn.history_tokens for turn in turns] == [0, 30, 0, 0]
    assert [turn.kept_tokens for turn in turns] == [turn.kept_tokens for turn in SESSION.turns]


def test_a_shorter_history_is_no_truncation_if_the_window_had_room() -> None:
    """The conversation continued from an earlier turn: its stored tokens up to there are valid."""
    assert coupled(SESSION, window_tokens=57) == SESSION  # 50 kept and 7 new ones: they fit
    assert coupled(SESSION, window_tokens=56) == coupled(SESSION)


def test_states_are_useless_after_a_truncation_to_the_models_window() -> None:
    """A trace with prompts beyond the window is another model's, and was not truncated."""
    workload = Workload("a trace", [SESSION])
    assert workload.with_states(56).sessions == [coupled(SESSION)]
    assert workload.with_states(57).sessions == [SESSION]
    assert workload.with_states(35) is workload
    assert workload.with_states(56).origin == "a trace"


def test_a_workload_knows_that_positions_are_stored() -> None:
    """Its turns and prompts are the same; less of them can be reused."""
    workload = Workload("a trace", [SESSION])
    of = workload.with_coupled_positions()
    assert of.origin == "a trace, coupled positions"
    assert (of.num_turns, of.longest_tokens) == (workload.num_turns, workload.longest_tokens)
    assert of.sessions == [coupled(SESSION)]
