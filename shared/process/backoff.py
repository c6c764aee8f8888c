"""Back-off: how long to leave something alone that fails, ever longer, and by chance. Pure."""

from random import Random

FIRST_S, LONGEST_S = 1.0, 300.0


class Backoff:
    """Says when to try again; not two processes at once, for each draws its pauses.

    Args:
        random: draws them.
        first_s: about how long the first pause is.
        longest_s: how long one is at most.
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

    def failed(self, now_s: float) -> bool:
        """Take a failure; returns whether it is the first after a success."""
        most_s = min(self._longest_s, self._first_s * 2 ** min(self._num_failures, 30))
        self.retry_at_s = now_s + most_s * self._random.uniform(0.5, 1.0)
        self._num_failures += 1
        return self._num_failures == 1

    def succeeded(self) -> bool:
        """Take a success; returns whether it is the first after a failure."""
        is_first, self._num_failures, self.retry_at_s = self.is_failing, 0, 0.0
        return is_first
