"""JSON streamed as it arrives: rewrites an object in one canonical form, piece by piece. Pure.

Text that was written is never taken back. However the object is spelled, the output is what
`json.dumps` would write, and a complete object is valid for every JSON parser:

    1. of two members with the same name the first one counts;
    2. half a surrogate pair is written as U+FFFD;
    3. values nested deeper than MAX_DEPTH, and numbers that parsers reject, are written as null.

Names, numbers and words are written when they are complete, strings as they arrive.
"""

import json
import math
import re
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_DEPTH = 64  # of nested objects and lists
MAX_DIGITS = 1024  # of a number
_BLANKS = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_WORDS = frozenset({"true", "false", "null"})
_NULL = "null"
_WHOLE = re.compile("-?[0-9]+")
_RUN = re.compile(r'[^"\\]+')
_ATOM = re.compile("[-+.0-9A-Za-z]+")
_SIGNS = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HALF = "\ufffd"


class _State(Enum):
    """What the parser expects next."""

    VALUE = auto()  # a value, or the end of an empty list
    NAME = auto()  # a member's name, or the end of an empty object
    COLON = auto()
    BEHIND = auto()  # behind a value: a comma, or a closing bracket
    TEXT = auto()
    ATOM = auto()  # a number or a word
    OVER = auto()


@dataclass
class _Level:
    """An object or a list that is open.

    Attributes:
        opening: its opening bracket.
        names: names of its members so far.
        is_empty: whether nothing of it was written.
    """

    opening: str
    names: set[str] = field(default_factory=set)
    is_empty: bool = True


class JsonStream:
    """Rewrites one object while it arrives; see the module docstring.

    Attributes:
        is_broken: whether the input was not JSON: nothing more is written.
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._state = _State.VALUE
        self._levels: list[_Level] = []
        self._muted = 0  # levels in and below which nothing is written; 0: none
        self._is_name = False  # whether the string is a member's name
        self._text = ""  # the name so far
        self._held = ""  # an incomplete atom or escape
        self._high = ""  # the first half of a surrogate pair
        self._out: list[str] = []
        self._length = 0
        self._safe = (0, "")

    @property
    def is_complete(self) -> bool:
        """Whether the object has ended."""
        return self._state is _State.OVER

    def push(self, text: str) -> tuple[str, int]:
        """Rewrite the next text.

        Returns:
            The text to write, and the number of characters read: all, unless the object has ended.
        """
        at = 0
        while at < len(text) and not (self.is_complete or self.is_broken):
            at = self._step(text, at)
        written = "".join(self._out)
        self._out.clear()
        return written, len(text) if self.is_broken else at

    @property
    def safe(self) -> tuple[int, str]:
        """Length of the complete part of all written text, and the text that would close it."""
        return self._safe

    def _step(self, text: str, at: int) -> int:
        """Read the next token or piece at an index; return the index behind it."""
        if self._state is _State.TEXT:
            return self._read_text(text, at)
        if self._state is _State.ATOM:
            found = _ATOM.match(text, at)
            if found:
                self._held += found[0]
                return found.end()
            self._end_atom()
            return at
        sign = text[at]
        if sign not in _BLANKS:
            self._read_sign(sign)
        return at + 1

    def _read_sign(self, sign: str) -> None:
        level = self._levels[-1] if self._levels else None
        if self._state is _State.COLON:
            self._move(_State.VALUE, is_right=sign == ":")
        elif level is None:
            self._open(sign) if sign == "{" else self._set_broken()
        elif sign == _CLOSING[level.opening] and (self._state is _State.BEHIND or level.is_empty):
            self._close()
        elif self._state is _State.BEHIND:
            following = _State.NAME if level.opening == "{" else _State.VALUE
            self._move(following, is_right=sign == ",")
        elif self._state is _State.NAME:
            self._is_name = True
            self._move(_State.TEXT, is_right=sign == '"')
        else:
            self._begin_value(sign, level)

    def _move(self, state: _State, *, is_right: bool) -> None:
        self._state = state
        if not is_right:
            self._set_broken()

    def _set_broken(self) -> None:
        self.is_broken = True

    # ---------------------------------------------------------------------------- values

    def _begin_value(self, sign: str, level: _Level) -> None:
        if level.opening == "[":
            if not level.is_empty:
                self._write(", ")
            level.is_empty = False
        if sign in _CLOSING:
            self._open(sign)
        elif sign == '"':
            self._write(sign)
            self._is_name, self._state = False, _State.TEXT
        elif _ATOM.match(sign):
            self._held, self._state = sign, _State.ATOM
        else:
            self._set_broken()

    def _open(self, sign: str) -> None:
        if len(self._levels) == MAX_DEPTH and not self._muted:
            self._write(_NULL)
            self._muted = len(self._levels) + 1
        self._write(sign)
        self._levels.append(_Level(sign))
        self._state = _State.NAME if sign == "{" else _State.VALUE
        self._mark_safe()

    def _close(self) -> None:
        level = self._levels.pop()
        self._write(_CLOSING[level.opening])
        if not self._levels:
            self._state = _State.OVER
            self._mark_safe()
            return
        self._end_value()

    def _end_value(self) -> None:
        self._state = _State.BEHIND
        if self._muted and len(self._levels) < self._muted:
            self._muted = 0
        self._mark_safe()

    def _end_atom(self) -> None:
        atom, self._held = self._held, ""
        if atom in _WORDS:
            self._write(atom)
        else:
            self._write(_number(atom))
        self._end_value()

    # ----------------------------------------------------------------------------- texts

    def _read_text(self, text: str, at: int) -> int:
        if self._held:
            return self._read_escape(text, at)
        found = _RUN.match(text, at)
        if found:
            self._append_text(found[0])
            return found.end()
        if text[at] == "\\":
            self._held = "\\"
        else:
            self._end_text()
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        self._held += text[at]
        if self._held[1] != "u":
            self._append_text(_SIGNS.get(self._held[1], _HALF))
            self._held = ""
        elif len(self._held) == len("\\u0000"):
            code, self._held = self._held[2:], ""
            self._append_code(int(code, 16) if re.fullmatch("[0-9a-fA-F]{4}", code) else 0xFFFD)
        return at + 1

    def _append_code(self, code: int) -> None:
        """Append a character by its code, or keep the first half of a surrogate pair."""
        if 0xDC00 <= code < 0xE000 and self._high:
            both = 0x10000 + (ord(self._high) - 0xD800) * 0x400 + code - 0xDC00
            self._high = ""
            self._append_text(chr(both))
        elif 0xD800 <= code < 0xDC00:
            self._append_text("")
            self._high = chr(code)
        else:
            self._append_text(_HALF if 0xDC00 <= code < 0xE000 else chr(code))

    def _append_text(self, text: str) -> None:
        if self._high:
            text, self._high = _HALF + text, ""
        if self._is_name:
            self._text += text
        else:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end_text(self) -> None:
        self._append_text("")
        if not self._is_name:
            self._write('"')
            self._end_value()
            return
        name, self._text = self._text, ""
        level = self._levels[-1]
        self._state = _State.COLON
        if name in level.names and not self._muted:
            self._muted = len(self._levels) + 1
            return
        separator = "" if level.is_empty else ", "
        level.is_empty = False
        level.names.add(name)
        self._write(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")

    # --------------------------------------------------------------------------- writing

    def _write(self, text: str) -> None:
        if not self._muted and text:
            self._out.append(text)
            self._length += len(text)

    def _mark_safe(self) -> None:
        """Record that the text written so far is complete, except for its closing brackets."""
        if not self._muted:
            closing = "".join(_CLOSING[level.opening] for level in reversed(self._levels))
            self._safe = self._length, closing


def close_object(text: str) -> str:
    """Complete the beginning of an object: with its complete members; "{}" if there are none.

    Args:
        text: what a JsonStream has written so far.
    """
    stream = JsonStream()
    written, _ = stream.push(text)
    length, closing = stream.safe
    return written[:length] + closing or "{}"


def is_beginning(text: str) -> bool:
    """Return whether a JsonStream may have written this text, with more to follow."""
    stream = JsonStream()
    return stream.push(text)[0] != "" and not (stream.is_complete or stream.is_broken)


def _number(written: str) -> str:
    """Write a number as `json.dumps` does; null if it is one that parsers reject."""
    if len(written) > MAX_DIGITS:
        return _NULL
    try:
        found = int(written) if _WHOLE.fullmatch(written) else float(written)
    except ValueError:
        return _NULL
    return repr(found) if math.isfinite(found) else _NULL
