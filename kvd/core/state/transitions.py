"""Transitions: what may happen to a block, a slot or a lease in each of its states, as a table.

Pure. Each machine is an enum of states and one such table; whoever changes a state says what has
happened. What is not in the table cannot happen: a broken invariant. The diagrams of kvd/README.md
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
        moves: by state: what may happen to it, and the state that follows. The first one is the
            state that everything begins in.
    """

    def __init__(self, moves: Mapping[State, Mapping[str, State]]) -> None:
        self._moves = moves

    def after(self, state: State, event: str) -> State:
        """Look up the state that follows an event; AssertionError if it cannot happen now."""
        following = self._moves[state].get(event)
        assert following is not None, f"{event} cannot happen to what is {state.value}"
        return following

    def diagram(self) -> str:
        """Draw the machine, in Mermaid's language."""
        lines = [
            f"    {state.value} --> {following.value}: {event}"
            for state, events in self._moves.items()
            for event, following in events.items()
        ]
        start = next(iter(self._moves))
        return "\n".join(["stateDiagram-v2", f"    [*] --> {start.value}", *lines])
