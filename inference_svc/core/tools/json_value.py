"""JSON values in an answer that may be incomplete, and the calls made from them. Pure."""

import json
import re
from collections.abc import Mapping
from json import JSONDecodeError
from typing import Any, NamedTuple

from inference_svc.core.chat import ToolCall

_NEAR_END = 8  # characters: an incomplete number, word or escape fails within these
_BLANKS = " \t\r\n"
_MAX_DIGITS = 1024  # of a whole number
_NO_JSON = object()  # stands for a value that is not valid JSON


class NoCallError(ValueError):
    """Text that looked like the beginning of a call is none.

    Args:
        end: index in the text up to which it was parsed: no call begins before it.
    """

    def __init__(self, end: int = 0) -> None:
        super().__init__("no call")
        self.end = end


class RequestedCall(NamedTuple):
    """Name and arguments as the model wrote them, not validated: see `make_call`."""

    name: Any
    arguments: Any


def _object(members: list[tuple[str, Any]]) -> Any:
    found = dict(members)
    return found if len(found) == len(members) else _NO_JSON  # equal names are ambiguous


def _whole_number(digits: str) -> Any:
    return int(digits) if len(digits) <= _MAX_DIGITS else _NO_JSON


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_whole_number,
    parse_constant=lambda _name: _NO_JSON,
    strict=False,  # models write line breaks into strings as they are
)


class Nesting:
    """Follows the open brackets of JSON in pieces; cheaper than parsing it all again."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._is_in_text = False

    def is_open(self, text: str) -> bool:
        """Return whether an object or a list is open at the end of a text that has grown."""
        while found := (_IN_TEXT if self._is_in_text else _OUTSIDE).search(text, self._at):
            self._at = found.end()
            if found[0] == '"':
                self._is_in_text = not self._is_in_text
            elif not self._is_in_text:
                self._depth += 1 if found[0] in "{[" else -1
        is_escape_cut = self._is_in_text and text.endswith("\\", self._at)
        self._at = len(text) - is_escape_cut
        return self._depth > 0


_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_TEXT = re.compile(r'"|\\.', re.DOTALL)


def skip_blanks(text: str, at: int) -> int:
    """Return the index of the first character at or behind `at` that is not a blank."""
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def read_value(text: str, at: int, starts: str = "{") -> tuple[Any, int] | None:
    """Parse the object that begins at an index, behind blanks.

    Args:
        text: the text.
        at: the index.
        starts: the characters that may begin it: with "[" it may be a list.

    Returns:
        The value and the index behind it; None if it is not complete.

    Raises:
        NoCallError: there is no such value, whatever text follows.
    """
    at = skip_blanks(text, at)
    if at == len(text):
        return None
    if text[at] not in starts:
        raise NoCallError(at)
    try:
        return _DECODER.raw_decode(text, at)
    except JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _NEAR_END
        if is_cut:
            return None
        raise NoCallError(error.pos) from error
    except RecursionError as error:
        raise NoCallError(at) from error


def requested_call(value: Any) -> RequestedCall:
    """Return name and arguments from an object, in the form that most models write."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return RequestedCall(None, None)
    return RequestedCall(value.get("name"), value.get("arguments", value.get("parameters", {})))


def make_call(requested: RequestedCall) -> ToolCall:
    """Make a valid call; the arguments may be a string of JSON.

    Raises:
        NoCallError: the name is not a string, or the arguments are not a JSON object.
    """
    name, arguments = requested
    if isinstance(arguments, str):
        found = read_value(arguments, 0)
        if found is None or arguments[found[1] :].strip():
            raise NoCallError
        arguments = found[0]
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise NoCallError
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()  # raises for half a surrogate pair
    except (TypeError, ValueError, RecursionError) as error:
        raise NoCallError from error
    return ToolCall(name, written)
