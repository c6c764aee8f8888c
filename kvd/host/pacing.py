"""Rates: how long work has to wait so that it takes no more than its share."""

import threading
import time
from collections.abc import Callable


class Pace:
    """Spreads work over time. Pure; what was not used is not made up for.

    Args:
        rate: bytes a second, or requests.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._resume_at = 0.0

    def resume_at(self, amount: int, now_s: float) -> float:
        """Return when to resume after so many were asked for, now."""
        self._resume_at = max(self._resume_at, now_s) + amount / self._rate
        return self._resume_at


class SharedPace:
    """Makes whichever thread moves bytes, or asks, wait until it may.

    Args:
        rate: bytes a second, or requests; 0: nobody waits.
        clock: monotonic seconds.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        rate: float = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pace = Pace(rate) if rate else None
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def take(self, amount: int) -> None:
        """Wait for the time that all before take, then account for these."""
        if self._pace is None:
            return
        with self._lock:
            now_s = self._clock()
            start_s = self._pace.resume_at(0, now_s)
            self._pace.resume_at(amount, now_s)
        if start_s > now_s:
            self._sleep(start_s - now_s)
