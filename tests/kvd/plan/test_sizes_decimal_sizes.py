"""The notation of sizes in plans."""

import pytest

from kvd.plan.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("128GB", 128 * 10**9),
        ("10 tb", 10**13),
        ("0.78MB", 780_000),
        ("2.5e9", 2_500_000_000),
        ("780000", 780_000),
        ("320k", 320_000),
        ("64GiB", 64 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("0", 0),
    ],
)
def test_sizes_are_decimal_unless_stated_otherwise(text, num_bytes):
    """As in the paper, and in data sheets of disks."""
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1iB", "nan", "1e999GB", "1 2GB"])
def test_invalid_sizes_are_refused(text):
    """The message explains the notation."""
    with pytest.raises(ValueError, match="write a number with KB, MB, GB or TB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (780_000, "780 KB"),
        (999_600, "1 MB"),
        (128e9, "128 GB"),
        (1.5e12, "1.5 TB"),
        (9e17, "900 PB"),
    ],
)
def test_sizes_are_written_with_three_digits(num_bytes, text):
    """Reading them back gives the same, to that many digits."""
    assert format_size(num_bytes) == text
