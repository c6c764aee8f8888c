"""The input of a response: messages, calls of tools, and what these returned.

What an answer said and what it called are items of their own, and together one message.

*Source:* OpenAI API reference, "Responses".
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag

from inference_svc.core.chat import ASSISTANT, TOOL, USER, Message
from inference_svc.http_api.bodies import Body, WrongMemberError
from inference_svc.http_api.conversation import bounded, with_names
from inference_svc.http_api.errors import UnsupportedValueError
from inference_svc.http_api.openai.messages import Content, MessageBody
from inference_svc.http_api.openai.tools import OF_NAMESPACE
from inference_svc.http_api.tool_bodies import CalledFunctionBody, CallId, decode_call

MESSAGE, CALL, RESULT, REASONING = KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
)
_OF_ITEMS = frozenset({"created_by", "id", "status", "type"})


class CallItem(CalledFunctionBody):
    """A call of a tool, as it was answered."""

    content_words: ClassVar[str] = "call_id, name and arguments"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    call_id: CallId = Field(default="", validate_default=True)
    namespace: str = ""

    @property
    def message(self) -> Message:
        """The answer that asked for it."""
        name = f"{self.namespace}{OF_NAMESPACE}{self.name}" if self.namespace else self.name
        return Message(ASSISTANT, "", (decode_call(name, self.arguments, self.call_id),))


class ResultItem(Body):
    """What a tool returned."""

    content_words: ClassVar[str] = "call_id and output"
    ignored: ClassVar[frozenset[str]] = _OF_ITEMS

    call_id: CallId = Field(default="", validate_default=True)
    output: Content = Field(default=None, validate_default=True)

    @property
    def message(self) -> Message:
        """The message of the tool."""
        text = "".join(part.text for part in self.output)
        return Message(TOOL, text, tool_call_id=self.call_id)


class ReasoningItem(Body):
    """What a model thought: it stays in its session, and is not read again."""

    ignored: ClassVar[frozenset[str]] = _OF_ITEMS | {"content", "encrypted_content", "summary"}

    message: ClassVar[None] = None


def _kind(item: Any) -> Any:
    """Return the item's type as the client wrote it; nothing is a message."""
    found = item.get("type") if isinstance(item, dict) else None
    return MESSAGE if found is None else found


Item = Annotated[
    Annotated[MessageBody, Tag(f"<{MESSAGE}>")]
    | Annotated[CallItem, Tag(f"<{CALL}>")]
    | Annotated[ResultItem, Tag(f"<{RESULT}>")]
    | Annotated[ReasoningItem, Tag(f"<{REASONING}>")],
    Discriminator(lambda item: f"<{_kind(item)}>"),
]


def _input(given: Any) -> Any:
    """Take a text for a user's only message."""
    if isinstance(given, str):
        return [{"role": USER, "content": given}]
    if not isinstance(given, list):
        raise WrongMemberError("{path} is neither text nor a list", "send a string or messages")
    for index, item in enumerate(given):
        kind = _kind(item)
        if kind not in KINDS:
            raise WrongMemberError(
                f"input items of type {str(kind)[:40]!r} are not supported",
                "send messages with text, and function calls with their outputs",
                f"[{index}].type",
                UnsupportedValueError,
            )
    return given


InputItems = Annotated[list[Item], FailFast(), BeforeValidator(bounded), BeforeValidator(_input)]


def messages_of(items: Iterable[Item]) -> tuple[Message, ...]:
    """Return items as messages: answers that follow one another are one, if they call anything."""
    found: list[Message] = []
    for item in items:
        message = item.message
        if message is None:
            continue
        last = found[-1] if found else None
        if last is not None and last.role == message.role == ASSISTANT:
            calls = (*last.tool_calls, *message.tool_calls)
            if calls:
                found[-1] = Message(ASSISTANT, last.content + message.content, calls)
                continue
        found.append(message)
    return with_names(found)
