"""Latencies taken in rounds, in which caches of different sizes take turns. Pure."""

from collections import defaultdict

from kvd.bench.figures import Growth, Latency, latency
from shared.measuring.statistics import growth, percentile


class Rounds:
    """Seconds of each call, by operation, number of sessions stored, and round.

    Args:
        level: "rpc" or "core", see Latency.
    """

    def __init__(self, level: str) -> None:
        self._level = level
        self._seconds: defaultdict[tuple[str, int], list[list[float]]] = defaultdict(list)

    def begin(self, operations: tuple[str, ...], num_sessions: int) -> dict[str, list[float]]:
        """Open one cache's turn of a round: lists to append seconds to, one per operation."""
        turn: dict[str, list[float]] = {operation: [] for operation in operations}
        for operation, seconds in turn.items():
            self._seconds[operation, num_sessions].append(seconds)
        return turn

    def latencies(self) -> list[Latency]:
        """One for each operation and size, over all rounds."""
        return [
            latency(self._level, operation, num_sessions, [s for turn in turns for s in turn])
            for (operation, num_sessions), turns in sorted(self._seconds.items())
        ]

    def growths(self, from_sessions: int, to_sessions: int) -> list[Growth]:
        """How the median call grows between two sizes, for each operation."""
        operations = sorted({operation for operation, _ in self._seconds})
        return [
            Growth(
                self._level,
                operation,
                from_sessions,
                to_sessions,
                growth(
                    self._medians(operation, from_sessions), self._medians(operation, to_sessions)
                ),
            )
            for operation in operations
        ]

    def _medians(self, operation: str, num_sessions: int) -> list[float]:
        return [percentile(turn, 0.5) for turn in self._seconds[operation, num_sessions]]
