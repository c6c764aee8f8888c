"""Transfers in interleaved pairs, and their ratios. Pure; see shared/types/statistics.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.types.statistics import Spread, spread


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


def growth(before: Sequence[float], after: Sequence[float]) -> Spread:
    """How many times larger `after` is, round by round: both were measured in every round."""
    return spread([later / earlier for earlier, later in zip(before, after, strict=True)])
