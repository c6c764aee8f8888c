"""Messages as Anthropic's clients write them: blocks of text, calls of tools, and their results.

What the model thought is read and dropped: it stays in its session, and is not read again.

*Source:* Anthropic API reference, "Messages".
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator

from inference_svc.core.chat import ASSISTANT, TOOL, USER, Message, ToolCall
from inference_svc.http_api.bodies.body import Body, Refused, WrongMemberError
from inference_svc.http_api.bodies.tools import CallId, JsonObject, ToolName, decode_call
from inference_svc.http_api.errors import UnsupportedValueError
from shared.types.units import parse_duration_s

PARAGRAPH = "\n\n"
TEXT, CALL, RESULT = "text", "tool_use", "tool_result"
THINKING, REDACTED = "thinking", "redacted_thinking"
# Whose blocks of a type are; a text is everybody's.
_SAYERS: Mapping[str, str] = {
    CALL: ASSISTANT,
    RESULT: USER,
    THINKING: ASSISTANT,
    REDACTED: ASSISTANT,
}


class CacheControl(Body):
    """Says that the prompt up to here is to be kept: it is, anyway, but not as long for certain."""

    content_words: ClassVar[str] = "type and ttl"

    kind: Literal["ephemeral"] = Field(default="ephemeral", alias="type")
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def ttl_s(self) -> float:
        """Its time in seconds."""
        return parse_duration_s(self.ttl)


class BlockBody(Body):
    """One block of a message's content; its type was read before."""

    content_words: ClassVar[str] = "type and text"

    kind: str = Field(default=TEXT, alias="type")
    cache_control: CacheControl | None = None


class TextBlock(BlockBody):
    """A text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"citations"})

    text: str = ""


def _kind_of(block: Any) -> str:
    """Return a block's type; "" if it has none."""
    kind = block.get("type") if isinstance(block, dict) else TEXT
    return kind if isinstance(kind, str) else ""


def _blocks(given: Any, kinds: tuple[str, ...]) -> Any:
    """Take a text for the only block, and refuse blocks of other types."""
    if isinstance(given, str):
        return [{"type": TEXT, "text": given}]
    if not isinstance(given, list):
        raise WrongMemberError("{path} is no text", "send a string, or a list of blocks")
    for index, block in enumerate(given):
        kind = _kind_of(block)
        if kind not in kinds:
            raise WrongMemberError(
                f"a block of type {kind[:40]!r} is not supported here",
                f"send blocks of type {', '.join(kinds)}",
                f"[{index}].type",
                UnsupportedValueError,
            )
    return given


def _of_kinds(*kinds: str) -> BeforeValidator:
    return BeforeValidator(partial(_blocks, kinds=kinds))


Texts = Annotated[list[TextBlock], FailFast(), _of_kinds(TEXT)]


class CallBlock(BlockBody):
    """A call of a tool, as it was answered."""

    content_words: ClassVar[str] = "type, id, name and input"
    refused: ClassVar[Mapping[str, Refused]] = {
        "caller": Refused(({"type": "direct"},), "only the model calls tools: leave it out")
    }

    call_id: CallId = Field(default="", alias="id", validate_default=True)
    name: ToolName = Field(default="", validate_default=True)
    input: JsonObject = Field(default=None, validate_default=True)

    @property
    def call(self) -> ToolCall:
        """The call."""
        return decode_call(self.name, self.input, self.call_id)


class ResultBlock(BlockBody):
    """What a tool returned."""

    content_words: ClassVar[str] = "type, tool_use_id and content"

    call_id: CallId = Field(default="", alias="tool_use_id", validate_default=True)
    content: Texts = Field(default_factory=list)
    is_error: bool = False

    @property
    def message(self) -> Message:
        """The message of the tool; an error without a text says that it is one."""
        text = PARAGRAPH.join(block.text for block in self.content)
        return Message(TOOL, text or "error" * self.is_error, tool_call_id=self.call_id)


class ThoughtBlock(BlockBody):
    """What a model thought."""

    content_words: ClassVar[str] = "type and thinking"
    ignored: ClassVar[frozenset[str]] = frozenset({"data", "signature", "thinking"})


Block = Annotated[
    Annotated[TextBlock, Tag(f"<{TEXT}>")]
    | Annotated[CallBlock, Tag(f"<{CALL}>")]
    | Annotated[ResultBlock, Tag(f"<{RESULT}>")]
    | Annotated[ThoughtBlock, Tag(f"<{THINKING}>")]
    | Annotated[ThoughtBlock, Tag(f"<{REDACTED}>")],
    Discriminator(lambda block: f"<{_kind_of(block)}>"),
]
Blocks = Annotated[list[Block], FailFast(), _of_kinds(TEXT, *_SAYERS)]


class MessageBody(Body):
    """One message, as a client sends it."""

    content_words: ClassVar[str] = "role and content"

    role: Literal["user", "assistant", "system"] = Field(default=None, validate_default=True)
    content: Blocks = Field(default=None, validate_default=True)

    @model_validator(mode="after")
    def _say_what_is_theirs(self) -> Self:
        for index, block in enumerate(self.content):
            sayer = _SAYERS.get(block.kind, self.role)
            if sayer != self.role:
                raise WrongMemberError(
                    f"a block of type {block.kind!r} cannot be the {self.role}'s",
                    f"send it with role {sayer!r}",
                    f"content[{index}].type",
                )
        return self

    @property
    def said(self) -> Iterator[Message]:
        """What it says, block by block; an answer is one, whatever it has."""
        if self.role == ASSISTANT:
            text = "".join(block.text for block in self.content if isinstance(block, TextBlock))
            calls = tuple(block.call for block in self.content if isinstance(block, CallBlock))
            yield Message(ASSISTANT, text, calls)
            return
        for block in self.content:
            if isinstance(block, ResultBlock):
                yield block.message
            elif isinstance(block, TextBlock):
                yield Message(self.role, block.text)
