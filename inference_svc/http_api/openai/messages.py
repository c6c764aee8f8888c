"""Messages of a chat, as OpenAI's clients write them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from inference_svc.core.chat import ASSISTANT, SYSTEM, TOOL, USER, Message, ToolCall
from inference_svc.http_api.bodies.body import Body, Refused, WrongMemberError
from inference_svc.http_api.bodies.conversation import SayerName, check_begun, check_bounded
from inference_svc.http_api.bodies.tools import CalledFunctionBody, CallId, decode_call
from inference_svc.http_api.errors import UnsupportedValueError
from inference_svc.http_api.openai.tools import FunctionKind

_ROLES = {"developer": SYSTEM, SYSTEM: SYSTEM, USER: USER, ASSISTANT: ASSISTANT, TOOL: TOOL}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_OLD_CALLS = "send functions as tools, in tools, tool_calls and messages with role 'tool'"


def _check_role(role: str) -> str:
    if role == "function":
        raise WrongMemberError(
            f"role {role!r} is not supported", _OLD_CALLS, kind=UnsupportedValueError
        )
    if role not in _ROLES:
        raise WrongMemberError(
            f"role {role[:40]!r} is not valid", f"send one of {', '.join(_ROLES)}"
        )
    return _ROLES[role]


def _check_part_kind(kind: str) -> str:
    if kind not in _TEXT_PARTS:
        raise WrongMemberError(
            f"content of type {kind[:40]!r} is not supported",
            "the service reads text only",
            kind=UnsupportedValueError,
        )
    return kind


class PartBody(Body):
    """One part of a message's content."""

    content_words: ClassVar[str] = "type and text"
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "logprobs", "prompt_cache_breakpoint"}
    )

    kind: Annotated[str, AfterValidator(_check_part_kind)] = Field(
        default="", alias="type", validate_default=True
    )
    text: str = ""


def _to_parts(raw: Any) -> Any:
    """Convert a text to the only part of a message's content; a validator."""
    if isinstance(raw, str):
        return [PartBody.model_construct(kind="text", text=raw)]
    if not isinstance(raw, list):
        raise WrongMemberError("{path} is not a text", "send a string, or a list of text parts")
    return raw


Content = Annotated[list[PartBody], FailFast(), BeforeValidator(_to_parts)]


class ToolCallBody(Body):
    """A tool call of an earlier answer."""

    content_words: ClassVar[str] = "id, type and function"
    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    call_id: CallId = Field(default="", alias="id", validate_default=True)
    kind: FunctionKind = Field(default="function", alias="type")
    function: CalledFunctionBody = Field(default=None, validate_default=True)

    @property
    def call(self) -> ToolCall:
        """The decoded call."""
        return decode_call(self.function.name, self.function.arguments, self.call_id)


class PredictionBody(Body):
    """`prediction`: the client's guess of most of the answer."""

    content_words: ClassVar[str] = "type and content"

    kind: Literal["content"] = Field(alias="type")
    content: Content

    @property
    def text(self) -> str:
        """The text of all its parts."""
        return "".join(part.text for part in self.content)


class MessageBody(Body):
    """One message, as a client sends it."""

    content_words: ClassVar[str] = "role and content"
    refused: ClassVar[Mapping[str, Refused]] = {
        "function_call": Refused((), _OLD_CALLS),
        "audio": Refused((), "the service reads text only"),
        "refusal": Refused(("",), "send it as content"),
    }
    # Members of messages that the service returned, and clients send back unchanged.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "id", "phase", "reasoning", "reasoning_content", "status", "type"}
    )

    role: Annotated[str, AfterValidator(_check_role)] = Field(default="", validate_default=True)
    content: Content = Field(default_factory=list)
    name: SayerName = ""
    tool_calls: Annotated[list[ToolCallBody], FailFast()] = Field(default_factory=list)
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        if "content" not in self.model_fields_set and self.role != ASSISTANT:
            raise WrongMemberError("{path} is missing", "send a text", "content")
        if (self.tool_call_id is not None) != (self.role == TOOL):
            raise WrongMemberError(
                "{path} is needed with role 'tool', and with no other role",
                "send both, or neither",
                "tool_call_id",
            )
        if self.tool_calls and self.role != ASSISTANT:
            raise WrongMemberError(
                f"{{path}} is only possible with role {ASSISTANT!r}",
                "send it with that role",
                "tool_calls",
            )
        return self

    @property
    def text(self) -> str:
        """The text of all its parts."""
        return "".join(part.text for part in self.content)

    @property
    def message(self) -> Message:
        """The message, with its text, calls and result."""
        return Message(
            role=self.role,
            content=self.text,
            tool_calls=tuple(call.call for call in self.tool_calls),
            tool_call_id=self.tool_call_id or "",
            name=self.name,
        )


Messages = Annotated[list[MessageBody], FailFast(), BeforeValidator(check_bounded)]


def check_end(messages: Sequence[MessageBody], is_prompt: bool | None, *, continues: bool) -> None:
    """Check that the last message can be continued, if it is to be; for a body's validator.

    Args:
        messages: the messages.
        is_prompt: `add_generation_prompt`; None if the client does not send it.
        continues: `continue_final_message`.

    Raises:
        WrongMemberError: the last message is to be the beginning of the answer, and cannot be.
    """
    if not continues:
        return
    if is_prompt:
        raise WrongMemberError(
            "{path} and add_generation_prompt exclude each other",
            "send add_generation_prompt: false, or leave it out",
            "continue_final_message",
        )
    check_begun(messages[-1].message)


def stored_messages(chat_id: str, messages: Sequence[MessageBody]) -> list[Mapping[str, Any]]:
    """Return the messages of a chat as they are listed, each with its id."""
    return [
        {"id": f"{chat_id}-{index}", **_listed(message)} for index, message in enumerate(messages)
    ]


def _listed(message: MessageBody) -> dict[str, Any]:
    calls = [call.model_dump(by_alias=True) for call in message.tool_calls]
    parts = [part.model_dump(by_alias=True) for part in message.content]
    return {
        "role": message.role,
        "content": message.text,
        "name": message.name or None,
        "content_parts": parts if len(parts) > 1 else None,
        **({"tool_calls": calls} if calls else {}),
        **({"tool_call_id": message.tool_call_id} if message.tool_call_id else {}),
    }
