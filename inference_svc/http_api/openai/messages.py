"""Messages as OpenAI's clients write them: those of a chat, or of a response's input."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from inference_svc.core.chat import ASSISTANT, SYSTEM, USER, Message
from inference_svc.http_api.bodies import Body, Refused, WrongMemberError
from inference_svc.http_api.conversation import bounded
from inference_svc.http_api.errors import UnsupportedValueError

_ROLES = {"developer": SYSTEM, SYSTEM: SYSTEM, USER: USER, ASSISTANT: ASSISTANT}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_NO_TOOLS = "there are no tools: send what a tool found in a user message"


def _role(role: str) -> str:
    if role in {"tool", "function"}:
        raise WrongMemberError(
            f"role {role!r} is not supported", _NO_TOOLS, kind=UnsupportedValueError
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


class MessageBody(Body):
    """One message, as a client sends it."""

    content_words: ClassVar[str] = "role and content"
    refused: ClassVar[Mapping[str, Refused]] = {
        "name": Refused(("",), "chat templates have no names: write it into the content"),
        "tool_calls": Refused(([],), _NO_TOOLS),
        "tool_call_id": Refused((), _NO_TOOLS),
        "function_call": Refused((), _NO_TOOLS),
        "audio": Refused((), "the service reads text only"),
        "refusal": Refused(("",), "send it as content"),
    }
    # Of items that the service itself returned, and clients send back as they are.
    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "id", "status", "phase", "type"})

    role: Annotated[str, AfterValidator(_role)] = Field(default="", validate_default=True)
    content: Annotated[list[PartBody], FailFast(), BeforeValidator(_content)] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _say_something(self) -> Self:
        if "content" not in self.model_fields_set and self.role != ASSISTANT:
            raise WrongMemberError("{path} is missing", "send a text", "content")
        return self

    @property
    def message(self) -> Message:
        """Its role and its text."""
        return Message(self.role, "".join(part.text for part in self.content))


def _input(given: Any) -> Any:
    """Take a text for a user's only message."""
    if isinstance(given, str):
        return [{"role": USER, "content": given}]
    if not isinstance(given, list):
        raise WrongMemberError("{path} is neither text nor a list", "send a string or messages")
    for index, item in enumerate(given):
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind != "message":
            raise WrongMemberError(
                f"input items of type {str(kind)[:40]!r} are not supported",
                "send messages with text only",
                f"[{index}].type",
                UnsupportedValueError,
            )
    return given


Messages = Annotated[list[MessageBody], FailFast(), BeforeValidator(bounded)]  # a chat's
InputItems = Annotated[Messages, BeforeValidator(_input)]  # a response's input
