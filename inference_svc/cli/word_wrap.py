"""Wraps text between words while it comes. Pure."""

import re

from rich.cells import cell_len

_PIECE = re.compile(r"\n|[^\S\n]+|\S+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal would obey, not show


class WordWrap:
    """One text on a terminal; a word is held back until its end is seen.

    What is wider than the terminal is given to it as it is: it breaks such words by itself.

    Args:
        width: columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""  # in front of the word that is held back
        self._word = ""

    def feed(self, text: str) -> str:
        """Take more of the text; returns what is to be shown now."""
        shown = []
        for piece in _PIECE.findall(_CONTROL.sub("", text)):
            if piece.isspace():
                shown.append(self._finish_word())
                if piece == "\n":
                    self._column, self._blanks = 0, ""
                    shown.append(piece)
                else:
                    self._blanks += piece.replace("\t", " ")
            else:
                self._word += piece
                if cell_len(self._word) >= self._width:  # there may be no blank at all
                    shown.append(self._finish_word())
        return "".join(shown)

    def end(self) -> str:
        """What was held back."""
        return self._finish_word()

    def _finish_word(self) -> str:
        if not self._word:
            return ""
        size, space = cell_len(self._word), cell_len(self._blanks)
        breaks = self._column and self._column + space + size > self._width
        shown = ("\n" if breaks else self._blanks) + self._word
        self._column = (0 if breaks else self._column + space) + size
        if self._column > self._width:
            self._column %= self._width
        self._blanks = self._word = ""
        return shown
