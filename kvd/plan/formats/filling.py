"""What published traces lack, and what a plan puts in its place. Pure; seeded.

Requests without a session are put into sessions that are drawn: how many turns one has and how long
its user thinks as for sessions that are drawn altogether (`generate.py`). A turn's successor is, of
the requests that nobody has yet, the one nearest to the time that was drawn, of those that are
longer than prompt and answer before them and add MAX_NEW_TOKENS at most. Where there is none, the
session ends. So times and lengths are those of the trace, and who belongs to whom is an assumption:
another seed tells how much hangs on it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvd.plan.generate import think_times, turn_counts
from kvd.plan.trace import Session, Turn

SERVICE_S = (1.0, 0.03)  # what an answer took: fixed, and a token; the rest of a gap is thinking
MAX_NEW_TOKENS = 3000  # of a turn that continues another: as the longest prompt that is drawn
NEAR = (0.5, 2.0)  # times the gap that was drawn: a successor comes between
MOST_CANDIDATES = 256  # requests that are looked at, from the nearest on, to either side


@dataclass(frozen=True, slots=True)
class Filling:
    """How what is missing is drawn.

    Attributes:
        rate: sessions that begin a second, where the trace has no times.
        window_tokens: length to which contexts of traces of texts are truncated; 0: none is.
    """

    seed: int = 0
    rate: float = 1.0
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        service_s: seconds from its arrival to the end of its answer; None: not in the trace.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    service_s: float | None = None

    @property
    def kept_tokens(self) -> int:
        """Prompt and answer."""
        return self.input_tokens + self.output_tokens

    @property
    def answered_s(self) -> float:
        """When its answer was complete, as measured or as guessed."""
        if self.service_s is not None:
            return self.at_s + self.service_s
        fixed_s, token_s = SERVICE_S
        return self.at_s + fixed_s + token_s * self.output_tokens


def session_of(requests: Sequence[Request], histories: Sequence[int] | None = None) -> Session:
    """Return the session that some requests are, in the order of their times.

    Args:
        requests: one user's requests.
        histories: tokens of each prompt that were there before; None: a prompt that is longer than
            the longest prompt and answer before it has that as its history. Of a shorter one
            nobody knows, without its text, what it shares with them: it counts as new.
    """
    turns: list[Turn] = []
    kept_tokens, answered_s = 0, requests[0].at_s
    for index, request in enumerate(requests):
        if histories is not None:
            history_tokens = histories[index]
        else:
            history_tokens = kept_tokens if request.input_tokens > kept_tokens else 0
        turns.append(
            Turn(
                new_tokens=request.input_tokens - history_tokens,
                output_tokens=request.output_tokens,
                history_tokens=history_tokens,
                think_s=max(0.0, request.at_s - answered_s),
            )
        )
        kept_tokens, answered_s = max(kept_tokens, request.kept_tokens), request.answered_s
    return Session(requests[0].at_s, tuple(turns))


def drawn_sessions(requests: Sequence[Request], seed: int) -> list[Session]:
    """Put requests, which are sorted by time, into sessions; see the module docstring."""
    if not requests:
        return []
    random = np.random.default_rng(seed)
    num_turns = turn_counts(random, len(requests)).tolist()
    thinks_s = think_times(random, len(requests)).tolist()
    times_s = [request.at_s for request in requests]
    is_taken = [False] * len(requests)
    sessions = []
    for first in range(len(requests)):
        if is_taken[first]:
            continue
        chain = [first]
        while len(chain) < num_turns[first]:
            last = requests[chain[-1]]
            wanted = _window(times_s, chain[-1], last.answered_s + thinks_s[chain[-1]])
            found = next(
                (i for i in wanted if not is_taken[i] and _continues(requests[i], last)), None
            )
            if found is None:
                break
            is_taken[found] = True
            chain.append(found)
        sessions.append(session_of([requests[index] for index in chain]))
    return sessions


def poisson_begins(number: int, filling: Filling) -> list[float]:
    """Return when so many sessions begin, if the trace has no times."""
    random = np.random.default_rng(filling.seed)
    begins: list[float] = np.cumsum(random.exponential(1 / filling.rate, number)).tolist()
    return begins


def _window(times_s: Sequence[float], after: int, wanted_s: float) -> Iterable[int]:
    """Return the indices of requests that come about then, the nearest first."""
    at_s = times_s[after]
    low_s, high_s = (at_s + share * (wanted_s - at_s) for share in NEAR)
    middle = bisect_left(times_s, wanted_s, lo=after + 1)
    low = max(after + 1, middle - MOST_CANDIDATES)
    high = min(len(times_s), middle + MOST_CANDIDATES)
    near = (index for index in range(low, high) if low_s <= times_s[index] <= high_s)
    return sorted(near, key=lambda index: abs(times_s[index] - wanted_s))


def _continues(request: Request, before: Request) -> bool:
    return 0 < request.input_tokens - before.kept_tokens <= MAX_NEW_TOKENS
