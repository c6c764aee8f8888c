"""Printing: the console for tables, messages as JSON values, wrapped lines, bars.

rich is imported only when a console is needed: most commands print one line, and start faster
without it.
"""

import io
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 1 << 16  # columns if the output is not a terminal: nothing is cut or wrapped
_BARS = "▁▂▃▄▅▆▇█"


def console() -> "Console":
    """Return the console for tables; characters that the terminal lacks become question marks."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values, with all fields; enums become lower-case words."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value: Any = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            result[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            result[field.name] = [_plain_value(field, item) for item in value]
        else:
            result[field.name] = _plain_value(field, value)
    return result


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name.rpartition("_")[2].lower()
    return value


def hanging(label: str, text: str, width: int, indent: int = 0) -> str:
    """Return a label and its text with a hanging indent; words are never broken.

    Args:
        label: the label, at the beginning.
        text: the text behind it; newlines become blanks.
        width: columns of the terminal; PIPE_WIDTH without one.
        indent: column where the text begins; 0: behind the label.
    """
    first = f"{label:<{indent}}"
    return textwrap.fill(
        text,
        max(width, len(first) + 20),  # a narrower terminal wraps the lines itself
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: 1 copy, 2 copies; `many` defaults to `one` and an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def sparkline(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Return the newest values as a line of bars, newest at the right; None is a blank.

    Args:
        values: the values, oldest first, none below 0.
        width: most columns of the line.
        top: the value of the highest bar; None: the largest value shown.
    """
    shown = values[-width:] if width > 0 else []
    if top is None:
        top = max((value for value in shown if value is not None), default=0.0)
    return "".join(" " if value is None else _bar(value, top) for value in shown)


def _bar(value: float, top: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] if top else _BARS[0]
