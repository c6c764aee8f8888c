"""The texts of a client's turn, with marks in place of parts that would become control tokens.

See `control_tokens.py` for the marks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.template_arguments import Arguments
from inference_svc.runtime.turns.chat_template import Message
from inference_svc.runtime.turns.control_tokens import ControlTokens


@dataclass(frozen=True)
class Guarded:
    """A turn's texts that are safe to render with the chat template.

    Attributes:
        messages: the messages, as templates take them.
        tools: the tools, as templates take them.
        arguments: all arguments of the template.
        beginning: the beginning of the answer; "": none.
        marked: the parts that marks stand for, by the marks' numbers.
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
    """Put marks into all texts of a turn but the roles of messages, which the template checks.

    Args:
        control: finds the parts that would become control tokens.
        messages: the messages, as templates take them.
        tools: the tools, as templates take them.
        arguments: all arguments of the template.
        beginning: the beginning of the answer; "": none.

    Raises:
        InvalidTurnError: a part cannot be spelled out, or values are nested too deeply.
    """
    marked: list[str] = []
    try:
        safe_messages: list[Message] = [
            {
                name: value if name == "role" else _guarded(control, value, marked)
                for name, value in message.items()
            }
            for message in messages
        ]
        return Guarded(
            safe_messages,
            [_guarded(control, tool, marked) for tool in tools],
            _guarded(control, arguments, marked),
            control.guard(beginning, marked),
            marked,
        )
    except RecursionError as error:
        raise InvalidTurnError(
            "a tool's schema, or the arguments of a call, are nested too deeply",
            "send less deeply nested ones",
        ) from error


def _guarded(control: ControlTokens, value: Any, marked: list[str]) -> Any:
    """Return a JSON value with marks in all its strings, names of members included."""
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
