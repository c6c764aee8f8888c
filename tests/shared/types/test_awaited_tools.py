"""Names of awaited tools: few, short, printable, unique."""

import pytest

from shared.types.awaited_tools import (
    MAX_AWAITED_TOOLS,
    MAX_TOOL_NAME,
    InvalidToolNamesError,
    awaited_tools,
    possible_tools,
)

LONGEST = "n" * MAX_TOOL_NAME
MOST = [f"tool-{number}" for number in range(MAX_AWAITED_TOOLS)]


def test_names_are_unique_and_in_order():
    assert awaited_tools(["b", "a", "b"]) == ("b", "a")
    assert awaited_tools(MOST + MOST) == tuple(MOST)
    assert awaited_tools([LONGEST, "Werkzeug äöü 道具"]) == (LONGEST, "Werkzeug äöü 道具")
    assert awaited_tools([]) == ()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([""], "'' is not a valid name of a tool"),
        ([LONGEST + "n"], "1 to 128 printable"),
        (["a\x1b[2J"], r"'a\\x1b\[2J'"),
        ([*MOST, "one more"], "33 different tools are awaited, which is too many: name at most 32"),
    ],
)
def test_invalid_names_are_refused_in_one_line(names, told):
    with pytest.raises(InvalidToolNamesError, match=told) as refused:
        awaited_tools(names)
    assert "\n" not in str(refused.value)


def test_invalid_names_of_a_model_are_dropped():
    """It is a hint: nothing is refused."""
    assert possible_tools(["", LONGEST + "n", "\n", "b", "a", "b"]) == ("b", "a")
    assert possible_tools([*MOST, "one more"]) == tuple(MOST)
