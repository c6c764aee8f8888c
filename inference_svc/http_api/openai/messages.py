"""Messages as OpenAI's clients write them: those of a chat."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from inference_svc.core.chat import ASSISTANT, SYSTEM, TOOL, USER, Message, ToolCall
from inference_svc.http_api.bodies.body import Body, Refused, WrongMemberError
from inference_svc.http_api.bodies.conversation import SayerName, bounded, check_begun
from inference_svc.http_api.bodies.tools import CalledFunctionBody, CallId, decode_call
from inference_svc.http_api.errors import UnsupportedValueError
from inference_svc.http_api.openai.tools import FunctionKind

_ROLES = {"developer": SYSTEM, SYSTEM: SYSTEM, USER: USER, ASSISTANT: ASSISTANT, TOOL: TOOL}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_OLD_CALLS = "functions are called as tools: send tools, tool_calls and role 'tool'"


def _role(role: str) -> str:
    if role == "function":
        raise WrongMemberError(
            f"role {role!r} is not supported", _OLD_CALLS, kind=UnsupportedValueError
        )
    if role not in _ROLES:
        raise WrongMemberError(f"role {role[:40]!r} cannot be", f"send one of {', '.join(_ROLES)}")
    return _ROLES[role]


def _kind(kind: str) -> str:
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

    kind: Annotated[str, AfterValidator(_kind)] = Field(
        default="", alias="type", validate_default=True
    )
    text: str = ""


def _content(given: Any) -> Any:
    """Take a text for the only part of a message."""
    if isinstance(given, str):
        return [PartBody.model_construct(kind="text", text=given)]
    if not isinstance(given, list):
        raise WrongMemberError("{path} is no text", "send a string, or a list of text parts")
    return given


Content = Annotated[list[PartBody], FailFast(), BeforeValidator(_content)]


class ToolCallBody(Body):
    """A call of a tool, as it was answered."""

    content_words: ClassVar[str] = "id, type and function"
    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    call_id: CallId = Field(default="", alias="id", validate_default=True)
    kind: FunctionKind = Field(default="function", alias="type")
    function: CalledFunctionBody = Field(default=None, validate_default=True)

    @property
    def call(self) -> ToolCall:
        """The call."""
        return decode_call(self.function.name, self.function.arguments, self.call_id)


class PredictionBody(Body):
    """`prediction`: what most of the answer will likely be."""

    content_words: ClassVar[str] = "type and content"

    kind: Literal["content"] = Field(alias="type")
    content: Content

    @property
    def text(self) -> str:
        """All of its parts as one."""
        return "".join(part.text for part in self.content)


class MessageBody(Body):
    """One message, as a client sends it."""

    content_words: ClassVar[str] = "role and content"
    refused: ClassVar[Mapping[str, Refused]] = {
        "function_call": Refused((), _OLD_CALLS),
        "audio": Refused((), "the service reads text only"),
        "refusal": Refused(("",), "send it as content"),
    }
    # Of items that the service itself returned, and clients send back as they are.
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"annotations", "id", "phase", "reasoning", "reasoning_content", "status", "type"}
    )

    role: Annotated[str, AfterValidator(_role)] = Field(default="", validate_default=True)
    content: Content = Field(default_factory=list)
    name: SayerName = ""
    tool_calls: Annotated[list[ToolCallBody], FailFast()] = Field(default_factory=list)
    tool_call_id: CallId | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if "content" not in self.model_fields_set and self.role != ASSISTANT:
            raise WrongMemberError("{path} is missing", "send a text", "content")
        if (self.tool_call_id is not None) != (self.role == TOOL):
            raise WrongMemberError(
                "{path} and role 'tool' go together", "send both, or neither", "tool_call_id"
            )
        if self.tool_calls and self.role != ASSISTANT:
            raise WrongMemberError(
                "{path} is only an answer's", f"send it with role {ASSISTANT!r}", "tool_calls"
            )
        return self

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(part.text for part in self.content)

    @property
    def message(self) -> Message:
        """What it says, calls, or returns."""
        return Message(
            role=self.role,
            content=self.text,
            tool_calls=tuple(call.call for call in self.tool_calls),
            tool_call_id=self.tool_call_id or "",
            name=self.name,
        )


Messages = Annotated[list[MessageBody], FailFast(), BeforeValidator(bounded)]


def check_end(messages: Sequence[MessageBody], is_prompt: bool | None, *, continues: bool) -> None:
    """Check how messages end; for a validator of their body.

    Args:
        messages: what is said.
        is_prompt: `add_generation_prompt`; None: the client does not say.
        continues: `continue_final_message`.

    Raises:
        WrongMemberError: their last one is to be gone on with, and cannot be.
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
