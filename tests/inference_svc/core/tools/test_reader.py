"""Answers as they are read: their parts, in order, and summed up."""

import pytest

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.formats import HERMES, Hermes
from inference_svc.core.tools.parts import Content
from inference_svc.core.tools.reader import MarkedReader, read_whole

CALL = '<tool_call>{"name": "a"}</tool_call>'
MADE = ToolCall("a", "{}")


def test_parts_come_in_their_order():
    """Texts that follow one another are one part."""
    reader = MarkedReader(HERMES, ("a",))
    assert reader.push(f"<b {CALL} {CALL}<tool_call>") == [Content("<b "), MADE, MADE]
    assert reader.push("?<tool_call>, not said") == [Content("<tool_call>?<tool_call>, not said")]
    assert reader.push(f"{CALL}\n") == [MADE]
    assert reader.end() == []


def test_blanks_beside_calls_are_nobodys_text():
    """But where there are no calls, or other text is beside them."""
    for text, content in (
        (f"\n {CALL}\n {CALL}\n", ""),
        (" \n", " \n"),
        (f"\n x\n{CALL}", "\n x\n"),
        (f"{CALL}\n x", "\n x"),
        ("", ""),
    ):
        assert read_whole(MarkedReader(HERMES, ("a",)), text).content == content


class Counting(Hermes):
    """Counts how much it reads."""

    num_read = 0

    def read(self, text, *, is_end):
        type(self).num_read += len(text)
        return super().read(text, is_end=is_end)


@pytest.mark.parametrize("item", ["1", '"b c\\\\ d"', '{"b": [{}]}', "[[]]"])
def test_a_long_call_is_not_read_again_with_each_piece(item):
    """What is read in all grows as the call does, and not with its square."""
    text = f'<tool_call>{{"name": "a", "arguments": {{"b": [{", ".join([item] * 4000)}]}}}}'
    Counting.num_read = 0
    reader = MarkedReader(Counting("a", ("<tool_call>",), marks=HERMES.marks), ("a",))
    assert all(reader.push(text[at : at + 3]) == [] for at in range(0, len(text), 3))
    assert len(reader.push("</tool_call>")) == 1
    assert Counting.num_read < 20 * len(text)


def test_what_is_no_call_is_out_soon():
    """Once so much more of it came as an eighth of what is held."""
    reader = MarkedReader(HERMES, ("a",))
    text = '<tool_call>{"name": ' + '"a", ' * 100
    said = "".join(part.text for character in text for part in reader.push(character))
    assert said == text[: len(said)]
    assert len(said) > len(text) - 11
