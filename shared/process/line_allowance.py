"""How many log lines each caller, or library, may cause with what can be repeated at will."""

import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 1.0
LINES_PER_S = 10  # of one caller


@dataclass
class _Second:
    began_s: float
    num_lines: int = 0
    left_out: int = 0


class LineAllowance:
    """How many lines each caller may cause with what it can repeat at will.

    Callers are few: the clients of the settings, and one name for all strangers.
    """

    def __init__(
        self, per_s: int = LINES_PER_S, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._clock_s = clock_s
        self._seconds: dict[str, _Second] = {}

    def take(self, caller: str) -> int | None:
        """How many lines were left out before this one; None: leave this one out, too."""
        now_s = self._clock_s()
        second = self._seconds.setdefault(caller, _Second(now_s))
        if now_s >= second.began_s + EVERY_S:
            second.began_s, second.num_lines = now_s, 0
        if second.num_lines >= self._per_s:
            second.left_out += 1
            return None
        second.num_lines += 1
        left_out, second.left_out = second.left_out, 0
        return left_out
