"""Prices, and the cost of a replay."""

from pathlib import Path

import pytest

from kvd.plan.prices import BadPricesError, Prices, cost_of, read_prices
from kvd.plan.sizes import GB


@pytest.mark.parametrize(("num_gpus", "share"), [(2, 0.164), (4, 0.090)])
def test_storage_has_the_papers_share_of_the_cost(num_gpus, share):
    """128 GB and 10 TB: 16.4 % of the cost on two GPUs, 9.0 % on four (§4.2, a TB of 1,024 GB)."""
    cost = cost_of(
        Prices(),
        num_gpus=num_gpus,
        gpu_hours=6.25,
        storage_hours=6.25,
        dram_bytes=128 * GB,
        ssd_bytes=10 * 1024 * GB,
    )
    assert cost.storage_share == pytest.approx(share, abs=0.0006)
    assert cost.total == cost.gpu + cost.dram + cost.ssd
    assert cost.gpu == num_gpus * 5 * 6.25


def test_without_prices_the_cost_is_zero():
    """Free GPUs and no tiers have no share of anything."""
    cost = cost_of(
        Prices(gpu=0), num_gpus=1, gpu_hours=1, storage_hours=1, dram_bytes=0, ssd_bytes=0
    )
    assert (cost.total, cost.storage_share) == (0, 0)


def test_omitted_prices_are_the_papers(tmp_path: Path):
    """A file has the differences only."""
    path = tmp_path / "prices.toml"
    path.write_text("gpu = 2\nssd_gb = 0.0001\n", encoding="utf-8")
    assert read_prices(path) == Prices(gpu=2.0, dram_gb=0.0088, ssd_gb=0.0001)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpu = -1", "gpu = -1 is not a price"),
        ("gpu = true", "gpu = True is not a price"),
        ("gpu = nan", "gpu = nan is not a price"),
        ("cpu = 1", "there is no price named cpu"),
        ("gpu == 1", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text, complaint):
    """One line that lists the known prices."""
    path = tmp_path / "prices.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadPricesError) as raised:
        read_prices(path)
    assert complaint in str(raised.value)
    assert "gpu, dram_gb, ssd_gb" in str(raised.value)
    with pytest.raises(BadPricesError, match="cannot be read"):
        read_prices(tmp_path / "none.toml")
