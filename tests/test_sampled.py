"""Samples: the same in every process, and never without what is always in."""

import subprocess
import sys

from tests.sampled import sampled

NAMES = [f"item-{index}" for index in range(40)]


def short(params):
    """Return ids of what `make test` runs."""
    return [param.id for param in params if not param.marks]


def test_a_sample_has_its_size_and_keeps_the_order():
    """As many as asked for are not long, everything is there, in the order of the items."""
    params = sampled(NAMES, 7, seed=1)
    assert [param.id for param in params] == NAMES
    assert len(short(params)) == 7
    assert short(params) == [name for name in NAMES if name in short(params)]


def test_what_is_always_in_counts():
    """Names that are always in are part of the sample; unknown ones are passed over."""
    chosen = short(sampled(NAMES, 3, seed=1, always=("item-5", "item-39", "no-such-item")))
    assert {"item-5", "item-39"} < set(chosen)
    assert len(chosen) == 3
    assert len(short(sampled(NAMES, 1, seed=1, always=NAMES[:4]))) == 4


def test_a_sample_may_ask_for_more_than_there_is():
    """Then nothing is long."""
    assert short(sampled(NAMES, 400, seed=1)) == NAMES


def test_seeds_choose():
    """Another seed is another sample, the same seed the same."""
    assert short(sampled(NAMES, 7, seed=1)) == short(sampled(NAMES, 7, seed=1))
    assert short(sampled(NAMES, 7, seed=1)) != short(sampled(NAMES, 7, seed=2))


def test_another_process_collects_the_same():
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
