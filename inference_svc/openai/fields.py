"""Reads the members of a JSON object that a client sent, and refuses what nobody read. Pure.

A member that is null counts as absent, as it does for OpenAI. Members are refused in one of three
ways: a value off its type or bounds (`invalid_value`), a feature that is not there
(`unsupported_value`), a name that nobody knows (`unknown_parameter`).
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from inference_svc.openai.errors import (
    InvalidJsonError,
    RequestError,
    UnknownParameterError,
    UnsupportedValueError,
)

MAX_SHOWN = 60  # characters of a bad value that a message repeats


@dataclass(frozen=True)
class Refused:
    """A member that means something that the service does not do.

    Attributes:
        accepted: values that ask for nothing.
        remedy: what to do instead.
    """

    accepted: tuple[object, ...]
    remedy: str


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a body.

    Raises:
        InvalidJsonError: it is not a JSON object of Unicode text.
    """
    try:
        text = body.decode("utf-8-sig")
        found = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # escapes can write half a character, which is no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidJsonError(
            f"the body is not JSON ({reason:.120})", "send one JSON object in UTF-8"
        ) from error
    if not isinstance(found, dict):
        raise InvalidJsonError("the body is not a JSON object", "send one JSON object in UTF-8")
    return found


class Fields:
    """The members of one object; ask for each, then `finish`.

    Args:
        values: the object.
        where: its path in the body, for messages; "" for the body itself.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = where
        self._known: set[str] = set()

    def path(self, name: str) -> str:
        """A member's path in the body."""
        return f"{self._where}.{name}" if self._where else name

    def any(self, name: str) -> Any:
        """A member of any type; None if it is absent."""
        self._known.add(name)
        return self._values.get(name)

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.any(name)
        if value is None:
            return default
        return value if isinstance(value, str) else self._wrong(name, value, "a string")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.any(name)
        if value is None:
            return default
        return value if isinstance(value, bool) else self._wrong(name, value, "true or false")

    def integer(self, name: str, lowest: int, highest: int) -> int | None:
        """A whole number within bounds, None if it is absent."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            self._wrong(name, value, f"a whole number, {lowest} to {highest}")
        return int(value)

    def number(self, name: str, lowest: float, highest: float) -> float | None:
        """A number within bounds, None if it is absent."""
        value = self.any(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not lowest <= value <= highest:
            self._wrong(name, value, f"a number, {lowest:g} to {highest:g}")
        return float(value)

    def items(self, name: str) -> list[Any]:
        """A list; empty if it is absent."""
        value = self.any(name)
        if value is None:
            return []
        return value if isinstance(value, list) else self._wrong(name, value, "a list")

    def inner(self, name: str) -> "Fields":
        """An object inside; without members if it is absent."""
        value = self.any(name)
        if value is not None and not isinstance(value, dict):
            self._wrong(name, value, "an object")
        return Fields(value or {}, self.path(name))

    def refuse(self, refused: Mapping[str, Refused]) -> None:
        """Refuse members that ask for what there is not."""
        for name, rule in refused.items():
            value = self.any(name)
            if value is not None and not any(_same(value, each) for each in rule.accepted):
                raise UnsupportedValueError(
                    f"{self.path(name)} = {_shown(value)} is not supported",
                    rule.remedy,
                    self.path(name),
                )

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Refuse what nobody read, but for what may be ignored."""
        known = self._known.union(ignored)
        for name in self._values:
            if name not in known:
                shown = name[:MAX_SHOWN]  # the name may be as long as the body
                close = difflib.get_close_matches(shown, sorted(known), n=1)
                raise UnknownParameterError(
                    f"there is no parameter {self.path(shown)!r}",
                    f"did you mean {close[0]!r}?" if close else "leave it out",
                    self.path(shown),
                )

    def _wrong(self, name: str, value: object, expected: str) -> NoReturn:
        path = self.path(name)
        raise RequestError(f"{path} = {_shown(value)} cannot be", f"send {expected}", path)


def _same(value: object, accepted: object) -> bool:
    """Whether they are equal, true and 1 being different things."""
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return "[…]" if isinstance(value, list) else "{…}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return "a very large number"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
