"""Samples for `make test` of what `make test-long` runs in full.

Ids are the items' own names and a sample depends on the seed alone: pytest-xdist demands that every
worker collects the same tests in the same order.
"""

from collections.abc import Collection, Sequence
from random import Random
from typing import Any

import pytest


def sampled(items: Sequence[str], count: int, seed: int, always: Collection[str] = ()) -> list[Any]:
    """Make the items parameters of a test, all but a sample of them marked `long`.

    Args:
        items: names, each of which becomes a test's argument and its id; in an order that is the
            same in every process.
        count: how many are not long, `always` included.
        seed: another seed is another sample.
        always: those of the items that are never long; names that are not among them are passed
            over, as a model that an older library does not have.
    """
    chosen = {item for item in items if item in always}
    others = [item for item in items if item not in chosen]
    missing = min(max(0, count - len(chosen)), len(others))
    chosen.update(Random(seed).sample(others, missing))  # noqa: S311 - a choice, not a secret
    return [
        pytest.param(item, id=item, marks=() if item in chosen else pytest.mark.long)
        for item in items
    ]
