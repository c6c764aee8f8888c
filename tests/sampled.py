"""Samples for `make test` of what `make test-long` runs in full.

Ids are the items' own names and a sample depends on the seed alone: pytest-xdist demands that every
worker collects the same tests in the same order.
"""

from collections.abc import Collection, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
from hypothesis import settings

SHARE = 5  # of the examples, one of so many is tried by `make test`


def sampled(items: Sequence[str], count: int, seed: int, always: Collection[str] = ()) -> list[Any]:
    """Return the items as a test's parameters, all but a sample of them marked `long`.

    Args:
        items: names, each of which becomes a test's argument and its id; in an order that is the
            same in every process.
        count: size of the sample, `always` included.
        seed: a different seed gives a different sample.
        always: items that are always in the sample; names that are not items are ignored, such
            as a model that an older library lacks.
    """
    chosen = {item for item in items if item in always}
    others = [item for item in items if item not in chosen]
    missing = min(max(0, count - len(chosen)), len(others))
    chosen.update(Random(seed).sample(others, missing))  # noqa: S311 - a choice, not a secret
    return [
        pytest.param(item, id=item, marks=() if item in chosen else pytest.mark.long)
        for item in items
    ]


def sampled_cases(*axes: Sequence[Any], count: int, seed: int) -> list[Any]:
    """Return all combinations of values as a test's parameters, all but a sample marked `long`.

    The sample has every value of every axis and, as far as its size allows, every pair of values.

    Args:
        axes: the values of one argument each, in an order that is the same in every process.
        count: size of the sample; at least the length of the longest axis.
        seed: a different seed gives a different sample.
    """
    assert count >= max(map(len, axes)), "not every value would be tried"
    cases = list(product(*map(enumerate, axes)))
    places = [list(enumerate(place for place, _ in case)) for case in cases]
    left = Random(seed).sample(range(len(cases)), len(cases))  # noqa: S311 - a choice, not a secret
    chosen: set[int] = set()
    seen: set[Any] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda number: _new(places[number], seen))
        left.remove(best)
        chosen.add(best)
        seen.update(places[best], combinations(places[best], 2))
    return [
        pytest.param(
            *(value for _, value in case), marks=() if number in chosen else pytest.mark.long
        )
        for number, case in enumerate(cases)
    ]


def _new(places: Sequence[Any], seen: Collection[Any]) -> tuple[int, int]:
    """Return how many of a case's values, and of its pairs of values, are not in the sample yet."""
    return (
        sum(place not in seen for place in places),
        sum(pair not in seen for pair in combinations(places, 2)),
    )


def examples(num_examples: int) -> int:
    """Return the number of examples that Hypothesis draws: all, or for `make test` a fifth."""
    return -(-num_examples // SHARE) if settings().derandomize else num_examples
