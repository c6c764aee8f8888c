"""Counts of measured values by bucket, and counts by label. Pure; one thread owns each.

Kept by whoever measures, read by whoever is asked (a scrape, `stats`): nothing is counted twice.
Bucket bounds are upper bounds, inclusive, as Prometheus has them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Seconds, from what a memory copy takes to what a person does not wait for any more.
LATENCY_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Seconds that a conversation rests: from a second to a month.
REST_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0, 2592000.0)
SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

Labels = tuple[str, ...]


@dataclass(slots=True)
class Series:
    """Measured values of one set of labels.

    Attributes:
        counts: per bucket, not cumulative; the last one has what exceeds all bounds.
    """

    counts: list[int]
    total: float = 0.0

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


class Histogram:
    """Values by bucket, for each set of labels that came.

    Args:
        bounds: upper bounds, ascending.
    """

    def __init__(self, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds  # noqa: S101
        self.bounds = tuple(bounds)
        self._series: dict[Labels, Series] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Count one value; whoever calls bounds the number of label sets."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = Series([0] * (len(self.bounds) + 1))
        series.counts[bisect_left(self.bounds, value)] += 1
        series.total += value

    @property
    def total(self) -> Series:
        """All measured values, whatever the labels."""
        every = Series([0] * (len(self.bounds) + 1))
        for series in self._series.values():
            every.counts = [a + b for a, b in zip(every.counts, series.counts, strict=True)]
            every.total += series.total
        return every

    def quantile(self, share: float) -> float | None:
        """Estimate from the buckets the value that this share does not exceed; None: no value.

        Within a bucket values are taken to lie evenly; above the last bound it is that bound.
        """
        counts = self.total.counts
        wanted = share * sum(counts)
        num_before = 0
        for index, count in enumerate(counts[:-1]):
            if count and num_before + count >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (wanted - num_before) / count
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
        """Count; whoever calls bounds the number of label sets."""
        self.counts[labels] += amount
