"""KV that is kept of a session: its first tokens, and states or windows at some positions. Pure.

A state is all that a model with recurrent layers keeps of the tokens before a position: it has a
fixed size, and is valid at that position only. So a history is loaded up to its last state, and the
tokens behind it are computed; without a state all are.

A window is the KV of the last tokens before a position, of layers that attend only to these. So a
history is loaded up to the last position before which the whole window is kept. Windows of
neighbouring positions share tokens.

A turn leaves two states or windows: before its answer, since templates write a completed answer in
other tokens than those it was generated in, and at its end. The daemon's own code decides which of
a session's states are kept: the first, and the newest two. Of windows the newest two are kept, and
the session's first tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvd.core.operations.state_matching import NUM_NEWEST, kept_positions
from kvd.core.operations.window_matching import NUM_NEWEST as NUM_NEWEST_WINDOWS
from kvd.plan.trace import Session, Turn
from shared.types.session_key import SessionKey

MOST_KEPT = 1 + NUM_NEWEST
_ANY = SessionKey("plan", "plan", "")  # matters only where sessions share states


@dataclass(frozen=True, slots=True)
class Kept:
    """The KV that is kept of a session.

    Attributes:
        num_tokens: the number of its first tokens.
        ends: positions, ascending, behind which there is a state, or before which a window; empty
            for models without either.
    """

    num_tokens: int = 0
    ends: tuple[int, ...] = ()

    def within(self, history_tokens: int) -> "Kept":
        """Return the part that belongs to a prompt whose history has so many tokens."""
        ends = tuple(position for position in self.ends if position <= history_tokens)
        return Kept(min(self.num_tokens, history_tokens), ends)

    def ends_in(self, other: "Kept") -> tuple[int, ...]:
        """Return the ends that `other` has, too."""
        return tuple(position for position in self.ends if position in other.ends)

    def with_states(self, turn: Turn, num_tokens: int) -> "Kept":
        """Return what is kept after a turn, by a model with states.

        Args:
            turn: the turn; self is what was kept of its prompt.
            num_tokens: tokens stored after it; fewer than its context if that was truncated.
        """
        positions = {*self.ends, turn.history_tokens + turn.new_tokens, turn.kept_tokens}
        states = kept_positions((), (p for p in positions if 0 < p <= num_tokens), _ANY)
        return Kept(num_tokens, tuple(sorted(states)))

    def with_windows(self, turn: Turn, num_tokens: int) -> "Kept":
        """Return what is kept after a turn of a model with windows; see with_states.

        A truncated context keeps its windows, at other positions.
        """
        num_dropped = turn.kept_tokens - num_tokens
        positions = {*self.ends, turn.history_tokens + turn.new_tokens, turn.kept_tokens}
        ends = sorted(end - num_dropped for end in positions if end > num_dropped)
        return Kept(num_tokens, tuple(ends[-NUM_NEWEST_WINDOWS:]))

    def num_windowed(self, window: int) -> int:
        """Return the number of tokens that layers with such a window have KV of."""
        return sum(end - start for start, end in self._windowed(window))

    def last_window_end(self, window: int) -> int:
        """Return the last position before which a window is kept; 0: there is none."""
        return max(min(window, self.num_tokens), *self.ends[-1:], 0)

    def _windowed(self, window: int) -> list[tuple[int, int]]:
        """Return the ranges of tokens that layers with a window have KV of, in order."""
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
    """Return the sum over the sessions of the most states kept at a time."""
    return sum(map(_most_states_of, sessions))


def most_windowed(sessions: Iterable[Session], window: int) -> int:
    """Return the sum over the sessions of the most tokens with windows kept at a time."""
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
