"""Whether a turn's history is better loaded or computed: for it, and for those behind it. Pure.

Computing is what everybody shares: who computes a history that is stored keeps all waiting who come
behind. A turn that waits for an SSD keeps nobody from computing, but holds its place. So both ways
are compared by what they cost all of them together, in seconds of waiting:

    compute   compute_s, for the turn and for each behind it
    load      wait_s, for the turn alone, as far as the engine is not busy with others anyway;
              for each who waits for a place, the share of wait_s that one place of them all is;
              busy_s, for the turn and for each behind it

Behind it are those who wait for a place, those whose history is on its way, and those who are
likely to come before it is computed. With nobody behind, what takes less time is chosen.

Both processes ask here: the engine before it loads, and `kvd plan`, whose answers it is to follow.

*Source:* what one customer's service costs the others of a queue: Haviv and Ritov, Externalities,
Tangible Externalities, and Queue Disciplines (Management Science 44, 1998).
"""

from collections import deque
from dataclasses import dataclass

from shared.types.units import NS_PER_S

COUNTED_STARTS = (
    16  # enough to average out who comes at the same time, few enough to follow an hour
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What else an engine has to do when a turn is about to be loaded or computed.

    Attributes:
        num_waiting: turns that wait for a place.
        num_loading: other turns that have a place, and whose history is on its way.
        num_places: turns that may have one at the same time; at least one.
        starts_per_s: how often turns got a place lately; 0: unknown.
        backlog_s: computing of prompts that comes before this turn's anyway.
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
        wait_s: until the history can be copied to the engine; others are computed meanwhile.
        busy_s: of copying it, during which nobody is computed.
        compute_s: of computing it instead, beside what the turn has to compute anyway.
        traffic: who else there is.
    """
    coming = traffic.starts_per_s * (traffic.backlog_s + compute_s)
    behind = traffic.num_waiting + traffic.num_loading + coming
    shown_s = max(0.0, wait_s - traffic.backlog_s)
    places_s = wait_s * traffic.num_waiting / traffic.num_places
    return shown_s + places_s + busy_s * (1 + behind) <= compute_s * (1 + behind)


def longest_wait_s(busy_s: float, compute_s: float, traffic: Traffic) -> float:
    """Return the longest wait with which loading still pays; 0: not even without one.

    Whoever waits so long in vain, and computes then, costs all turns together twice what computing
    at once would have: an idle engine's turn is twice as late. See `loading_pays`.
    """
    coming = traffic.starts_per_s * (traffic.backlog_s + compute_s)
    behind = traffic.num_waiting + traffic.num_loading + coming
    saved_s = (compute_s - busy_s) * (1 + behind)
    if saved_s < 0:
        return 0.0
    place = traffic.num_waiting / traffic.num_places
    if saved_s < traffic.backlog_s * place:  # its place alone costs that, before the wait shows
        return saved_s / place
    return (saved_s + traffic.backlog_s) / (1 + place)


class RecentStarts:
    """How often turns start: the latest of them, over the time since the first of these.

    A long pause, as a night, is forgotten once so many have started again; until then it counts,
    and makes the engine look idler than it is.
    """

    def __init__(self) -> None:
        self._starts_ns: deque[int] = deque(maxlen=COUNTED_STARTS)

    def note(self, now_ns: int) -> None:
        """Record that a turn starts."""
        self._starts_ns.append(now_ns)

    def per_s(self, now_ns: int) -> float:
        """Return how many started per second after the first one; 0 if none did."""
        if len(self._starts_ns) < 2 or now_ns <= self._starts_ns[0]:
            return 0.0
        return (len(self._starts_ns) - 1) * NS_PER_S / (now_ns - self._starts_ns[0])
