"""The paper's numbers are consistent where its text requires it."""

from collections.abc import Iterator, Mapping

import pytest

from kvd.plan.paper import numbers
from kvd.plan.paper.numbers import CA, LARGE, LRU, PAPER, PAPER_MODELS, PREPRINT, SMALL, Stated
from kvd.plan.prices import Prices, cost_of


def _storage_of_gpus(model: str) -> float:
    """Return the tiers' cost as a share of the GPUs', for the same hours."""
    cost = cost_of(
        Prices(),
        num_gpus=numbers.NUM_GPUS[model],
        gpu_hours=1,
        storage_hours=1,
        dram_bytes=numbers.BILLED_DRAM_BYTES,
        ssd_bytes=numbers.BILLED_SSD_BYTES,
    )
    return (cost.dram + cost.ssd) / cost.gpu


def _all_stated(value: object = None) -> Iterator[Stated]:
    if isinstance(value, Stated):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _all_stated(item)


@pytest.mark.parametrize("model", PAPER_MODELS)
def test_the_share_of_storage_follows_from_the_prices(model: str) -> None:
    """§4.2: 16.4 % with two GPUs, 9.0 % with four, if 10 TB are 10,240 GB."""
    share = _storage_of_gpus(model)
    expected = 100 * share / (1 + share)
    for by in (PAPER, PREPRINT):
        assert numbers.STORAGE_SHARE[by][model].value == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("model", PAPER_MODELS)
@pytest.mark.parametrize("by", [PAPER, PREPRINT])
def test_savings_follow_from_speedups(by: str, model: str) -> None:
    """Cost is GPU time and storage for that time, so Figure 17 follows from Figure 16."""
    speedup = numbers.GPU_SPEEDUP[by][model].value
    expected = 100 * (1 - (1 + _storage_of_gpus(model)) / speedup)
    assert numbers.COST_SAVING[by][model].value == pytest.approx(expected, abs=1.5)


@pytest.mark.parametrize("by", [PAPER, PREPRINT])
def test_figures_that_show_the_same_replay_agree(by: str) -> None:
    """CA with all tiers is in Figures 13, 21 and 24."""
    assert {model: stated.value for model, stated in numbers.HIT_RATE[by].items()} == {
        model: stated.value
        for model, stated in numbers.MEDIA_HIT_RATE[by][numbers.ALL_TIERS].items()
    }
    assert numbers.POLICY_HIT_RATE[by][CA, LARGE].value == numbers.HIT_RATE[by]["llama-13b"].value
    share = numbers.POLICY_DRAM_RATE[by][CA, LARGE].value
    assert 0.99 * numbers.POLICY_HIT_RATE[by][CA, LARGE].value < share


@pytest.mark.parametrize(("by", "over_lru", "over_fifo"), [(PAPER, 27, 31), (PREPRINT, 22, 18)])
def test_derived_hit_rates(by: str, over_lru: float, over_fifo: float) -> None:
    """CA's rate with 2 TB is given only as points above LRU and above FIFO."""
    stated = numbers.POLICY_HIT_RATE[by]
    assert stated[CA, SMALL].value == pytest.approx(stated[LRU, SMALL].value + over_lru, abs=1)
    assert stated[CA, SMALL].value == pytest.approx(
        stated[numbers.FIFO, SMALL].value + over_fifo, abs=1
    )


def test_each_number_has_its_source() -> None:
    """A section and a figure of a document."""
    stated = list(_all_stated(vars(numbers)))
    assert len(stated) > 90
    for number in stated:
        assert number.by in {PAPER, PREPRINT}
        assert number.where.startswith(("§4.", "Abstract"))
