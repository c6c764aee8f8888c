"""Members that OpenAI's bodies for turns have in common: sampling, tools, retention."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from inference_svc.core.answers import MAX_BIAS, MAX_BIASED_TOKENS, MAX_PENALTY, MAX_TOP_LOGPROBS
from inference_svc.core.chat import ChoiceKind, Tool, ToolUse
from inference_svc.core.grammar import Grammar
from inference_svc.core.retention import MAX_RETENTION_S, Retention
from inference_svc.core.template_arguments import effort_arguments
from inference_svc.http_api.bodies.body import (
    MOST_TOKENS,
    Body,
    Refused,
    TokenId,
    TurnBody,
    WrongMemberError,
)
from inference_svc.http_api.bodies.conversation import Effort, TemplateArguments
from inference_svc.http_api.bodies.formats import StructuredOutputs
from inference_svc.http_api.bodies.tools import check_tools
from inference_svc.http_api.openai.tools import FUNCTION, ToolChoice
from shared.types.units import parse_duration_s

LONG, LONG_S = "24h", 86_400.0  # a value of `prompt_cache_retention`, and its seconds
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _to_token_ids(raw: Any) -> Any:
    """Convert the names of `logit_bias` to token ids: in JSON names are texts."""
    if not isinstance(raw, dict):
        return raw
    if len(raw) > MAX_BIASED_TOKENS or not all(map(_TOKEN_ID.fullmatch, raw)):
        raise WrongMemberError(
            "{path} is not valid",
            f'send at most {MAX_BIASED_TOKENS} token ids with numbers, such as {{"50256": -100}}',
        )
    return {int(name): bias for name, bias in raw.items()}


Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class SampledBody(TurnBody, ABC):
    """Sampling parameters beyond those of every API.

    OpenAI's responses have no penalties and no bias; this service's do.

    Attributes:
        min_tokens, stop_token_ids, structured_outputs: vLLM's parameters, which its clients send
            to OpenAI's endpoints, too.
    """

    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_to_token_ids)] = Field(
        default_factory=dict
    )
    min_tokens: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    stop_token_ids: Annotated[list[TokenId], FailFast()] = Field(default_factory=list)
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer has to follow; None for free text."""
        return None if self.structured_outputs is None else self.structured_outputs.grammar

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Sampling values that only OpenAI's bodies have; None where the client gives none."""
        return {
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "logit_bias": self.logit_bias or None,
            "min_tokens": self.min_tokens,
            "stop_token_ids": tuple(self.stop_token_ids) or None,
        }


class ToolsBody(SampledBody, ABC):
    """A request whose answer may call tools.

    Attributes:
        parallel_tool_calls: whether the answer may have more than one call.
    """

    tool_kinds: ClassVar[frozenset[str]] = frozenset({FUNCTION})

    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        tools = self.offered
        choice = self.tool_choice
        chosen = "" if choice is None else choice.chosen
        check_tools([tool.name for tool in tools], chosen, "tool_choice")
        if choice is not None and choice.kind not in {"none", "auto"} and not tools:
            raise WrongMemberError(
                "{path} has no effect without tools", "send tools too", "tool_choice"
            )
        return self

    @property
    def shown_choice(self) -> str | dict[str, str]:
        """`tool_choice` as a response shows it."""
        if self.tool_choice is None:
            return "auto"
        is_named = self.tool_choice.kind == FUNCTION
        named = {"type": FUNCTION, "name": self.tool_choice.chosen}
        return named if is_named else str(self.tool_choice.kind)

    @property
    @abstractmethod
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the client offers."""

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the answer may or has to call."""
        choice = self.tool_choice
        most_calls = None if self.parallel_tool_calls else 1
        if choice is None:
            return ToolUse(self.offered, most_calls=most_calls)
        is_named = choice.kind == FUNCTION
        kind = ChoiceKind.REQUIRED if is_named else ChoiceKind(choice.kind)
        return ToolUse(self.offered, kind, choice.chosen, most_calls)


def _check_ttl(value: str) -> str:
    """Check a duration, as in OpenAI's only value "30m"; a validator."""
    try:
        is_possible = 0 < parse_duration_s(value) <= MAX_RETENTION_S
    except ValueError:
        is_possible = False
    if not is_possible:
        raise WrongMemberError(
            f"{{path}} = {value[:40]!r} is not valid", 'send a time such as "30m" or "1h"'
        )
    return value


class CacheOptions(Body):
    """`prompt_cache_options`; in both modes all computed KV is kept, and may be reused."""

    content_words: ClassVar[str] = "mode and ttl"

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Annotated[str, AfterValidator(_check_ttl)] = "30m"

    @property
    def ttl_s(self) -> float:
        """The TTL in seconds."""
        return parse_duration_s(self.ttl)


class OpenAITurnBody(ToolsBody, ABC):
    """The body of a chat or a response.

    Attributes:
        top_logprobs: number of alternatives of each token; None if the client does not say.
        chat_template_kwargs: arguments of the chat template; vLLM's and SGLang's parameter.
    """

    refused: ClassVar[Mapping[str, Refused]] = {
        "service_tier": Refused(
            ("auto", "default"), "all turns have the same service tier: leave it out"
        ),
        "moderation": Refused((), "the service has no moderation: leave it out"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "max_tool_calls",
            "safety_identifier",
            "user",
        }
    )

    prompt_cache_key: str = ""
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)

    @property
    def effort(self) -> Effort | None:
        """The reasoning effort; None if the client gives none."""
        return None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template; the client's own override those of the effort."""
        return {**effort_arguments(self.effort), **self.chat_template_kwargs}

    @property
    def cache_key(self) -> str:
        """The client's name of the conversation, see `agents.py`; "" if it gives none."""
        return self.prompt_cache_key

    @property
    def retention(self) -> Retention:
        """How long the client wants the KV cache to be kept at least: the longer of two values."""
        options, is_long = self.prompt_cache_options, self.prompt_cache_retention == LONG
        return Retention(max(options.ttl_s if options else 0.0, LONG_S if is_long else 0.0))
