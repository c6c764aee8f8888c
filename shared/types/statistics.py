"""Medians, percentiles and quartiles, for the benches of both processes. Pure.

Machines are noisy: neighbours, clock rates and disks change from second to second. What is compared
is therefore measured in turn, many times; the median does not mind a few bad seconds, and its
quartiles say how far to trust it.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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
