"""What is logged of callers that were turned away: so many lines a second, however many come."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.log import get_logger

EVERY_S = 1.0
LINES_PER_S = 10  # of one caller

log = get_logger(__name__)


class RefusalLog:
    """Of one address.

    Args:
        event: what its lines are called.
    """

    def __init__(self, event: str = "access_refused") -> None:
        self._event = event
        self._told_at_s = -EVERY_S
        self._not_told = 0

    def note(self, reason: str, **facts: str) -> None:
        """Log a refusal, or count it for the next line; `facts` hold nothing secret."""
        now_s = time.monotonic()
        if now_s < self._told_at_s + EVERY_S:
            self._not_told += 1
            return
        log.warning(self._event, reason=reason, more=self._not_told, **facts)
        self._told_at_s, self._not_told = now_s, 0


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
