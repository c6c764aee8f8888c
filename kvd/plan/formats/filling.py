"""Data that published traces lack, and the distributions it is drawn from. Pure; seeded.

Requests without a session are grouped into sessions. The number of turns and the think times are
drawn as for generated sessions (`generate.py`). A turn's successor is chosen among the requests
that are in no session yet, are longer than its prompt and answer, and add at most MAX_NEW_TOKENS:
the one nearest to the time that was drawn. Without such a request the session ends. So times and
lengths are those of the trace, but the grouping is an assumption: another seed shows how much
depends on it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvd.plan.generate import think_times, turn_counts
from kvd.plan.trace import Session, Turn

SERVICE_S = (1.0, 0.03)  # assumed time of an answer: fixed, and per token; the rest is thinking
MAX_NEW_TOKENS = 3000  # of a turn that continues another: the longest prompt that is drawn
NEAR = (0.5, 2.0)  # a successor comes within these multiples of the drawn gap
MOST_CANDIDATES = 256  # requests that are considered on either side of the drawn time


@dataclass(frozen=True, slots=True)
class Filling:
    """Parameters for drawing missing data.

    Attributes:
        seed: the seed.
        rate: sessions that begin per second, where the trace has no times.
        window_tokens: length to which contexts of texts are truncated; 0: none is.
    """

    seed: int = 0
    rate: float = 1.0
    window_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        at_s: its arrival.
        input_tokens, output_tokens: tokens of its prompt and answer.
        service_s: seconds from its arrival to the end of its answer; None: not in the trace.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    service_s: float | None = None

    @property
    def kept_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.input_tokens + self.output_tokens

    @property
    def answered_s(self) -> float:
        """The end of its answer, measured or assumed."""
        if self.service_s is not None:
            return self.at_s + self.service_s
        fixed_s, token_s = SERVICE_S
        return self.at_s + fixed_s + token_s * self.output_tokens


def session_of(requests: Sequence[Request], histories: Sequence[int] | None = None) -> Session:
    """Return the session that some requests form, in the order of their times.

    Args:
        requests: one user's requests.
        histories: history tokens of each prompt; None: if a prompt is longer than the longest
            prompt and answer before it, these are its history; a shorter prompt counts as new, as
            without its text it is unknown what it shares with them.
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
    """Group requests, sorted by time, into sessions; see the module docstring."""
    if not requests:
        return []
    random = np.random.default_rng(seed)
    num_turns = turn_counts(random, len(requests)).tolist()
    thinks_s = think_times(random, len(requests)).tolist()
    times_s = [request.at_s for request in requests]
    is_grouped = [False] * len(requests)
    sessions = []
    for first in range(len(requests)):
        if is_grouped[first]:
            continue
        chain = [first]
        while len(chain) < num_turns[first]:
            last = requests[chain[-1]]
            wanted = _window(times_s, chain[-1], last.answered_s + thinks_s[chain[-1]])
            found = next(
                (i for i in wanted if not is_grouped[i] and _continues(requests[i], last)), None
            )
            if found is None:
                break
            is_grouped[found] = True
            chain.append(found)
        sessions.append(session_of([requests[index] for index in chain]))
    return sessions


def poisson_begins(number: int, filling: Filling) -> list[float]:
    """Draw when sessions begin, for a trace without times."""
    random = np.random.default_rng(filling.seed)
    begins: list[float] = np.cumsum(random.exponential(1 / filling.rate, number)).tolist()
    return begins


def _window(times_s: Sequence[float], after: int, wanted_s: float) -> Iterable[int]:
    """Return the indices of requests about that time, the nearest first."""
    at_s = times_s[after]
    low_s, high_s = (at_s + share * (wanted_s - at_s) for share in NEAR)
    middle = bisect_left(times_s, wanted_s, lo=after + 1)
    low = max(after + 1, middle - MOST_CANDIDATES)
    high = min(len(times_s), middle + MOST_CANDIDATES)
    near = (index for index in range(low, high) if low_s <= times_s[index] <= high_s)
    return sorted(near, key=lambda index: abs(times_s[index] - wanted_s))


def _continues(request: Request, before: Request) -> bool:
    return 0 < request.input_tokens - before.kept_tokens <= MAX_NEW_TOKENS
