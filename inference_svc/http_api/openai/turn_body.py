"""What OpenAI's chats and responses have in common."""

from abc import ABC
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from inference_svc.core.answers import MAX_TOP_LOGPROBS
from inference_svc.core.retention import MAX_RETENTION_S, Retention
from inference_svc.core.template_arguments import effort_arguments
from inference_svc.http_api.bodies.body import Body, Refused, WrongMemberError
from inference_svc.http_api.bodies.conversation import Effort, TemplateArguments
from inference_svc.http_api.openai.tools import ToolsBody
from shared.types.units import parse_duration_s

LONG, LONG_S = "24h", 86_400.0


def _ttl(value: str) -> str:
    """Check a time as OpenAI's clients write it; theirs is 30m."""
    try:
        is_possible = 0 < parse_duration_s(value) <= MAX_RETENTION_S
    except ValueError:
        is_possible = False
    if not is_possible:
        raise WrongMemberError(
            f"{{path}} = {value[:40]!r} cannot be", 'send a time such as "30m" or "1h"'
        )
    return value


class CacheOptions(Body):
    """`prompt_cache_options`; whatever its mode, all that is computed may be found again."""

    content_words: ClassVar[str] = "mode and ttl"

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Annotated[str, AfterValidator(_ttl)] = "30m"

    @property
    def ttl_s(self) -> float:
        """Its time in seconds."""
        return parse_duration_s(self.ttl)


class OpenAITurnBody(ToolsBody, ABC):
    """A chat's or a response's body.

    Attributes:
        top_logprobs: how many alternatives of each token; None if the client does not say.
        chat_template_kwargs: not OpenAI's, but vLLM's and SGLang's.
    """

    refused: ClassVar[Mapping[str, Refused]] = {
        "service_tier": Refused(("auto", "default"), "leave it out: all turns are of one tier"),
        "moderation": Refused((), "the service does not moderate: leave it out"),
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
        """How much the model is to think; None if the client does not say."""
        return None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template; those that are named count before the effort."""
        return {**effort_arguments(self.effort), **self.chat_template_kwargs}

    @property
    def cache_key(self) -> str:
        """The client's name of the conversation, see `agents.py`; "" if it says none."""
        return self.prompt_cache_key

    @property
    def retention(self) -> Retention:
        """For how long the client wants the session to be kept at least: the longer of two ways."""
        options, is_long = self.prompt_cache_options, self.prompt_cache_retention == LONG
        return Retention(max(options.ttl_s if options else 0.0, LONG_S if is_long else 0.0))
