"""State machines are tables: what they do not hold cannot happen, and they draw themselves."""

from enum import Enum

import pytest

from shared.types.transitions import Transitions


class Door(Enum):
    """Its first state is the one in which it is built."""

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


def test_an_event_leads_to_the_state_of_the_table():
    """Which depends on the state, and may be the same one."""
    assert MOVES.after(Door.OPEN, "push") is Door.SHUT
    assert MOVES.after(Door.SHUT, "push") is Door.SHUT
    assert MOVES.after(Door.SHUT, "pull") is Door.OPEN


@pytest.mark.parametrize(
    ("state", "event"), [(Door.OPEN, "pull"), (Door.BURNT, "push"), (Door.SHUT, "nonsense")]
)
def test_what_is_not_in_the_table_cannot_happen(state, event):
    """The error says what was to happen, and in which state."""
    with pytest.raises(AssertionError, match=f"{event} cannot happen to what is {state.value}"):
        MOVES.after(state, event)


def test_nothing_happens_in_an_end():
    """In every other state something may."""
    assert MOVES.events(Door.SHUT) == {"pull", "push", "fire"}
    assert MOVES.events(Door.BURNT) == set()


def test_a_drawing_has_one_arrow_from_a_state_to_another():
    """It names all events that lead there, where everything begins, and where it ends."""
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
