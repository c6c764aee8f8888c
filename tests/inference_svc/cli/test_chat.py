"""Text that is wrapped while it comes."""

import pytest

from inference_svc.cli.chat import WordWrap

TEXT = "The quick brown fox jumps over the lazy dog.\n\nA second  paragraph follows it."


def wrapped(pieces, width):
    wrap = WordWrap(width)
    return "".join([*(wrap.feed(piece) for piece in pieces), wrap.end()])


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("width", [10, 20, 80])
def test_lines_break_between_words(size, width):
    """Wherever the pieces end; nothing but blanks is changed."""
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    shown = wrapped(pieces, width)
    assert shown.split() == TEXT.split()
    assert max(map(len, shown.split("\n"))) <= width
    assert shown == wrapped([TEXT], width)
    if width == 80:
        assert shown == TEXT


def test_a_word_that_is_too_long_is_left_to_the_terminal():
    """It is shown as soon as it fills a line: in some scripts there is no blank."""
    wrap = WordWrap(10)
    assert wrap.feed("a ") == "a"
    assert wrap.feed("x" * 12) == "\n" + "x" * 12
    assert wrap.feed(" yy zzzzz") == " yy"
    assert wrap.end() == "\nzzzzz"


def test_wide_characters_take_two_columns():
    """As a terminal shows them."""
    assert wrapped(["日本 日本 日本"], 10) == "日本 日本\n日本"


def test_what_a_terminal_would_obey_is_left_out():
    """An answer moves no cursor and rings no bell."""
    assert wrapped(["a\x1b[2J\x07b\tc\r"], 80) == "a[2Jb c"
