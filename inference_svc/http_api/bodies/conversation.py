"""How many messages a request may have; what they say has one form behind every API: `Message`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from inference_svc.core.chat import TOOL, Message, ToolCall
from inference_svc.http_api.bodies.body import WrongMemberError

MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of all messages together: reading each takes its time, of everybody's


def bounded(given: Any) -> Any:
    """Refuse lists that would take long to read, before they are read."""
    if not isinstance(given, list):
        return given
    if not 0 < len(given) <= MAX_MESSAGES:
        raise WrongMemberError(
            f"{len(given)} messages cannot be", f"send 1 to {MAX_MESSAGES} messages"
        )
    num_parts = sum(map(_num_parts, given))
    if num_parts > MAX_PARTS:
        raise WrongMemberError(
            f"{num_parts} parts of content cannot be", f"send at most {MAX_PARTS}"
        )
    return given


def with_names(messages: Iterable[Message], calls: Iterable[ToolCall] = ()) -> tuple[Message, ...]:
    """Return messages in which what a tool returned says which tool, if its call is known.

    Args:
        messages: what is said, calls included.
        calls: of the answer before the first message.
    """
    names = {call.call_id: call.name for call in calls}
    found = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        is_result = message.role == TOOL
        name = names.get(message.tool_call_id, message.name)
        found.append(replace(message, name=name) if is_result else message)
    return tuple(found)


def _num_parts(given: Any) -> int:
    """Count a message's parts, and those of what a tool returned, which are inside of one."""
    parts = _content(given)
    return len(parts) + sum(len(_content(part)) for part in parts)


def _content(given: Any) -> list[Any]:
    content = given.get("content") if isinstance(given, dict) else None
    return content if isinstance(content, list) else []
