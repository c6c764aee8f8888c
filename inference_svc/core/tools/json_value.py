"""Reads JSON out of an answer that may not be complete. Pure."""

import json
from collections.abc import Mapping
from json import JSONDecodeError
from typing import Any, NoReturn

from inference_svc.core.chat import ToolCall

_NEAR_END = 8  # characters: a number, a word or an escape that is not complete fails so far before
_BLANKS = " \t\r\n"


class NoCallError(ValueError):
    """What was taken for the beginning of a call is none."""


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


# Models write line breaks into strings as they are.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def skip_blanks(text: str, at: int) -> int:
    """Return the index of the first character that is no blank."""
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def read_value(text: str, at: int) -> tuple[Any, int] | None:
    """Read the value that begins at an index, behind blanks.

    Returns:
        The value and the index behind it; None if it is not complete.

    Raises:
        NoCallError: there is none, whatever follows.
    """
    at = skip_blanks(text, at)
    if at == len(text):
        return None
    try:
        value, end = _DECODER.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False).encode()  # half a character is no text
    except JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _NEAR_END
        if is_cut:
            return None
        raise NoCallError from error
    except (ValueError, RecursionError) as error:
        raise NoCallError from error
    return value, end


def call_of(value: Any) -> ToolCall:
    """Make a call of an object with a name and arguments, as most models write it.

    Raises:
        NoCallError: it is something else.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NoCallError
    return make_call(value["name"], value.get("arguments", value.get("parameters", {})))


def make_call(name: str, arguments: Any) -> ToolCall:
    """Make a call of its name and its arguments, which may be JSON in a text.

    Raises:
        NoCallError: the arguments are no object.
    """
    if isinstance(arguments, str):
        found = read_value(arguments, 0)
        if found is None or arguments[found[1] :].strip():
            raise NoCallError
        arguments = found[0]
    if not isinstance(arguments, Mapping):
        raise NoCallError
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
