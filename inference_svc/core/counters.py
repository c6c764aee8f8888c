"""What the service counts, in one table. Pure; each count only grows while the process lives."""

from collections import Counter
from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    "turns_finished": "turns answered",
    "turns_cancelled": "turns stopped by their client or by the drain",
    "turns_failed": "turns that were refused or ended with an error",
    "turns_replayed": "repeats answered with the recorded result",
    "steps": "forward passes",
    "steps_failed": "forward passes that raised; their requests were computed one by one",
    "history_tokens": "prompt tokens that an earlier turn had computed",
    "reused_tokens": "of them, loaded from kvd",
    "recomputed_tokens": "of them, computed again",
    "new_tokens": "prompt tokens computed for the first time",
    "output_tokens": "tokens answered",
    "load_hits": "turns for which kvd had something",
    "load_misses": "turns for which kvd had nothing that may be used",
    "load_errors": "loads that failed; their turns recomputed",
    "loads_retried": "loads that failed while kvd was still reading, and were asked for again",
    "saves": "turns whose KV was stored",
    "saves_refused": "saves that kvd had no room for",
    "save_errors": "saves that failed",
}


class Counters:
    """Counts by the names of COUNTERS."""

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(COUNTERS, 0))

    def add(self, name: str, amount: int = 1) -> None:
        """Count; the name must be in the table."""
        assert name in COUNTERS, name
        self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts."""
        return dict(self._counts)
