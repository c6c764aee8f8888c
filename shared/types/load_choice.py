"""Load or recompute: whether loading a turn's history costs less than computing it. Pure.

Computing is shared by all turns: computing a history that is stored delays all turns that wait
behind. A turn that waits for an SSD delays no computing, but it occupies a place. So both ways are
compared by what they cost all turns together, in seconds of waiting:

    compute   compute_s, for the turn and for each behind it
    load      wait_s, for the turn alone, as far as the engine is not busy with others anyway;
              for each turn that waits for a place, wait_s / number of places;
              busy_s, for the turn and for each behind it

Behind it are the turns that wait for a place, those whose history is being loaded, and those that
are likely to come before it is computed. If there are none, the faster way is chosen.

Both processes use this module: the engine before it loads, and `kvd plan`, which has to predict the
engine's choice.

*Source:* what one customer's service costs the others of a queue: Haviv and Ritov, Externalities,
Tangible Externalities, and Queue Disciplines (Management Science 44, 1998).
"""

from collections import deque
from dataclasses import dataclass

from shared.types.units import NS_PER_S

COUNTED_STARTS = (
    16  # enough to average out simultaneous starts, few enough to follow changes within an hour
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The other work of an engine when a turn is about to be loaded or computed.

    Attributes:
        num_waiting: turns that wait for a place.
        num_loading: other turns that have a place and whose history is being loaded.
        num_places: turns that may have a place at the same time; at least 1.
        starts_per_s: how often turns got a place lately; 0: unknown.
        backlog_s: seconds of computing prompts that come before this turn's anyway.
    """

    num_waiting: int = 0
    num_loading: int = 0
    num_places: int = 1
    starts_per_s: float = 0.0
    backlog_s: float = 0.0


IDLE = Traffic()


def loading_pays(wait_s: float, busy_s: float, compute_s: float, traffic: Traffic) -> bool:
    """Whether loading a turn's history costs all turns together no more than computing it.

    Args:
        wait_s: seconds until the history can be copied to the engine; others are computed then.
        busy_s: seconds of copying it, while nothing is computed.
        compute_s: seconds of computing it instead, beside what the turn has to compute anyway.
        traffic: the other work of the engine.
    """
    coming = traffic.starts_per_s * (traffic.backlog_s + compute_s)
    behind = traffic.num_waiting + traffic.num_loading + coming
    exposed_s = max(0.0, wait_s - traffic.backlog_s)
    places_s = wait_s * traffic.num_waiting / traffic.num_places
    return exposed_s + places_s + busy_s * (1 + behind) <= compute_s * (1 + behind)


def longest_wait_s(busy_s: float, compute_s: float, traffic: Traffic) -> float:
    """Return the longest wait in seconds with which loading pays; 0: none. See `loading_pays`.

    A turn that waits this long without getting its history, and then computes it, costs all turns
    together twice what computing at once costs: on an idle engine the turn is twice as late.
    """
    coming = traffic.starts_per_s * (traffic.backlog_s + compute_s)
    behind = traffic.num_waiting + traffic.num_loading + coming
    saved_s = (compute_s - busy_s) * (1 + behind)
    if saved_s < 0:
        return 0.0
    place = traffic.num_waiting / traffic.num_places
    if saved_s < traffic.backlog_s * place:  # the cost of its place exceeds that within the backlog
        return saved_s / place
    return (saved_s + traffic.backlog_s) / (1 + place)


class RecentStarts:
    """The rate at which turns start: the latest starts, over the time since the first of them.

    A long pause, such as a night, is forgotten after COUNTED_STARTS more starts. Until then it
    counts, and makes the engine look less busy than it is.
    """

    def __init__(self) -> None:
        self._starts_ns: deque[int] = deque(maxlen=COUNTED_STARTS)

    def record(self, now_ns: int) -> None:
        """Record that a turn starts."""
        self._starts_ns.append(now_ns)

    def per_s(self, now_ns: int) -> float:
        """Return how many turns per second started after the first one; 0 if none did."""
        if len(self._starts_ns) < 2 or now_ns <= self._starts_ns[0]:
            return 0.0
        return (len(self._starts_ns) - 1) * NS_PER_S / (now_ns - self._starts_ns[0])
