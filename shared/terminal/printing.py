"""What commands print: where tables go, messages as values for JSON, wrapped lines, bars.

rich is imported when a console is asked for: most commands print a line, and start sooner without.
"""

import io
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 1 << 16  # columns when the output is not a terminal: nothing is cut off or wrapped
_BARS = "▁▂▃▄▅▆▇█"


def console() -> "Console":
    """Return the console for tables; what the terminal cannot show becomes a question mark."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values, with every field; numbers stay, enums become words."""
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
    """Write a label and its text, wrapped below itself; a word is never broken, however long.

    Args:
        label: stands first.
        text: behind it; newlines are blanks.
        width: of the terminal; PIPE_WIDTH where there is none.
        indent: where the text begins; 0: behind the label.
    """
    first = f"{label:<{indent}}"
    return textwrap.fill(
        text,
        max(width, len(first) + 20),  # a terminal as narrow as that wraps by itself
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def counted(number: int, one: str, many: str = "") -> str:
    """Write a number and its noun: 1 copy, 2 copies; `many` is `one` and an s if not given."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def sparkline(values: Sequence[float | None], width: int, top: float | None = None) -> str:
    """Draw the newest values as bars, the newest at the right; an unknown value is a blank.

    Args:
        values: oldest first, none below 0.
        width: of the terminal, for them.
        top: what the highest bar is; None: the largest of those that are shown.
    """
    shown = values[-width:] if width > 0 else []
    if top is None:
        top = max((value for value in shown if value is not None), default=0.0)
    return "".join(" " if value is None else _bar(value, top) for value in shown)


def _bar(value: float, top: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] if top else _BARS[0]
