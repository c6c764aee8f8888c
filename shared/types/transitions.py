"""Transitions: what may happen to a thing in each of its states, as a table.

Pure. Each machine is an enum of states and one such table; whoever changes a state says what has
happened. What is not in the table cannot happen: a broken invariant. The diagrams of the READMEs
are drawn from the same tables.

*Source:* event-triggered transitions as data: h11.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)


class Transitions(Generic[State]):
    """One machine.

    Args:
        moves: by state: what may happen in it, and the state that follows. The first one is the
            state that everything begins in; one in which nothing may happen is an end.
    """

    def __init__(self, moves: Mapping[State, Mapping[str, State]]) -> None:
        self._moves = moves
        # An enum's own hash takes longer than all the rest of a look-up.
        self._by_id = {id(state): following for state, following in moves.items()}

    def after(self, state: State, event: str) -> State:
        """Look up the state that follows an event; AssertionError if it cannot happen now."""
        following = self._by_id[id(state)].get(event)
        assert following is not None, f"{event} cannot happen to what is {state.value}"  # noqa: S101
        return following

    def events(self, state: State) -> frozenset[str]:
        """Name what may happen in a state: nothing in one that is an end."""
        return frozenset(self._moves[state])

    def diagram(self) -> str:
        """Draw the machine in Mermaid's language: one arrow from a state to another."""
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
