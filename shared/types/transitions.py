"""Transitions: the table of a state machine: which events may happen in each state.

Pure. Each machine is an enum of states and one such table. Code that changes a state names the
event. An event that is not in the table is a broken invariant. The diagrams of the READMEs are
generated from the same tables.

*Source:* event-triggered transitions as data: h11.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)


class Transitions(Generic[State]):
    """The transitions of one state machine.

    Args:
        moves: for each state, its events and the state that follows each. The first state is the
            initial one. A state without events is final.
    """

    def __init__(self, moves: Mapping[State, Mapping[str, State]]) -> None:
        self._moves = moves
        # Keyed by id, because an enum's own hash takes longer than the rest of a look-up.
        self._by_id = {id(state): following for state, following in moves.items()}

    def after(self, state: State, event: str) -> State:
        """Return the state that follows an event. AssertionError: it cannot happen in this one."""
        following = self._by_id[id(state)].get(event)
        assert following is not None, f"{event} cannot happen to what is {state.value}"  # noqa: S101
        return following

    def events(self, state: State) -> frozenset[str]:
        """Return the events that may happen in a state; none in a final one."""
        return frozenset(self._moves[state])

    def is_final(self, state: State) -> bool:
        """Whether nothing may happen in a state any more."""
        return not self._by_id[id(state)]

    def diagram(self) -> str:
        """Return the machine as a Mermaid diagram, with one arrow from a state to another."""
        arrows: dict[tuple[State, State], list[str]] = {}
        for state, moves in self._moves.items():
            for event, following in moves.items():
                arrows.setdefault((state, following), []).append(event)
        start = next(iter(self._moves))
        lines = ["stateDiagram-v2", f"    [*] --> {start.value}"]
        lines += [
            f"    {state.value} --> {following.value}: {', '.join(events)}"
            for (state, following), events in arrows.items()
        ]
        lines += [f"    {state.value} --> [*]" for state, moves in self._moves.items() if not moves]
        return "\n".join(lines)
