"""Non-negative least squares of a few unknowns, from their normal equations. Pure arithmetic.

Three unknowns do not need a library: all choices of those that are not zero are tried, which is
exact and takes tens of microseconds.
"""

from dataclasses import dataclass
from itertools import combinations

# Of a matrix with unit diagonal: below, terms cannot be told apart. With some twenty timings that
# vary by 5 %, a coefficient is then off by a third of its share of the time.
MIN_PIVOT = 0.001


@dataclass(frozen=True)
class Solution:
    """What fits best.

    Attributes:
        coefficients: one for each term, all ≥ 0.
        is_told_apart: whether the observations determine each of them.
    """

    coefficients: tuple[float, ...]
    is_told_apart: bool


def least_squares(matrix: list[list[float]], vector: list[float]) -> Solution:
    """The coefficients ≥ 0 that fit best, by trying all choices of those that are not zero.

    Exact for non-negative least squares, and cheap for three terms. Choices whose terms cannot be
    told apart are passed over.
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
    return Solution(tuple(best or [0.0] * size), is_told_apart=everything is not None)


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
