"""When clients that were refused are told to come back. Pure.

Each later than the one before, by what a place takes to become free: a thousand clients that came
back together would nearly all be refused again. After some time it begins anew: the pace may be
estimated too slow, and places must not stay empty.
"""

from shared.types.units import NS_PER_S


class ReturnTimes:
    """See the module docstring.

    Attributes:
        last_ns: when the client that was refused last may come back.
    """

    def __init__(self) -> None:
        self.last_ns = 0

    def next_s(self, now_ns: int, first_s: float, pace_s: float, most_s: float) -> float:
        """Return in how many seconds the next one may come back.

        Args:
            now_ns: the time.
            first_s: when the first one may.
            pace_s: between two.
            most_s: later ones share the times of the first, which may itself be later than that.
        """
        first_ns, pace_ns = now_ns + int(first_s * NS_PER_S), int(pace_s * NS_PER_S)
        return_ns = max(first_ns, self.last_ns + pace_ns)
        if return_ns > now_ns + int(most_s * NS_PER_S):
            return_ns = first_ns
        self.last_ns = return_ns
        return (return_ns - now_ns) / NS_PER_S
