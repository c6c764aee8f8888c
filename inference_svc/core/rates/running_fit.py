"""How long work takes, as a sum of terms: `seconds ≈ Σ coefficient · term`, learnt while running.

A least-squares fit of *relative* errors (a decode of 2 ms counts as much as a prefill of 2 s), with
coefficients ≥ 0. It has to cope with the timings of a busy machine:

- **A stall** (one step that is ten times slower) is ignored. Observations are grouped by the bit
  lengths of their terms: within a group each term, and so the time, varies less than twofold. An
  observation that differs from its group's median by more than STRANGE is not used.
- **Long stretches of one kind** (a thousand decodes) do not displace the others. The weight of an
  observation halves every HALF_LIFE observations, but a group keeps at least GROUP_WEIGHT, because
  a new decode says nothing about prefill.
- **A lasting change** is followed: a small one because old observations fade. After a large one,
  with RUN strange observations in a row, all older observations are scaled by the median ratio of
  these.

Pure; an observation costs microseconds, an estimate some tens of them after a new observation. All
steps are observed and few are followed by an estimate, so sums are computed for estimates only.
Three unknowns do not need a library: `least_squares` is exact by trying all choices.

*Source:* exponential forgetting: Ljung, System Identification, §11.2; robustness by medians:
Huber, Robust Statistics, §4.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import exp2
from statistics import median, median_low

# Least pivot of a matrix with unit diagonal; below it terms cannot be told apart. With some twenty
# timings that vary by 5 %, a coefficient is then off by a third of its share of the time.
MIN_PIVOT = 0.001


@dataclass(frozen=True)
class Solution:
    """The coefficients that fit best.

    Attributes:
        coefficients: one for each term, all ≥ 0.
        is_determined: whether the observations determine each of them.
    """

    coefficients: tuple[float, ...]
    is_determined: bool


def least_squares(matrix: list[list[float]], vector: list[float]) -> Solution:
    """Find the coefficients ≥ 0 that fit best, by trying all choices of which are not zero.

    This is exact for non-negative least squares, and cheap for three terms. Choices whose terms
    cannot be told apart are skipped.

    Args:
        matrix: left side of the normal equations, symmetric [terms, terms].
        vector: right side [terms].
    """
    size = len(vector)
    everything = _solve_linear(matrix, vector, tuple(range(size)))
    best, best_gain = everything, 0.0
    if everything is None or min(everything) < 0:
        best = None
        for count in range(size - 1, 0, -1):
            for chosen in combinations(range(size), count):
                found = _solve_linear(matrix, vector, chosen)
                if found is None or min(found) < 0:
                    continue
                gain = sum(c * v for c, v in zip(found, vector, strict=True))  # in squared error
                if gain > best_gain * (1 + 1e-9):  # of equals the one with more terms
                    best, best_gain = found, gain
    return Solution(tuple(best or [0.0] * size), is_determined=everything is not None)


def _solve_linear(
    matrix: list[list[float]], vector: list[float], chosen: tuple[int, ...]
) -> list[float] | None:
    """Solve for the chosen unknowns (others 0) by elimination; None if nearly singular.

    The matrix is symmetric and positive, so no pivoting is needed once its diagonal is scaled to 1;
    a pivot is then the share of a term that the terms before it do not explain.
    """
    if any(matrix[i][i] <= 0 for i in chosen):
        return None
    scale = [matrix[i][i] ** -0.5 for i in chosen]
    rows = [
        [matrix[i][j] * scale[a] * scale[b] for b, j in enumerate(chosen)] + [vector[i] * scale[a]]
        for a, i in enumerate(chosen)
    ]
    for k, pivot_row in enumerate(rows):
        if pivot_row[k] < MIN_PIVOT:
            return None
        for row in rows[k + 1 :]:
            ratio = row[k] / pivot_row[k]
            row[k:] = [
                value - ratio * other for value, other in zip(row[k:], pivot_row[k:], strict=True)
            ]
    coefficients = [0.0] * len(vector)
    for k in range(len(chosen) - 1, -1, -1):
        known = sum(
            rows[k][b] * coefficients[chosen[b]] / scale[b] for b in range(k + 1, len(chosen))
        )
        coefficients[chosen[k]] = (rows[k][-1] - known) / rows[k][k] * scale[k]
    return coefficients


MIN_OBSERVATIONS = 3
GROUP_LENGTH = 9  # observations kept of a group; a lasting change is its majority after five
MAX_GROUPS = 32  # beyond, the least recently used group is dropped; a service has about twenty
HALF_LIFE = 16.0  # observations; some forty of them count, enough to average noise out
GROUP_WEIGHT = 0.25  # least weight of a group without new observations, in observations
STRANGE = 3.0  # ratio to the group's median; shapes explain 2, the rest is the machine's noise
RUN = 5  # strange observations in a row that are taken for a lasting change


@dataclass
class _Observation:
    """A timing of one piece of work; `number` counts all observations."""

    number: int
    terms: tuple[int, ...]
    seconds: float


@dataclass
class _Group:
    """Observations of similar work, with their part of the normal equations.

    Attributes:
        is_summed: whether the sums below are those of the observations.
    """

    observations: deque[_Observation] = field(default_factory=lambda: deque(maxlen=GROUP_LENGTH))
    is_summed: bool = False
    matrix: list[list[float]] = field(default_factory=list)
    vector: list[float] = field(default_factory=list)
    weight: float = 0.0

    @property
    def is_confirmed(self) -> bool:
        """Whether it has enough observations to judge whether the next one is strange."""
        return len(self.observations) >= MIN_OBSERVATIONS

    @property
    def newest(self) -> int:
        """Number of the newest observation."""
        return self.observations[-1].number

    def usual_s(self) -> float:
        """Return the median time in seconds."""
        return median_low(observation.seconds for observation in self.observations)

    def add_up(self) -> None:
        """Compute the sums again if they have changed, weighted as of the newest observation."""
        if self.is_summed:
            return
        self.is_summed = True
        usual_s = self.usual_s()
        size = len(self.observations[-1].terms)
        self.matrix = [[0.0] * size for _ in range(size)]
        self.vector = [0.0] * size
        self.weight = 0.0
        for observation in self.observations:
            if _is_strange(observation.seconds / usual_s):
                continue
            weight = exp2((observation.number - self.newest) / HALF_LIFE)
            self.weight += weight
            weight /= usual_s * usual_s  # relative errors
            for i, term in enumerate(observation.terms):
                self.vector[i] += weight * term * observation.seconds
                for j, other in enumerate(observation.terms):
                    self.matrix[i][j] += weight * term * other

    def factor(self, number: int) -> float:
        """Return the weight of the sums once `number` observations were recorded in total."""
        return max(exp2((self.newest - number) / HALF_LIFE), GROUP_WEIGHT / self.weight)


class RunningFit:
    """Running estimates of the seconds that work takes, by its terms.

    Args:
        num_terms: number of terms that describe a piece of work; a constant is a term that is 1.
    """

    def __init__(self, num_terms: int) -> None:
        self._num_terms = num_terms
        # Least recently updated first.
        self._groups: OrderedDict[tuple[int, ...], _Group] = OrderedDict()
        self._number = 0
        self._strange: list[tuple[int, float]] = []  # numbers and ratios, in a row
        self._solution: Solution | None = None

    def note(self, terms: Sequence[int], seconds: float) -> None:
        """Record how many seconds work with these terms (non-negative integers) took."""
        seconds = max(seconds, 1e-9)  # a clock may stand still
        key = _group_key(terms)
        group = self._groups.pop(key, None) or _Group()
        self._notice_change(group, seconds)
        self._number += 1
        group.observations.append(_Observation(self._number, tuple(terms), seconds))
        group.is_summed = False
        self._groups[key] = group
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        self._solution = None

    def seconds(self, terms: Sequence[int]) -> float | None:
        """Estimate how many seconds work with these terms takes.

        None while fewer than MIN_OBSERVATIONS were recorded. Also None for work unlike all of them,
        while they are too similar to determine every coefficient.
        """
        solution = self._solve()
        if solution is None:
            return None
        if not solution.is_determined and _group_key(terms) not in self._groups:
            return None
        return sum(c * term for c, term in zip(solution.coefficients, terms, strict=True))

    def coefficients(self) -> tuple[float, ...] | None:
        """Return the seconds per unit of each term; None while they are not determined."""
        solution = self._solve()
        return solution.coefficients if solution and solution.is_determined else None

    def _notice_change(self, group: _Group, seconds: float) -> None:
        """Scale all observations if the machine's speed has changed for good."""
        if not group.is_confirmed:
            return  # nothing to compare with
        ratio = seconds / group.usual_s()
        if not _is_strange(ratio):
            self._strange.clear()
            return
        self._strange.append((self._number + 1, ratio))
        if len(self._strange) < RUN:
            return
        first, change = self._strange[0][0], median(ratio for _, ratio in self._strange)
        self._strange.clear()
        for known in [*self._groups.values(), group]:
            for observation in known.observations:
                if observation.number < first:
                    observation.seconds *= change
            known.is_summed = False

    def _solve(self) -> Solution | None:
        if self._number < MIN_OBSERVATIONS:
            return None
        if self._solution is None:
            size = range(self._num_terms)
            for group in self._groups.values():
                group.add_up()
            groups = [(group, group.factor(self._number)) for group in self._groups.values()]
            matrix = [[sum(f * g.matrix[i][j] for g, f in groups) for j in size] for i in size]
            vector = [sum(f * g.vector[i] for g, f in groups) for i in size]
            self._solution = least_squares(matrix, vector)
        return self._solution


def _group_key(terms: Sequence[int]) -> tuple[int, ...]:
    return tuple(term.bit_length() for term in terms)


def _is_strange(ratio: float) -> bool:
    return not 1 / STRANGE < ratio < STRANGE
