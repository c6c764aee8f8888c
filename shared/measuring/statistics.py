"""Medians, percentiles and quartiles, intervals and ratios of measurements. Pure.

Machines are noisy: neighbours, clock rates and disks change from second to second. So alternatives
are measured in turn, many times. The median is not affected by a few bad seconds, and its quartiles
say how far to trust it.

Shares and means have 95 % intervals. Transfers are compared in interleaved pairs.

*Source:* for shares, E. B. Wilson, "Probable inference, the law of succession, and statistical
inference" (1927): unlike the plain normal interval, it is right near 0 and 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and its quartiles."""

    low: float
    median: float
    high: float


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of the values lie, interpolated between neighbours.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values, no percentile")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles of values."""
    return Spread(percentile(values, 0.25), percentile(values, 0.5), percentile(values, 0.75))


Z = 1.959964  # 95 % of a normal distribution lie within this many standard deviations


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95 % interval."""

    low: float
    value: float
    high: float


def share(num_hits: int, num: int) -> Interval:
    """Return a share with Wilson's interval; without samples the interval is [0, 1]."""
    if not num:
        return Interval(0.0, 0.0, 1.0)
    value = num_hits / num
    centre = (value + Z * Z / (2 * num)) / (1 + Z * Z / num)
    half = Z / (1 + Z * Z / num) * math.sqrt(value * (1 - value) / num + Z * Z / (4 * num * num))
    return Interval(max(0.0, centre - half), value, min(1.0, centre + half))


def mean(values: Sequence[float]) -> Interval:
    """Return a mean with its normal interval, by the spread of the values; infinite for one."""
    num = len(values)
    value = math.fsum(values) / num
    if num == 1:
        return Interval(-math.inf, value, math.inf)
    variance = math.fsum((item - value) ** 2 for item in values) / (num - 1)
    half = Z * math.sqrt(variance / num)
    return Interval(value - half, value, value + half)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed transfer."""

    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Speed in bytes per second."""
        return self.num_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """The same work, done by kvd and by the machine alone, one right after the other."""

    kvd: Sample
    floor: Sample

    @property
    def ratio(self) -> float:
        """Speed of kvd relative to the floor's: 1.0 is as fast as the machine."""
        return self.kvd.bytes_per_s / self.floor.bytes_per_s


def growth(before: Sequence[float], after: Sequence[float]) -> Spread:
    """Return how many times larger `after` is, round by round. Both have the same rounds."""
    return spread([later / earlier for earlier, later in zip(before, after, strict=True)])
