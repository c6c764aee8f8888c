"""A conversation in a body, and what is said to the chat template beside it: alike in every API.

What messages say has one form behind all of them: `Message`.
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

MAX_MESSAGES = 4096  # of a request
MAX_PARTS = 4096  # of all messages together: reading each takes its time, of everybody's

T = TypeVar("T")


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


def _checked(check: Callable[[T], None]) -> AfterValidator:
    """Make a validator of a check that every way in has."""

    def validate(given: T) -> T:
        try:
            check(given)
        except InvalidTurnError as error:
            raise WrongMemberError(error.message, error.remedy) from error
        return given

    return AfterValidator(validate)


TemplateArguments = Annotated[dict[str, Any], _checked(check_arguments)]
SayerName = Annotated[str, _checked(check_author_name)]
# How much the model is to think, in OpenAI's words; which of them a template knows is its business.
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def check_begun(message: Message) -> None:
    """Check that the last message can be gone on with as the answer; for a validator of a body.

    Raises:
        WrongMemberError: it is no answer, or one that calls.
    """
    if message.role != ASSISTANT:
        raise WrongMemberError(
            f"the last message is the {message.role}'s, which is no answer to go on with",
            f"end with a message of the {ASSISTANT}'s",
            "messages",
        )
    if message.tool_calls:
        raise WrongMemberError(
            "an answer that calls tools cannot be gone on with",
            "end with what they returned, or leave the calls out",
            "messages",
            UnsupportedValueError,
        )
