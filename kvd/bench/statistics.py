"""Medians, percentiles, and ratios of interleaved pairs.

Pure. Machines are noisy: neighbours, clock rates and disks change from second to second. Two things
are therefore measured in turn, many times, and compared pair by pair; the median of the pairs'
ratios does not mind a few bad seconds, and its quartiles say how far to trust it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed transfer."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Its speed."""
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work done by kvd and by the machine alone, one right after the other."""

    kvd: Sample
    floor: Sample

    @property
    def ratio(self) -> float:
        """Speed of kvd in units of the floor's: 1.0 is as fast as the machine."""
        return self.kvd.bytes_per_s / self.floor.bytes_per_s


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its quartiles."""

    low: float
    median: float
    high: float


def percentile(values: Sequence[float], fraction: float) -> float:
    """Value below which `fraction` of the values lie, interpolated between neighbours.

    Raises:
        ValueError: if there are no values.
    """
    if not values:
        raise ValueError("no values, no percentile")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of values."""
    return Spread(percentile(values, 0.25), percentile(values, 0.5), percentile(values, 0.75))


def growth(before: Sequence[float], after: Sequence[float]) -> Spread:
    """How many times larger `after` is, round by round: both were measured in every round."""
    return spread([later / earlier for earlier, later in zip(before, after, strict=True)])
