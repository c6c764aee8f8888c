"""The conversation in a body, and arguments of the chat template: common to all APIs.

The messages of every API are converted to the same class, `Message`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator

from inference_svc.core.chat import ASSISTANT, TOOL, Message, ToolCall
from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.submission import check_author_name
from inference_svc.core.template_arguments import check_arguments
from inference_svc.http_api.bodies.body import WrongMemberError
from inference_svc.http_api.errors import UnsupportedValueError

MAX_MESSAGES = 4096  # messages of a request
MAX_PARTS = 4096  # parts of all its messages: validating them holds up the event loop

T = TypeVar("T")


def check_bounded(raw: Any) -> Any:
    """Check the bounds of a list of messages before it is validated, which may take long."""
    if not isinstance(raw, list):
        return raw
    if not 0 < len(raw) <= MAX_MESSAGES:
        raise WrongMemberError(
            f"{len(raw)} messages are not possible", f"send 1 to {MAX_MESSAGES} messages"
        )
    num_parts = sum(map(_count_parts, raw))
    if num_parts > MAX_PARTS:
        raise WrongMemberError(
            f"{num_parts} parts of content are too many", f"send at most {MAX_PARTS} parts"
        )
    return raw


def with_names(messages: Iterable[Message], calls: Iterable[ToolCall] = ()) -> tuple[Message, ...]:
    """Return messages in which a tool's result has the tool's name, if its call is known.

    Args:
        messages: the messages, with their calls and results.
        calls: the calls of the answer before the first message.
    """
    names = {call.call_id: call.name for call in calls}
    found = []
    for message in messages:
        names |= {call.call_id: call.name for call in message.tool_calls}
        is_result = message.role == TOOL
        name = names.get(message.tool_call_id, message.name)
        found.append(replace(message, name=name) if is_result else message)
    return tuple(found)


def _count_parts(raw: Any) -> int:
    """Count a message's parts, and the parts of tool results, which are inside a part."""
    parts = _content(raw)
    return len(parts) + sum(len(_content(part)) for part in parts)


def _content(raw: Any) -> list[Any]:
    content = raw.get("content") if isinstance(raw, dict) else None
    return content if isinstance(content, list) else []


def _as_validator(check: Callable[[T], None]) -> AfterValidator:
    """Return a validator of a check that the gRPC service has, too."""

    def validate(raw: T) -> T:
        try:
            check(raw)
        except InvalidTurnError as error:
            raise WrongMemberError(error.message, error.remedy) from error
        return raw

    return AfterValidator(validate)


TemplateArguments = Annotated[dict[str, Any], _as_validator(check_arguments)]
SayerName = Annotated[str, _as_validator(check_author_name)]
# Reasoning efforts, by OpenAI's names; it depends on the chat template which of them it supports.
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def check_begun(message: Message) -> None:
    """Check that the last message can be the beginning of the answer; for a body's validator.

    Raises:
        WrongMemberError: it is no answer, or an answer with tool calls.
    """
    if message.role != ASSISTANT:
        raise WrongMemberError(
            f"the last message has role {message.role!r}, so the answer cannot continue it",
            f"end with a message of role {ASSISTANT!r}",
            "messages",
        )
    if message.tool_calls:
        raise WrongMemberError(
            "an answer that calls tools cannot be continued",
            "end with the results of the calls, or leave the calls out",
            "messages",
            UnsupportedValueError,
        )
