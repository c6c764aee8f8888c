"""Samples are the same in every process, and contain every item that is always included."""

import subprocess
import sys
from itertools import product

import pytest
from hypothesis import settings

from tests.sampled import examples, sampled, sampled_cases

NAMES = [f"item-{index}" for index in range(40)]


def short(params):
    """Return ids of what `make test` runs."""
    return [param.id for param in params if not param.marks]


def test_a_sample_has_its_size_and_keeps_the_order():
    """The sample has the requested size, every item is returned, in the order of the items."""
    params = sampled(NAMES, 7, seed=1)
    assert [param.id for param in params] == NAMES
    assert len(short(params)) == 7
    assert short(params) == [name for name in NAMES if name in short(params)]


def test_items_that_are_always_included_count_towards_the_size():
    """Items that are always included are part of the sample; unknown names are ignored."""
    chosen = short(sampled(NAMES, 3, seed=1, always=("item-5", "item-39", "no-such-item")))
    assert {"item-5", "item-39"} < set(chosen)
    assert len(chosen) == 3
    assert len(short(sampled(NAMES, 1, seed=1, always=NAMES[:4]))) == 4


def test_a_sample_may_be_larger_than_the_items():
    """Then no item is marked long."""
    assert short(sampled(NAMES, 400, seed=1)) == NAMES


def test_the_seed_determines_the_sample():
    """A different seed gives a different sample, the same seed the same."""
    assert short(sampled(NAMES, 7, seed=1)) == short(sampled(NAMES, 7, seed=1))
    assert short(sampled(NAMES, 7, seed=1)) != short(sampled(NAMES, 7, seed=2))


def test_every_process_collects_the_same_sample():
    """Workers of pytest-xdist, whose hashes differ, have the same tests in the same order."""
    program = (
        "from tests.sampled import sampled; from tests.test_sampled import NAMES, short;"
        "print(short(sampled(NAMES, 7, seed=1)))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert printed == [str(short(sampled(NAMES, 7, seed=1)))] * 2


AXES = (list("abcde"), [1, 2, 3], [True, False])


def test_a_sample_of_cases_has_every_value():
    """Each combination appears once, and the sample has the requested size."""
    params = sampled_cases(*AXES, count=6, seed=1)
    assert [param.values for param in params] == list(product(*AXES))
    chosen = [param.values for param in params if not param.marks]
    assert len(chosen) == 6
    assert [set(values) for values in zip(*chosen, strict=True)] == list(map(set, AXES))


def test_a_larger_sample_of_cases_has_every_pair_of_values():
    """It has every pair of values as far as its size allows."""
    chosen = [p.values for p in sampled_cases(*AXES, count=18, seed=1) if not p.marks]
    assert {case[:2] for case in chosen} == set(product(*AXES[:2]))
    assert {case[1:] for case in chosen} == set(product(*AXES[1:]))


def test_a_sample_of_cases_that_is_too_small_is_an_error():
    """It is an error rather than a sample without one of the values."""
    with pytest.raises(AssertionError, match="not every value"):
        sampled_cases(*AXES, count=4, seed=1)


@pytest.mark.parametrize(("is_seeded", "num_examples"), [(True, 20), (False, 100)])
def test_make_test_draws_a_fifth_of_the_examples(is_seeded, num_examples):
    """The profile tells which run it is: see tests/conftest.py."""
    before = settings.get_current_profile_name()
    settings.load_profile("seeded" if is_seeded else "random")
    try:
        assert examples(100) == num_examples
    finally:
        settings.load_profile(before)
