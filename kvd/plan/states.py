"""What is kept of a session: its first tokens, and states at some of its positions. Pure.

A state is all that a model with recurrent layers keeps of the tokens before a position: of a fixed
size, and of use at just that position. So a history is loaded up to the last state in it, with that
state, and the rest is computed; without any, all of it is.

A turn leaves two: before its answer, since templates write an answer that is over in other tokens
than those it was made of, and at its end. Which of a session's states stay is decided by the
daemon's own code: the first, and the newest two.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvd.core.operations.state_matching import NUM_NEWEST, kept_positions
from kvd.plan.trace import Session, Turn
from shared.types.session_key import SessionKey

MOST_KEPT = 1 + NUM_NEWEST
_ANY = SessionKey("plan", "plan", "")  # whose states they are is asked where sessions share some


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a session.

    Attributes:
        num_tokens: the first ones of it.
        states: positions behind which there is a state, ascending; a model without has none.
    """

    num_tokens: int = 0
    states: tuple[int, ...] = ()

    def within(self, history_tokens: int) -> "Kept":
        """Return what of it belongs to a prompt that has so much of the session as its history."""
        states = tuple(position for position in self.states if position <= history_tokens)
        return Kept(min(self.num_tokens, history_tokens), states)

    def states_in(self, other: "Kept") -> tuple[int, ...]:
        """Return the states that another has, too."""
        return tuple(position for position in self.states if position in other.states)

    def then(self, turn: Turn, num_tokens: int) -> "Kept":
        """Return what is kept after a turn of a model with states.

        Args:
            turn: the turn, of whose prompt this is what was kept.
            num_tokens: what is stored after it; less than its context if that was truncated.
        """
        answer_from = turn.history_tokens + turn.new_tokens
        there = {*self.states, answer_from, turn.kept_tokens}
        states = kept_positions((), (p for p in there if 0 < p <= num_tokens), _ANY)
        return Kept(num_tokens, tuple(sorted(states)))


NOTHING = Kept()


def most_states(sessions: Iterable[Session]) -> int:
    """Sum over the sessions of the most states that each keeps at a time."""
    return sum(map(_most_states_of, sessions))


def _most_states_of(session: Session) -> int:
    kept, most = NOTHING, 0
    for turn in session.turns:
        kept = kept.within(turn.history_tokens).then(turn, turn.kept_tokens)
        most = max(most, len(kept.states))
    return most
