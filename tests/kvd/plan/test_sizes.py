"""Sizes, shares and lists on the command line."""

import pytest

from kvd.plan.arguments import shared_capacities, swept_capacities
from kvd.plan.figures import Capacity
from kvd.plan.sizes import (
    GB,
    BadOptionError,
    names_of,
    rate_of,
    share_of,
    sizes_of,
    ttl_of,
    turns_of,
)

KNOWN = ("lru", "fifo", "belady")


def test_all_sizes_are_combined():
    """HBM varies slowest, SSD fastest, in the given order."""
    found = swept_capacities("0", "8GB,4GB", "100GB, 50GB")
    sizes = [(each.dram_bytes // GB, each.ssd_bytes // GB) for each in found]
    assert sizes == [(8, 100), (8, 50), (4, 100), (4, 50)]
    assert swept_capacities("1GB", "2GB", "") == [Capacity(GB, 2 * GB, 0)]


def test_shares_are_of_the_footprint():
    """DRAM has its part of the share, SSD the rest."""
    found = shared_capacities("0", "50%,0.25", "1/4", 1000)
    assert found == [Capacity(0, 125, 375), Capacity(0, 62, 188)]


@pytest.mark.parametrize(
    ("text", "share"), [("20%", 0.2), ("0.2", 0.2), ("1/5", 0.2), ("1", 1.0), ("0", 0.0)]
)
def test_shares_have_three_forms(text, share):
    """Per cent, a number, a fraction."""
    assert share_of(text, "--watermark") == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "rate"), [("5GB/s", 5e9), ("5GB", 5e9), ("250 MB/s", 2.5e8), ("5 x", None), ("7", 7.0)]
)
def test_rates_are_decimal(text, rate):
    """Like bandwidths in data sheets."""
    if rate is None:
        with pytest.raises(BadOptionError):
            rate_of(text, "--ssd-bandwidth")
    else:
        assert rate_of(text, "--ssd-bandwidth") == rate


@pytest.mark.parametrize(("text", "turns"), [("10", 10), ("20%", 20), ("0.5", 50), ("0", 0)])
def test_a_warm_up_is_a_number_or_a_share(text, turns):
    """Of a hundred turns."""
    assert turns_of(text, "--warmup-turns", 100) == turns


@pytest.mark.parametrize(("text", "seconds"), [("1h", 3600.0), ("30s", 30.0), ("never", None)])
def test_a_ttl_may_be_never(text, seconds):
    """None keeps sessions."""
    assert ttl_of(text, "--ttl") == seconds


def test_policies_are_named_or_all():
    """Each once."""
    assert names_of("fifo, lru,fifo", KNOWN, "policy") == ["fifo", "lru"]
    assert names_of("all", KNOWN, "policy") == list(KNOWN)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: sizes_of("128GB,lots", "--dram"), "--dram: 'lots' is not a size"),
        (lambda: sizes_of(",", "--dram"), "--dram ',' is empty"),
        (lambda: sizes_of("-1GB", "--ssd"), "--ssd: '-1GB' is not a size"),
        (lambda: share_of("2x", "--watermark"), "--watermark '2x' is not a share"),
        (lambda: share_of("120%", "--watermark"), "--watermark '120%' is out of range"),
        (lambda: share_of("nan", "--watermark"), "--watermark 'nan' is out of range"),
        (lambda: share_of("1/0", "--watermark"), "--watermark '1/0' is not a share"),
        (lambda: rate_of("0GB/s", "--ssd-bandwidth"), "--ssd-bandwidth '0GB/s' is 0"),
        (lambda: turns_of("100", "--warmup-turns", 100), "leaves none of the 100 turns"),
        (lambda: turns_of("100%", "--warmup-turns", 100), "leaves none of the 100 turns"),
        (lambda: ttl_of("soon", "--ttl"), "--ttl: 'soon' is not a duration"),
        (lambda: ttl_of("0s", "--ttl"), "--ttl '0s' would keep nothing"),
        (
            lambda: names_of("lru,mru", KNOWN, "policy"),
            "there is no such policy: mru: give one or more of",
        ),
    ],
)
def test_invalid_values_are_reported(call, complaint):
    """One line: the option, the value, what to write instead."""
    with pytest.raises(BadOptionError) as raised:
        call()
    assert complaint in str(raised.value)
    assert (raised.value.exit_code, "\n" in str(raised.value)) == (2, False)
    assert raised.value.remedy
