"""What clients have written, with marks in place of what would become control tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.template_arguments import Arguments
from inference_svc.runtime.turns.chat_template import Message
from inference_svc.runtime.turns.control_tokens import ControlTokens


@dataclass(frozen=True)
class Guarded:
    """See the module docstring.

    Attributes:
        arguments: all of the template's.
        beginning: of the answer; "": none.
        marked: the parts that marks stand for.
    """

    messages: list[Message]
    tools: list[Message]
    arguments: Arguments
    beginning: str
    marked: list[str]


def guarded(
    control: ControlTokens,
    messages: Sequence[Message],
    tools: Sequence[Message],
    arguments: Arguments,
    beginning: str,
) -> Guarded:
    """Put marks into all texts of a turn.

    Raises:
        InvalidTurnError: a part cannot be spelled out.
    """
    marked: list[str] = []
    try:
        said: list[Message] = [
            {
                name: value if name == "role" else _guarded(control, value, marked)
                for name, value in one.items()
            }
            for one in messages
        ]
        return Guarded(
            said,
            [_guarded(control, tool, marked) for tool in tools],
            _guarded(control, arguments, marked),
            control.guard(beginning, marked),
            marked,
        )
    except RecursionError as error:
        raise InvalidTurnError(
            "a tool's schema, or the arguments of a call, are nested too deeply",
            "send flatter ones",
        ) from error


def _guarded(control: ControlTokens, value: Any, marked: list[str]) -> Any:
    """Return a value with marks in all texts of it, names of members included."""
    if isinstance(value, str):
        return control.guard(value, marked)
    if isinstance(value, Mapping):
        return {
            control.guard(name, marked): _guarded(control, found, marked)
            for name, found in value.items()
        }
    if isinstance(value, list | tuple):
        return [_guarded(control, found, marked) for found in value]
    return value
