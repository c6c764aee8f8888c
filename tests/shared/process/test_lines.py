"""Log lines about refused callers."""

from shared.process.log import LineAllowance


def test_a_flood_is_limited_to_some_lines_per_second():
    """The next line has the number of omitted ones; each kind has its own limit."""
    now_s = [5.0]
    allowance = LineAllowance(2, lambda: now_s[0])
    assert [allowance.take("loud") for _ in range(5)] == [0, 0, None, None, None]
    assert allowance.take("quiet") == 0
    now_s[0] += 1.0
    assert [allowance.take("loud") for _ in range(3)] == [3, 0, None]
