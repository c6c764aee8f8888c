"""Bytes and durations, written and read."""

import pytest

from shared.types.units import format_duration, parse_bytes, parse_duration_s


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0123, "12 ms"),
        (0.9996, "1 s"),
        (2.5, "2.5 s"),
        (59.96, "1m"),
        (507.0, "8m27s"),
        (3599.6, "1h"),
        (5400.0, "1h30m"),
        (84700.0, "23h32m"),
        (86399.0, "1d"),
        (601200.0, "6d23h"),
        (604800.0, "7d"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    """Rounding never shows a wrong unit, as 60 s or 24h; and the text can be parsed again."""
    assert format_duration(seconds) == text
    assert parse_duration_s(text) == pytest.approx(seconds, rel=0.03, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h30m", 5400.0), ("6D 23H", 601200.0), ("1m0.5s", 60.5), ("12", 12.0)]
)
def test_durations_of_several_units_are_parsed(text, seconds):
    """With or without blanks; a number alone is seconds."""
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["1h30", "1h30mx", "h", "-1h", "", "9" * 400, "1m" + "9" * 400 + "s", "٣s"]
)
def test_what_is_no_duration_is_refused(text):
    """Also if it begins as one."""
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_s(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "GB", "٣GB", "-1", "1e9", "nan", ""])
def test_what_is_no_size_is_refused(text):
    """Also one that no number holds."""
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)
