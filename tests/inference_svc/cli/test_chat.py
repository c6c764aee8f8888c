"""`inference-svc chat`: text wrapped while it streams, its options, and its notes."""

import json

import pytest

from inference_svc.cli.chat import WordWrap, describe, template_arguments
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import InvalidInputError

TEXT = "The quick brown fox jumps over the lazy dog.\n\nA second  paragraph follows it."


def wrap_pieces(pieces, width):
    wrap = WordWrap(width)
    return "".join([*(wrap.feed(piece) for piece in pieces), wrap.end()])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("width", [10, 20, 80])
def test_lines_break_between_words(size, width):
    """Wherever the pieces end; only blanks are changed."""
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    shown = wrap_pieces(pieces, width)
    assert shown.split() == TEXT.split()
    assert max(map(len, shown.split("\n"))) <= width
    assert shown == wrap_pieces([TEXT], width)
    if width == 80:
        assert shown == TEXT


def test_a_word_that_is_too_long_is_left_to_the_terminal():
    """It is shown as soon as it fills a line: some scripts have no blanks."""
    wrap = WordWrap(10)
    assert wrap.feed("a ") == "a"
    assert wrap.feed("x" * 12) == "\n" + "x" * 12
    assert wrap.feed(" yy zzzzz") == " yy"
    assert wrap.end() == "\nzzzzz"


def test_wide_characters_take_two_columns():
    """As a terminal shows them."""
    assert wrap_pieces(["日本 日本 日本"], 10) == "日本 日本\n日本"


def test_control_characters_are_left_out():
    """An answer moves no cursor and rings no bell."""
    assert wrap_pieces(["a\x1b[2J\x07b\tc\r"], 80) == "a[2Jb c"


def test_template_arguments_are_json_or_text():
    """The later of two with one name counts."""
    given = [
        "enable_thinking=false",
        "effort=high",
        'tags=["a=b"]',
        "effort=low",
        "none=",
        "x=null",
    ]
    assert json.loads(template_arguments(given)) == {
        "enable_thinking": False,
        "effort": "low",
        "tags": ["a=b"],
        "none": "",
        "x": None,
    }
    assert template_arguments([]) == ""


@pytest.mark.parametrize("given", ["enable_thinking", "=false", ""])
def test_a_template_argument_has_a_name_and_a_value(given):
    with pytest.raises(InvalidInputError, match="NAME=JSON"):
        template_arguments(["a=1", given])


def test_accepted_drafts_are_mentioned():
    """With the saved share of an answer's steps."""
    usage = pb.Usage(drafted_tokens=12, accepted_tokens=9)
    assert "9 of 12 drafted were right" in describe(usage)
    assert "drafted" not in describe(pb.Usage(drafted_tokens=3))
