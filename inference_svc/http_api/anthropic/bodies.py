"""Bodies of POST /v1/messages and /v1/messages/count_tokens, their tools and what messages say.

The blocks of a message are paragraphs: they are joined by blank lines, as are messages of the same
role that follow one another, which are one to Anthropic, and which chat templates do not take. The
texts of an answer are joined as they are: only calls and thoughts have taken them apart. What each
tool returned is a message of its own.

Claude Code puts a block in front of the system's which is different in each request
(`x-anthropic-billing-header`) and says nothing to a model: with it nothing could ever be reused.

*Source:* Anthropic API reference, "Messages", "Tool use"; `sglang` #29169 for the block.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, takewhile
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from inference_svc.core.chat import ASSISTANT, SYSTEM, TOOL, ChoiceKind, Message, Tool, ToolUse
from inference_svc.core.grammar import Grammar
from inference_svc.core.retention import Retention
from inference_svc.core.template_arguments import UNTHINKING
from inference_svc.http_api.anthropic.blocks import PARAGRAPH, CacheControl, MessageBody, Texts
from inference_svc.http_api.anthropic.dialect import THREAD
from inference_svc.http_api.bodies.body import (
    Body,
    Count,
    Refused,
    StopStrings,
    TurnBody,
    WrongMemberError,
)
from inference_svc.http_api.bodies.conversation import (
    TemplateArguments,
    bounded,
    check_begun,
    with_names,
)
from inference_svc.http_api.bodies.formats import FlatFormat
from inference_svc.http_api.bodies.tools import JsonObject, ToolName, check_tools
from inference_svc.http_api.errors import UnsupportedValueError

BILLING = "x-anthropic-billing-header"
DISABLED = "disabled"
CUSTOM = "custom"
NAMED = "tool"
_CHOICES: Mapping[str, ChoiceKind] = {
    "auto": ChoiceKind.AUTO,
    "any": ChoiceKind.REQUIRED,
    NAMED: ChoiceKind.REQUIRED,
    "none": ChoiceKind.NONE,
}
_NO_SERVERS = "the service runs no tools: leave it out"


def _kind(kind: str) -> str:
    if kind != CUSTOM:
        raise WrongMemberError(
            f"a tool of type {kind[:40]!r} is not supported",
            "send tools of your own, which you run yourself: with name and input_schema",
            kind=UnsupportedValueError,
        )
    return kind


class ToolBody(Body):
    """A tool that the client would run."""

    content_words: ClassVar[str] = "name, description and input_schema"
    refused: ClassVar[Mapping[str, Refused]] = {
        "allowed_callers": Refused((["direct"],), "only the model calls tools: leave it out"),
        "input_examples": Refused(([],), "write them into the description"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading", "eager_input_streaming"})

    kind: Annotated[str, AfterValidator(_kind)] = Field(default=CUSTOM, alias="type")
    name: ToolName = Field(default="", validate_default=True)
    description: str = ""
    input_schema: JsonObject = Field(default=None, validate_default=True)
    cache_control: CacheControl | None = None
    strict: bool = False

    @property
    def tool(self) -> Tool:
        """The tool."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


Tools = Annotated[list[ToolBody], FailFast()]


class ChoiceBody(Body):
    """`tool_choice`: whether the answer calls tools, and which."""

    content_words: ClassVar[str] = "type and name"

    kind: Literal["auto", "any", "tool", "none"] = Field(
        default=None, alias="type", validate_default=True
    )
    name: str = ""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_one(self) -> Self:
        if bool(self.name) != (self.kind == NAMED):
            raise WrongMemberError(
                f"{{path}} and type {NAMED!r} go together", "send both, or neither", "name"
            )
        return self

    @property
    def choice(self) -> ChoiceKind:
        """Whether the answer calls any."""
        return _CHOICES[self.kind]


class OutputConfig(Body):
    """Options of the output."""

    ignored: ClassVar[frozenset[str]] = frozenset({"effort", "task_budget"})

    format: FlatFormat | None = None


class ThinkingBody(Body):
    """How the model is to think: only that it is not to is said to its template."""

    content_words: ClassVar[str] = "type"
    ignored: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    kind: Literal["enabled", "disabled", "adaptive"] = Field(
        default=None, alias="type", validate_default=True
    )


class PromptBody(TurnBody):
    """The body of POST /v1/messages/count_tokens; the members of an answer change nothing there."""

    tool_kinds: ClassVar[frozenset[str]] = frozenset({CUSTOM})
    call_prefix: ClassVar[str] = "toolu_"
    refused: ClassVar[Mapping[str, Refused]] = {
        "mcp_servers": Refused(([],), _NO_SERVERS),
        "container": Refused((), _NO_SERVERS),
        "output_format": Refused((), "send it as output_config.format"),
        THREAD: Refused((), "send the whole conversation: what was computed of it is found again"),
    }
    # Nothing is edited but by [overflow].
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "context_management",
            "diagnostics",
            "inference_geo",
            "service_tier",
            "speed",
            "user_profile_id",
        }
    )

    tools: Tools = Field(default_factory=list)
    tool_choice: ChoiceBody | None = None
    system: Texts = Field(default_factory=list)
    messages: Annotated[list[MessageBody], FailFast(), BeforeValidator(bounded)] = Field(
        default=[], validate_default=True
    )
    cache_control: CacheControl | None = None
    output_config: OutputConfig = OutputConfig()
    thinking: ThinkingBody | None = None
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    temperature: float | None = Field(default=None, ge=0, le=1)
    stop: StopStrings = Field(default_factory=list, alias="stop_sequences")

    @model_validator(mode="after")
    def _end_rightly(self) -> Self:
        begun = self._begun
        if begun is not None:
            check_begun(begun)
        return self

    @model_validator(mode="after")
    def _choose_what_is_there(self) -> Self:
        choice = self.tool_choice
        check_tools(
            [each.name for each in self.tools], choice.name if choice else "", "tool_choice.name"
        )
        if choice and choice.choice is ChoiceKind.REQUIRED and not self.tools:
            raise WrongMemberError("{path} goes with tools", "send tools, too", "tool_choice")
        return self

    @property
    def conversation(self) -> tuple[Message, ...]:
        """What the system's blocks and the messages say, each role at a time.

        But for an answer at their end, which is gone on with.
        """
        return with_names(_joined(self._asked()))

    @property
    def beginning(self) -> str:
        """What the answer begins with, in the client's words; "": nothing."""
        return "" if self._begun is None else self._begun.content

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template; those that are named count before `thinking`."""
        is_off = self.thinking is not None and self.thinking.kind == DISABLED
        return {**(UNTHINKING if is_off else {}), **self.chat_template_kwargs}

    @property
    def _begun(self) -> Message | None:
        """The answer at the end of the messages; None: there is none."""
        said = (one for each in self.messages[self._num_asked :] for one in each.said)
        return next(_joined(said), None)

    @property
    def _num_asked(self) -> int:
        """Number of messages before an answer at their end."""
        at_end = takewhile(lambda each: each.role == ASSISTANT, reversed(self.messages))
        return len(self.messages) - len(list(at_end))

    def _asked(self) -> Iterator[Message]:
        """Yield what all blocks say, in order, before an answer at their end."""
        yield from (Message(SYSTEM, block.text) for block in self.system)
        for each in self.messages[: self._num_asked]:
            yield from each.said

    @property
    def tool_use(self) -> ToolUse:
        """What the answer may do with tools."""
        offered, choice = tuple(each.tool for each in self.tools), self.tool_choice
        if choice is None:
            return ToolUse(offered)
        most_calls = 1 if choice.disable_parallel_tool_use else None
        return ToolUse(offered, choice.choice, choice.name, most_calls)

    @property
    def grammar(self) -> Grammar | None:
        """What the answer has to be; None: whatever the model says."""
        return None if self.output_config.format is None else self.output_config.format.grammar

    @property
    def cache_ttl(self) -> str:
        """The longest time that the client wants the prompt to be kept; "" if it does not say."""
        said = [*self._of_prefix, *self._of_messages]
        return max(said, key=lambda each: each.ttl_s).ttl if said else ""

    @property
    def retention(self) -> Retention:
        """For how long it wants what to be kept: up to the last message, or tools and system."""
        return Retention(
            session_s=max((each.ttl_s for each in self._of_messages), default=0.0),
            prefix_s=max((each.ttl_s for each in self._of_prefix), default=0.0),
        )

    @property
    def _of_prefix(self) -> list[CacheControl]:
        """What is said of caching at tools and in the system's blocks."""
        of_tools = (tool.cache_control for tool in self.tools)
        said = (*of_tools, *(block.cache_control for block in self.system))
        return [each for each in said if each]

    @property
    def _of_messages(self) -> list[CacheControl]:
        """What is said of it in messages, and for all of them."""
        blocks = (block for each in self.messages for block in each.content)
        said = (self.cache_control, *(block.cache_control for block in blocks))
        return [each for each in said if each]

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


def _joined(said: Iterable[Message]) -> Iterator[Message]:
    """Make one message of those of a role that follow one another, if they are no tool's."""
    for role, group in groupby(said, key=lambda message: message.role):
        if role == TOOL:
            yield from group
            continue
        found = [
            each for each in group if not (role == SYSTEM and each.content.startswith(BILLING))
        ]
        if found:
            text = PARAGRAPH.join(each.content for each in found if each.content)
            yield Message(role, text, tuple(call for each in found for call in each.tool_calls))
