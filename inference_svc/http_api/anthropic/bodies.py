"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and their messages as texts.

The blocks of a message are paragraphs: they are joined by blank lines, as are messages of the same
role that follow one another, which are one to Anthropic, and which chat templates do not take.

Claude Code puts a block in front of the system's which is different in each request
(`x-anthropic-billing-header`) and says nothing to a model: with it nothing could ever be reused.

*Source:* Anthropic API reference, "Messages"; `sglang` #29169 for the block.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from inference_svc.core.chat import ASSISTANT, SYSTEM, Message
from inference_svc.core.grammar import Grammar
from inference_svc.http_api.bodies import (
    Body,
    Count,
    Refused,
    StopStrings,
    TurnBody,
    WrongMemberError,
)
from inference_svc.http_api.conversation import bounded
from inference_svc.http_api.errors import UnsupportedValueError
from inference_svc.http_api.formats import FlatFormat

TEXT = "text"
PARAGRAPH = "\n\n"
BILLING = "x-anthropic-billing-header"
_NO_TOOLS = "the service has no tools: leave it out"
_TEXT_ONLY = "the service reads text only"


class CacheControl(Body):
    """Says that the prompt up to here is to be kept: it is, anyway."""

    content_words: ClassVar[str] = "type and ttl"

    kind: Literal["ephemeral"] = Field(default="ephemeral", alias="type")
    ttl: Literal["5m", "1h"] = "5m"


def _kind(kind: str) -> str:
    if kind != TEXT:
        raise WrongMemberError(
            f"a block of type {kind[:40]!r} is not supported",
            _NO_TOOLS if kind.startswith("tool_") else _TEXT_ONLY,
            kind=UnsupportedValueError,
        )
    return kind


class BlockBody(Body):
    """One block of a message's content."""

    content_words: ClassVar[str] = "type and text"
    ignored: ClassVar[frozenset[str]] = frozenset({"citations"})

    kind: Annotated[str, AfterValidator(_kind)] = Field(
        default="", alias="type", validate_default=True
    )
    text: str = ""
    cache_control: CacheControl | None = None


def _content(given: Any) -> Any:
    """Take a text for the only block."""
    if isinstance(given, str):
        return [BlockBody.model_construct(kind=TEXT, text=given)]
    if not isinstance(given, list):
        raise WrongMemberError("{path} is no text", "send a string, or a list of text blocks")
    return given


Blocks = Annotated[list[BlockBody], FailFast(), BeforeValidator(_content)]


class MessageBody(Body):
    """One message, as a client sends it."""

    content_words: ClassVar[str] = "role and content"

    role: Literal["user", "assistant", "system"] = Field(default=None, validate_default=True)
    content: Blocks = Field(default=None, validate_default=True)


class OutputConfig(Body):
    """Options of the output."""

    ignored: ClassVar[frozenset[str]] = frozenset({"effort", "task_budget"})

    format: FlatFormat | None = None


class PromptBody(TurnBody):
    """The body of POST /v1/messages/count_tokens; the members of an answer change nothing there."""

    refused: ClassVar[Mapping[str, Refused]] = {
        "tools": Refused(([],), _NO_TOOLS),
        "tool_choice": Refused(({"type": "none"}, {"type": "auto"}), _NO_TOOLS),
        "mcp_servers": Refused(([],), _NO_TOOLS),
        "container": Refused((), _NO_TOOLS),
        "output_format": Refused((), "send it as output_config.format"),
    }
    # The model does not think apart from its answer, and nothing is edited but by [overflow].
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "context_management",
            "diagnostics",
            "inference_geo",
            "service_tier",
            "speed",
            "thinking",
            "user_profile_id",
        }
    )

    system: Blocks = Field(default_factory=list)
    messages: Annotated[list[MessageBody], FailFast(), BeforeValidator(bounded)] = Field(
        default=[], validate_default=True
    )
    cache_control: CacheControl | None = None
    output_config: OutputConfig = OutputConfig()
    temperature: float | None = Field(default=None, ge=0, le=1)
    stop: StopStrings = Field(default_factory=list, alias="stop_sequences")

    @model_validator(mode="after")
    def _end_with_a_question(self) -> Self:
        if self.messages[-1].role == ASSISTANT:
            raise WrongMemberError(
                "{path} ends with an answer",
                "end with a user's message: answers are not continued",
                "messages",
                UnsupportedValueError,
            )
        return self

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The system's blocks and the messages, as roles and texts."""
        return tuple(
            Message(role, PARAGRAPH.join(text for _, text in said))
            for role, said in groupby(self._said(), key=lambda one: one[0])
        )

    def _said(self) -> Iterator[tuple[str, str]]:
        """Yield roles and texts of all blocks, in order; an answer without any is one."""
        for role, blocks in [(SYSTEM, self.system), *((m.role, m.content) for m in self.messages)]:
            texts = [block.text for block in blocks]
            if role == SYSTEM:
                texts = [text for text in texts if not text.startswith(BILLING)]
            elif role == ASSISTANT:
                texts = texts or [""]
            for text in texts:
                yield role, text

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to be; None: whatever the model says."""
        return None if self.output_config.format is None else self.output_config.format.grammar

    @property
    def cache_ttl(self) -> str:
        """The longest time that the client wants the prompt to be kept; "" if it does not say."""
        content = [*self.system, *(block for each in self.messages for block in each.content)]
        said = [self.cache_control, *(block.cache_control for block in content)]
        return min((each.ttl for each in said if each is not None), default="")  # "1h" < "5m"

    @property
    def max_answer_tokens(self) -> int | None:
        """Bound of the answer; None: nothing is answered."""
        return None


class MessagesBody(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Count | None = None

    @model_validator(mode="after")
    def _bound(self) -> Self:
        if self.max_tokens is None:
            raise WrongMemberError(
                "{path} is missing", "send the most tokens that the answer may have", "max_tokens"
            )
        return self

    @property
    def max_answer_tokens(self) -> int | None:
        """Bound of the answer."""
        return self.max_tokens
