"""Messages as Anthropic's clients write them: blocks of text, tool calls, and their results.

Blocks of thoughts are accepted and dropped: thoughts stay in their session, and are not read again.

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
# The role that may send blocks of a type; any role may send text.
_ROLES: Mapping[str, str] = {
    CALL: ASSISTANT,
    RESULT: USER,
    THINKING: ASSISTANT,
    REDACTED: ASSISTANT,
}


class CacheControl(Body):
    """`cache_control`: asks to cache the prompt up to here.

    The service does so anyway; this sets for how long at least.
    """

    content_words: ClassVar[str] = "type and ttl"

    kind: Literal["ephemeral"] = Field(default="ephemeral", alias="type")
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def ttl_s(self) -> float:
        """The TTL in seconds."""
        return parse_duration_s(self.ttl)


class BlockBody(Body):
    """One block of a message's content; a discriminator has chosen its class by its type."""

    content_words: ClassVar[str] = "type and text"

    kind: str = Field(default=TEXT, alias="type")
    cache_control: CacheControl | None = None


class TextBlock(BlockBody):
    """A block of text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"citations"})

    text: str = ""


def _kind_of(block: Any) -> str:
    """Return a block's type; "" if it has none."""
    kind = block.get("type") if isinstance(block, dict) else TEXT
    return kind if isinstance(kind, str) else ""


def _to_blocks(raw: Any, kinds: tuple[str, ...]) -> Any:
    """Convert a text to the only block, and check the types of blocks; a validator."""
    if isinstance(raw, str):
        return [{"type": TEXT, "text": raw}]
    if not isinstance(raw, list):
        raise WrongMemberError("{path} is not a text", "send a string, or a list of blocks")
    for index, block in enumerate(raw):
        kind = _kind_of(block)
        if kind not in kinds:
            raise WrongMemberError(
                f"a block of type {kind[:40]!r} is not supported here",
                f"send blocks of type {', '.join(kinds)}",
                f"[{index}].type",
                UnsupportedValueError,
            )
    return raw


def _blocks_of(*kinds: str) -> BeforeValidator:
    return BeforeValidator(partial(_to_blocks, kinds=kinds))


Texts = Annotated[list[TextBlock], FailFast(), _blocks_of(TEXT)]


class CallBlock(BlockBody):
    """A tool call of an earlier answer."""

    content_words: ClassVar[str] = "type, id, name and input"
    refused: ClassVar[Mapping[str, Refused]] = {
        "caller": Refused(
            ({"type": "direct"},), "in this service only the model calls tools: leave it out"
        )
    }

    call_id: CallId = Field(default="", alias="id", validate_default=True)
    name: ToolName = Field(default="", validate_default=True)
    input: JsonObject = Field(default=None, validate_default=True)

    @property
    def call(self) -> ToolCall:
        """The decoded call."""
        return decode_call(self.name, self.input, self.call_id)


class ResultBlock(BlockBody):
    """The result of a tool call."""

    content_words: ClassVar[str] = "type, tool_use_id and content"

    call_id: CallId = Field(default="", alias="tool_use_id", validate_default=True)
    content: Texts = Field(default_factory=list)
    is_error: bool = False

    @property
    def message(self) -> Message:
        """The tool's message; an error without a text has the text "error"."""
        text = PARAGRAPH.join(block.text for block in self.content)
        return Message(TOOL, text or "error" * self.is_error, tool_call_id=self.call_id)


class ThoughtBlock(BlockBody):
    """The model's thoughts."""

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
Blocks = Annotated[list[Block], FailFast(), _blocks_of(TEXT, *_ROLES)]


class MessageBody(Body):
    """One message, as a client sends it."""

    content_words: ClassVar[str] = "role and content"

    role: Literal["user", "assistant", "system"] = Field(default=None, validate_default=True)
    content: Blocks = Field(default=None, validate_default=True)

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for index, block in enumerate(self.content):
            role = _ROLES.get(block.kind, self.role)
            if role != self.role:
                raise WrongMemberError(
                    f"a message with role {self.role!r} cannot contain a block of type "
                    f"{block.kind!r}",
                    f"send it in a message with role {role!r}",
                    f"content[{index}].type",
                )
        return self

    @property
    def messages(self) -> Iterator[Message]:
        """A message for each block; an answer is one message, with all its blocks."""
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
