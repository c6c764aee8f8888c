"""What is logged of callers that were turned away."""

from shared.process.log import LineAllowance


def test_a_flood_has_so_many_lines_a_second():
    """The next line says how many had none; nobody pays for another's flood."""
    now_s = [5.0]
    allowance = LineAllowance(2, lambda: now_s[0])
    assert [allowance.take("loud") for _ in range(5)] == [0, 0, None, None, None]
    assert allowance.take("quiet") == 0
    now_s[0] += 1.0
    assert [allowance.take("loud") for _ in range(3)] == [3, 0, None]
