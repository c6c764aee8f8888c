"""Pacing: how long work has to wait so that it keeps to a rate."""

import threading
import time
from collections.abc import Callable


class Pace:
    """Spreads work over time. Pure. Unused time is not made up for later.

    Args:
        rate: bytes (or requests) per second.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._resume_at = 0.0

    def resume_at(self, amount: int, now_s: float) -> float:
        """Return the time at which to resume after work of `amount` that begins now."""
        self._resume_at = max(self._resume_at, now_s) + amount / self._rate
        return self._resume_at


class SharedPace:
    """A rate that several threads share. Any thread may call take().

    Args:
        rate: bytes (or requests) per second; 0: no limit.
        clock: returns monotonic seconds.
        sleep: sleeps for a number of seconds.
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
        """Account for `amount`, then wait until all earlier amounts are over."""
        if self._pace is None:
            return
        with self._lock:
            now_s = self._clock()
            start_s = self._pace.resume_at(0, now_s)
            self._pace.resume_at(amount, now_s)
        if start_s > now_s:
            self._sleep(start_s - now_s)
