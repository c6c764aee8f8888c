"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and the conversation in them.

The blocks of a message are paragraphs: they are joined by blank lines. So are consecutive messages
of the same role, which count as one message for Anthropic, and which chat templates refuse. The
texts of an answer are joined without blank lines: only calls and thoughts separate them. The
result of each tool is a message of its own.

Claude Code puts a block before the system's (`x-anthropic-billing-header`) that is different in
each request and means nothing to a model. It is dropped, because with it no KV could be reused.

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
    check_begun,
    check_bounded,
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


def _check_kind(kind: str) -> str:
    if kind != CUSTOM:
        raise WrongMemberError(
            f"a tool of type {kind[:40]!r} is not supported",
            "send tools with name and input_schema, and run them yourself",
            kind=UnsupportedValueError,
        )
    return kind


class ToolBody(Body):
    """A tool that the client offers and runs itself."""

    content_words: ClassVar[str] = "name, description and input_schema"
    refused: ClassVar[Mapping[str, Refused]] = {
        "allowed_callers": Refused(
            (["direct"],), "in this service only the model calls tools: leave it out"
        ),
        "input_examples": Refused(([],), "write the examples into the description"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"defer_loading", "eager_input_streaming"})

    kind: Annotated[str, AfterValidator(_check_kind)] = Field(default=CUSTOM, alias="type")
    name: ToolName = Field(default="", validate_default=True)
    description: str = ""
    input_schema: JsonObject = Field(default=None, validate_default=True)
    cache_control: CacheControl | None = None
    strict: bool = False

    @property
    def tool(self) -> Tool:
        """The tool that the model may call."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


Tools = Annotated[list[ToolBody], FailFast()]


class ChoiceBody(Body):
    """`tool_choice`: whether the answer may or has to call tools, and which one."""

    content_words: ClassVar[str] = "type and name"

    kind: Literal["auto", "any", "tool", "none"] = Field(
        default=None, alias="type", validate_default=True
    )
    name: str = ""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if bool(self.name) != (self.kind == NAMED):
            raise WrongMemberError(
                f"{{path}} is needed with type {NAMED!r}, and with no other type",
                "send both, or neither",
                "name",
            )
        return self

    @property
    def choice(self) -> ChoiceKind:
        """Whether the answer may or has to call a tool."""
        return _CHOICES[self.kind]


class OutputConfig(Body):
    """`output_config`: options of the answer."""

    ignored: ClassVar[frozenset[str]] = frozenset({"effort", "task_budget"})

    format: FlatFormat | None = None


class ThinkingBody(Body):
    """`thinking`: only "disabled" has an effect, as an argument of the chat template."""

    content_words: ClassVar[str] = "type"
    ignored: ClassVar[frozenset[str]] = frozenset({"budget_tokens", "display"})

    kind: Literal["enabled", "disabled", "adaptive"] = Field(
        default=None, alias="type", validate_default=True
    )


class PromptBody(TurnBody):
    """The body of POST /v1/messages/count_tokens; members about the answer have no effect there."""

    tool_kinds: ClassVar[frozenset[str]] = frozenset({CUSTOM})
    call_prefix: ClassVar[str] = "toolu_"
    refused: ClassVar[Mapping[str, Refused]] = {
        "mcp_servers": Refused(([],), _NO_SERVERS),
        "container": Refused((), _NO_SERVERS),
        "output_format": Refused((), "send it as output_config.format"),
        THREAD: Refused((), "send the whole conversation: its KV is found again"),
    }
    # `context_management`: only [overflow] drops anything.
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
    messages: Annotated[list[MessageBody], FailFast(), BeforeValidator(check_bounded)] = Field(
        default=[], validate_default=True
    )
    cache_control: CacheControl | None = None
    output_config: OutputConfig = OutputConfig()
    thinking: ThinkingBody | None = None
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)
    temperature: float | None = Field(default=None, ge=0, le=1)
    stop: StopStrings = Field(default_factory=list, alias="stop_sequences")

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        begun_answer = self._begun_answer
        if begun_answer is not None:
            check_begun(begun_answer)
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        choice = self.tool_choice
        check_tools(
            [each.name for each in self.tools], choice.name if choice else "", "tool_choice.name"
        )
        if choice and choice.choice is ChoiceKind.REQUIRED and not self.tools:
            raise WrongMemberError(
                "{path} has no effect without tools", "send tools too", "tool_choice"
            )
        return self

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The system's blocks and the messages, with consecutive messages of a role merged.

        Without an answer at their end, which is the beginning of the next answer.
        """
        return with_names(_merge_roles(self._prompt_messages()))

    @property
    def beginning(self) -> str:
        """The client's own beginning of the answer; "" if it gives none."""
        return "" if self._begun_answer is None else self._begun_answer.content

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template; the client's own override that of `thinking`."""
        is_off = self.thinking is not None and self.thinking.kind == DISABLED
        return {**(UNTHINKING if is_off else {}), **self.chat_template_kwargs}

    @property
    def _begun_answer(self) -> Message | None:
        """The answer at the end of the messages; None if there is none."""
        answers = (
            message
            for each in self.messages[self._num_prompt_messages :]
            for message in each.messages
        )
        return next(_merge_roles(answers), None)

    @property
    def _num_prompt_messages(self) -> int:
        """Number of messages before the answer at their end."""
        at_end = takewhile(lambda each: each.role == ASSISTANT, reversed(self.messages))
        return len(self.messages) - len(list(at_end))

    def _prompt_messages(self) -> Iterator[Message]:
        """Yield a message for each block, in order, up to the answer at the end."""
        yield from (Message(SYSTEM, block.text) for block in self.system)
        for each in self.messages[: self._num_prompt_messages]:
            yield from each.messages

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the answer may or has to call."""
        offered, choice = tuple(each.tool for each in self.tools), self.tool_choice
        if choice is None:
            return ToolUse(offered)
        most_calls = 1 if choice.disable_parallel_tool_use else None
        return ToolUse(offered, choice.choice, choice.name, most_calls)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer has to follow; None for free text."""
        return None if self.output_config.format is None else self.output_config.format.grammar

    @property
    def cache_ttl(self) -> str:
        """The longest TTL that the client wants for the prompt; "" if it gives none."""
        controls = [*self._prefix_controls, *self._message_controls]
        return max(controls, key=lambda each: each.ttl_s).ttl if controls else ""

    @property
    def retention(self) -> Retention:
        """How long the client wants the session, and the prefix of tools and system, to be kept."""
        return Retention(
            session_s=max((each.ttl_s for each in self._message_controls), default=0.0),
            prefix_s=max((each.ttl_s for each in self._prefix_controls), default=0.0),
        )

    @property
    def _prefix_controls(self) -> list[CacheControl]:
        """The cache controls of tools and of the system's blocks."""
        of_tools = (tool.cache_control for tool in self.tools)
        controls = (*of_tools, *(block.cache_control for block in self.system))
        return [each for each in controls if each]

    @property
    def _message_controls(self) -> list[CacheControl]:
        """The cache controls of the messages' blocks, and the body's own."""
        blocks = (block for each in self.messages for block in each.content)
        controls = (self.cache_control, *(block.cache_control for block in blocks))
        return [each for each in controls if each]

    @property
    def max_answer_tokens(self) -> int | None:
        """None: a prompt alone has no answer."""
        return None


class MessagesBody(PromptBody):
    """The body of POST /v1/messages."""

    max_tokens: Count | None = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens is None:
            raise WrongMemberError(
                "{path} is missing", "send the maximum number of tokens of the answer", "max_tokens"
            )
        return self

    @property
    def max_answer_tokens(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens


def _merge_roles(messages: Iterable[Message]) -> Iterator[Message]:
    """Merge consecutive messages of the same role, except results of tools."""
    for role, group in groupby(messages, key=lambda message: message.role):
        if role == TOOL:
            yield from group
            continue
        found = [
            each for each in group if not (role == SYSTEM and each.content.startswith(BILLING))
        ]
        if found:
            text = PARAGRAPH.join(each.content for each in found if each.content)
            yield Message(role, text, tuple(call for each in found for call in each.tool_calls))
