"""Backoff: exponential back-off with random jitter after failures. Pure."""

from random import Random

FIRST_S, LONGEST_S = 1.0, 300.0


class Backoff:
    """Decides when to try again; the pauses are random, so that processes do not retry at once.

    Args:
        random: draws the pauses.
        first_s: about the first pause, in seconds.
        longest_s: the longest pause, in seconds.

    Attributes:
        retry_at_s: time of the next try; 0 after a success.
    """

    def __init__(
        self, random: Random, first_s: float = FIRST_S, longest_s: float = LONGEST_S
    ) -> None:
        self._random = random
        self._first_s = first_s
        self._longest_s = longest_s
        self._num_failures = 0
        self.retry_at_s = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether the last try has failed."""
        return self._num_failures > 0

    def record_failure(self, now_s: float) -> bool:
        """Record a failure and draw a pause; returns whether it is the first after a success."""
        most_s = min(self._longest_s, self._first_s * 2 ** min(self._num_failures, 30))
        self.retry_at_s = now_s + most_s * self._random.uniform(0.5, 1.0)
        self._num_failures += 1
        return self._num_failures == 1

    def record_success(self) -> bool:
        """Record a success; returns whether it is the first after a failure."""
        is_first, self._num_failures, self.retry_at_s = self.is_failing, 0, 0.0
        return is_first
