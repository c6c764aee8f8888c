"""Figures with 95 % intervals. Pure.

*Source:* for shares, E. B. Wilson, "Probable inference, the law of succession, and statistical
inference" (1927): unlike the plain normal interval it is right near 0 and 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964  # 95 % of a normal distribution are within so many standard deviations


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure, and between what it lies with a probability of 95 %."""

    low: float
    value: float
    high: float


def share(num_hits: int, num: int) -> Interval:
    """Wilson's interval of a share; of nothing, anything is possible."""
    if not num:
        return Interval(0.0, 0.0, 1.0)
    value = num_hits / num
    centre = (value + Z * Z / (2 * num)) / (1 + Z * Z / num)
    half = Z / (1 + Z * Z / num) * math.sqrt(value * (1 - value) / num + Z * Z / (4 * num * num))
    return Interval(max(0.0, centre - half), value, min(1.0, centre + half))


def mean(values: Sequence[float]) -> Interval:
    """A mean and its normal interval, from the values' own spread; one value has none."""
    num = len(values)
    value = math.fsum(values) / num
    if num == 1:
        return Interval(-math.inf, value, math.inf)
    variance = math.fsum((each - value) ** 2 for each in values) / (num - 1)
    half = Z * math.sqrt(variance / num)
    return Interval(value - half, value, value + half)
