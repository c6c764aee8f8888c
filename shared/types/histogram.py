"""Histograms (measured values by bucket and label) and tallies (counts by label). Pure.

Each is owned by one thread. It is kept where the values are measured, and read on demand (a scrape,
`stats`), so nothing is counted twice. Bucket bounds are upper bounds, inclusive, as in Prometheus.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Seconds: from the time of a memory copy to longer than a person waits.
LATENCY_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Seconds that a conversation is idle: from a second to a month.
REST_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0, 2592000.0)
SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

Labels = tuple[str, ...]


@dataclass(slots=True)
class Series:
    """Measured values of one set of labels.

    Attributes:
        counts: number of values per bucket, not cumulative; the last bucket has no upper bound.
        total: sum of the values.
    """

    counts: list[int]
    total: float = 0.0

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


class Histogram:
    """Values by bucket, for each set of labels that was observed.

    Args:
        bounds: upper bounds, ascending.
    """

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds  # noqa: S101
        self.bounds = tuple(bounds)
        self._series: dict[Labels, Series] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Count one value. The caller keeps the number of different label sets small."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Series([0] * (len(self.bounds) + 1))
        series.counts[bisect_left(self.bounds, value)] += 1
        series.total += value

    @property
    def total(self) -> Series:
        """All measured values, of all labels."""
        every = Series([0] * (len(self.bounds) + 1))
        for series in self._series.values():
            every.counts = [a + b for a, b in zip(every.counts, series.counts, strict=True)]
            every.total += series.total
        return every

    def quantile(self, share: float) -> float | None:
        """Estimate the value that this share of the values does not exceed; None: no values.

        Within a bucket the values are assumed to be spread evenly. Above the last bound the result
        is that bound.
        """
        counts = self.total.counts
        target = share * sum(counts)
        num_before = 0
        for index, count in enumerate(counts[:-1]):
            if count and num_before + count >= target:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (target - num_before) / count
            num_before += count
        return self.bounds[-1] if counts[-1] else None

    @property
    def series(self) -> Mapping[Labels, Series]:
        """Return the measured values by label values."""
        return self._series


@dataclass(slots=True)
class Tally:
    """Counts by label values."""

    counts: Counter[Labels] = field(default_factory=Counter)

    def add(self, *labels: str, amount: int = 1) -> None:
        """Add to a count. The caller keeps the number of different label sets small."""
        self.counts[labels] += amount
