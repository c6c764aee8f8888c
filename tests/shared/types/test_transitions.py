"""State machines are tables: other transitions are impossible, and they can be drawn."""

from enum import Enum

import pytest

from shared.types.transitions import Transitions


class Door(Enum):
    """A door, whose first state is its initial one."""

    OPEN = "open"
    SHUT = "shut"
    BURNT = "burnt"


MOVES = Transitions(
    {
        Door.OPEN: {"push": Door.SHUT, "wind": Door.SHUT, "fire": Door.BURNT},
        Door.SHUT: {"pull": Door.OPEN, "push": Door.SHUT, "fire": Door.BURNT},
        Door.BURNT: {},
    }
)


def test_an_event_leads_to_the_tables_next_state():
    """It depends on the state, and may be the same one."""
    assert MOVES.after(Door.OPEN, "push") is Door.SHUT
    assert MOVES.after(Door.SHUT, "push") is Door.SHUT
    assert MOVES.after(Door.SHUT, "pull") is Door.OPEN


@pytest.mark.parametrize(
    ("state", "event"), [(Door.OPEN, "pull"), (Door.BURNT, "push"), (Door.SHUT, "nonsense")]
)
def test_other_transitions_are_errors(state, event):
    """The error has the event and the state."""
    with pytest.raises(AssertionError, match=f"{event} cannot happen to what is {state.value}"):
        MOVES.after(state, event)


def test_nothing_happens_in_a_final_state():
    """In every other state some event is possible."""
    assert MOVES.events(Door.SHUT) == {"pull", "push", "fire"}
    assert MOVES.events(Door.BURNT) == set()
    assert [state for state in Door if MOVES.is_final(state)] == [Door.BURNT]


def test_a_drawing_has_one_arrow_between_two_states():
    """It names all their events, the initial state, and final ones."""
    assert MOVES.diagram().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> open",
        "    open --> shut: push, wind",
        "    open --> burnt: fire",
        "    shut --> open: pull",
        "    shut --> shut: push",
        "    shut --> burnt: fire",
        "    burnt --> [*]",
    ]
