"""A bandwidth limit that threads share."""

import threading
import time
from collections.abc import Callable


class Pace:
    """Makes whoever moves bytes wait until it may.

    Args:
        bytes_per_s: 0: nobody waits.
        clock: monotonic seconds.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        bytes_per_s: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def take(self, num_bytes: int) -> None:
        """Wait for the time that all bytes before take, then account for these."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = self._clock()
            start_s = max(now_s, self._free_at_s)
            self._free_at_s = start_s + num_bytes / self._bytes_per_s
        if start_s > now_s:
            self._sleep(start_s - now_s)
