"""What is kept of a session: its first tokens, and states or windows at some positions. Pure.

A state is all that a model with recurrent layers keeps of the tokens before a position: of a fixed
size, and of use at just that position. So a history is loaded up to the last state in it, with that
state, and the rest is computed; without any, all of it is.

A window is the KV of the last tokens before a position, of layers that attend to so many only. So a
history is loaded up to the last position before which all of these are kept. Windows of positions
that are close to each other have tokens in common.

A turn leaves two of either: before its answer, since templates write an answer that is over in
other tokens than those it was made of, and at its end. Which of a session's states stay is decided
by the daemon's own code: the first, and the newest two. Of windows the newest two stay, and the
session's first tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvd.core.operations.state_matching import NUM_NEWEST, kept_positions
from kvd.core.operations.window_matching import NUM_NEWEST as NUM_NEWEST_WINDOWS
from kvd.plan.trace import Session, Turn
from shared.types.session_key import SessionKey

MOST_KEPT = 1 + NUM_NEWEST
_ANY = SessionKey("plan", "plan", "")  # whose states they are is asked where sessions share some


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a session.

    Attributes:
        num_tokens: the first ones of it.
        ends: positions, ascending, behind which there is a state, or before which a window; none
            of a model without.
    """

    num_tokens: int = 0
    ends: tuple[int, ...] = ()

    def within(self, history_tokens: int) -> "Kept":
        """Return what of it belongs to a prompt that has so much of the session as its history."""
        ends = tuple(position for position in self.ends if position <= history_tokens)
        return Kept(min(self.num_tokens, history_tokens), ends)

    def ends_in(self, other: "Kept") -> tuple[int, ...]:
        """Return the ends that another has, too."""
        return tuple(position for position in self.ends if position in other.ends)

    def with_states(self, turn: Turn, num_tokens: int) -> "Kept":
        """Return what is kept after a turn of a model with states.

        Args:
            turn: the turn, of whose prompt this is what was kept.
            num_tokens: what is stored after it; less than its context if that was truncated.
        """
        there = {*self.ends, turn.history_tokens + turn.new_tokens, turn.kept_tokens}
        states = kept_positions((), (p for p in there if 0 < p <= num_tokens), _ANY)
        return Kept(num_tokens, tuple(sorted(states)))

    def with_windows(self, turn: Turn, num_tokens: int) -> "Kept":
        """Return what is kept after a turn of a model with windows; arguments as above.

        What is left of a truncated context keeps its windows, at other positions.
        """
        num_dropped = turn.kept_tokens - num_tokens
        there = {*self.ends, turn.history_tokens + turn.new_tokens, turn.kept_tokens}
        ends = sorted(end - num_dropped for end in there if end > num_dropped)
        return Kept(num_tokens, tuple(ends[-NUM_NEWEST_WINDOWS:]))

    def num_windowed(self, window: int) -> int:
        """Return of how many tokens layers with such a window have KV."""
        return sum(end - start for start, end in self._windowed(window))

    def last_window_end(self, window: int) -> int:
        """Return the last position before which a window is kept; 0: there is none."""
        return max(min(window, self.num_tokens), *self.ends[-1:], 0)

    def _windowed(self, window: int) -> list[tuple[int, int]]:
        """Return the ranges of tokens that layers with a window have KV of, apart, in order."""
        ranges = [(0, min(window, self.num_tokens))]
        for position in self.ends:
            start, (before, end) = max(0, position - window), ranges[-1]
            if start <= end:
                ranges[-1] = (before, max(end, position))
            else:
                ranges.append((start, position))
        return ranges


NOTHING = Kept()


def most_states(sessions: Iterable[Session]) -> int:
    """Sum over the sessions of the most states that each keeps at a time."""
    return sum(map(_most_states_of, sessions))


def most_windowed(sessions: Iterable[Session], window: int) -> int:
    """Sum over the sessions of the most tokens that each keeps windows of at a time."""
    return sum(
        max((kept.num_windowed(window) for kept in _with_windows(session)), default=0)
        for session in sessions
    )


def _with_windows(session: Session) -> Iterator[Kept]:
    kept = NOTHING
    for turn in session.turns:
        kept = kept.within(turn.history_tokens).with_windows(turn, turn.kept_tokens)
        yield kept


def _most_states_of(session: Session) -> int:
    kept, most = NOTHING, 0
    for turn in session.turns:
        kept = kept.within(turn.history_tokens).with_states(turn, turn.kept_tokens)
        most = max(most, len(kept.ends))
    return most
