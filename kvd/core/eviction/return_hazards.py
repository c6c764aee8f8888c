"""ReturnHazards: how likely idle sessions are to return, and when; learned at run time. Pure.

Idle time is divided into buckets, two an octave from one second on. For each *class* of sessions
and bucket `b` two numbers are kept: how many sessions were observed to the bucket's end or returned
in it (`n_b`), and how many returned in it (`e_b`). A session that is dropped, ended or still idle
counts in the buckets through which it was observed, and in no other. No more is needed for censored
observations.

A class is a path of traits, the most telling first. Every session counts for each prefix of its
path. The hazard of bucket `b` is computed from no trait to all of them:

    a_b  = (Σ_d K_d e_{b+d} + T φ h_{b-1}) / (Σ_d K_d n_{b+d} + T)      without any trait,
    h_b  = (e_b + N a_b) / (n_b + N)
    m    = (Σ_b e_b + M) / (Σ_b n_b h_b + M)                            with one more:
    h_b <- (e_b + P m h_b) / (n_b + P)

So neighbouring buckets support one another. A bucket that no session has reached is thought less
likely than the one before. A class begins with the hazards of its parent, soon differs from them by
a factor, and in shape only with many sessions. Counts are halved when a bucket has many, so that
old ones fade.

*Source:* discrete-time hazards with censoring (Kaplan & Meier, 1958; Cox, 1972), shrunk towards the
parent class as an empirical-Bayes estimate is.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from shared.types.units import NS_PER_S

EDGES_NS = [0, *(NS_PER_S >> shift for shift in (10, 8, 6, 4, 2))] + [
    round(2 ** (half_octaves / 2) * NS_PER_S) for half_octaves in range(36)
]  # from a millisecond, for programs, to two days, for people
NUM_BUCKETS = len(EDGES_NS) - 1
_WIDTHS_S = [(end - start) / NS_PER_S for start, end in pairwise(EDGES_NS)]
KERNEL = ((-2, 0.25), (-1, 0.6), (0, 1.0), (1, 0.6), (2, 0.25))  # K: an octave to either side
AROUND_WEIGHT = 200.0  # N, sessions
TAIL_WEIGHT = 4.0  # T, sessions
TAIL_DECAY = 0.7  # φ, per bucket
FACTOR_WEIGHT = 20.0  # M, returns
SHAPE_WEIGHT = 400.0  # P, sessions
MOST_SEEN = 4096.0  # of one class in one bucket; beyond it counts are halved
MOST_LIKELY = 0.95  # highest hazard of a bucket that the factor may lead to

Traits = tuple[int, ...]
Hazards = list[float]


@dataclass(slots=True)
class SessionClass:
    """Sessions with the same traits: counts by bucket, and what is computed from them.

    Attributes:
        parent: the class with one trait less; None for the class of all sessions.
        shape_weight: `P`.
        seen: `n_b`.
        returned: `e_b`.
        hazards, rates: by bucket; see `ReturnHazards`.
        learned: token of the learning that the hazards are of; `rated`: the same for the rates.
    """

    parent: "SessionClass | None"
    shape_weight: float = SHAPE_WEIGHT
    seen: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    returned: list[float] = field(default_factory=lambda: [0.0] * NUM_BUCKETS)
    hazards: Hazards = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    learned: object = None
    rated: object = None

    def forget(self) -> None:
        """Reset the counts: the class begins again with the hazards of its parent."""
        self.seen, self.returned = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS
        self.learned = self.rated = None


class ReturnHazards:
    """Hazards and rates of all classes. Computed values stay until `learn` is called."""

    def __init__(self) -> None:
        self._classes: dict[Traits, SessionClass] = {(): SessionClass(None)}
        self._learned = object()  # a token that is replaced by each `learn`

    def class_of(self, traits: Traits) -> SessionClass:
        """Return the class of these traits. It is created if need be."""
        found = self._classes.get(traits)
        if found is None:
            found = self._classes[traits] = SessionClass(self.class_of(traits[:-1]))
        return found

    def learn(self) -> None:
        """Let rates and hazards be computed from all counts so far, from now on."""
        self._learned = object()

    def rates(self, session_class: SessionClass) -> list[float]:
        """Return the rate of keeping a session of the class, by bucket; see return_rates."""
        if session_class.rated != self._learned:
            session_class.rated = self._learned
            session_class.rates = return_rates(self.hazards(session_class))
        return session_class.rates

    def hazards(self, session_class: SessionClass) -> Hazards:
        """Return the probability by bucket that a session, idle at its start, returns in it."""
        if session_class.learned != self._learned:
            session_class.learned = self._learned
            parent = session_class.parent
            session_class.hazards = (
                _refine(self.hazards(parent), session_class) if parent else _smooth(session_class)
            )
        return session_class.hazards


def observe(session_class: SessionClass, bucket: int, *, has_returned: bool) -> None:
    """Count a session that returned in a bucket, or was observed through it."""
    counts: SessionClass | None = session_class
    while counts is not None:
        counts.seen[bucket] += 1
        counts.returned[bucket] += has_returned
        if counts.seen[bucket] > MOST_SEEN:
            counts.seen[bucket] /= 2
            counts.returned[bucket] /= 2
        counts = counts.parent


def bucket_at(idle_ns: int) -> int:
    """Return the bucket of an idle time."""
    return min(bisect_right(EDGES_NS, idle_ns), NUM_BUCKETS) - 1


def return_rates(hazards: Hazards) -> list[float]:
    """Return the rate of keeping a session, in returns per second, from the start of each bucket.

    The rate is the highest P(it returns while kept) / E[seconds kept] over all times at which to
    give it up: bytes held until then are worth this many returns per second. (The number of bytes
    does not matter: what a return saves grows with the session as the room it takes does.)

    Computed from the last bucket to the first. Buckets are joined to a *stretch* as long as
    continuing into the next stretch raises the rate. The numbers of a stretch (returns, seconds,
    sessions left) are per session at its start, so nothing is ever subtracted: rates are exact to
    the last digits, even for ages that hardly any session reaches.

    *Source:* the index of Gittins (1979) for one arm that pays once; joined as adjacent violators
    are (Ayer et al., 1955).
    """
    stretches: list[tuple[float, float, float]] = []
    rates: list[float] = []
    for width_s, hazard in zip(reversed(_WIDTHS_S), reversed(hazards), strict=True):
        returns, seconds, left = hazard, width_s * (1 - hazard / 2), 1 - hazard
        while stretches and stretches[-1][0] * seconds >= returns * stretches[-1][1]:
            more_returns, more_seconds, of_these = stretches.pop()
            returns += left * more_returns
            seconds += left * more_seconds
            left *= of_these
        stretches.append((returns, seconds, left))
        rates.append(returns / seconds)
    return rates[::-1]


def _smooth(counts: SessionClass) -> Hazards:
    hazards: Hazards = []
    before = 0.0
    for bucket in range(NUM_BUCKETS):
        returned, seen = TAIL_WEIGHT * TAIL_DECAY * before, TAIL_WEIGHT
        for distance, weight in KERNEL:
            if 0 <= bucket + distance < NUM_BUCKETS:
                returned += weight * counts.returned[bucket + distance]
                seen += weight * counts.seen[bucket + distance]
        around = returned / seen
        seen = counts.seen[bucket] + AROUND_WEIGHT
        before = (counts.returned[bucket] + AROUND_WEIGHT * around) / seen
        hazards.append(before)
    return hazards


def _refine(hazards: Hazards, counts: SessionClass) -> Hazards:
    """Return the hazards of a class, from those of its parent."""
    expected = sum(map(float.__mul__, counts.seen, hazards))
    factor = (sum(counts.returned) + FACTOR_WEIGHT) / (expected + FACTOR_WEIGHT)
    weight = counts.shape_weight
    return [
        (returned + weight * min(MOST_LIKELY, factor * hazard)) / (seen + weight)
        for returned, seen, hazard in zip(counts.returned, counts.seen, hazards, strict=True)
    ]
