"""What both of OpenAI's requests for a turn have in common."""

from abc import ABC
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field

from inference_svc.core.answers import MAX_TOP_LOGPROBS
from inference_svc.http_api.bodies import MOST_TOKENS, Refused, TurnBody

_NO_TOOLS = "the service has no tools: leave it out"

TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class OpenAITurnBody(TurnBody, ABC):
    """A chat's or a response's body.

    Attributes:
        top_logprobs: how many alternatives of each token; None if the client does not say.
        min_tokens, stop_token_ids: not OpenAI's, but vLLM's, which its clients send, too.
    """

    refused: ClassVar[Mapping[str, Refused]] = {
        "tools": Refused(([],), _NO_TOOLS),
        "tool_choice": Refused(("none", "auto"), _NO_TOOLS),
        "service_tier": Refused(("auto", "default"), "leave it out: all turns are of one tier"),
        "moderation": Refused((), "the service does not moderate: leave it out"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "max_tool_calls",
            "parallel_tool_calls",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "user",
        }
    )

    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    min_tokens: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    stop_token_ids: Annotated[list[TokenId], FailFast()] = Field(default_factory=list)

    @property
    def own_sampling(self) -> dict[str, Any]:
        """Sampling values that only OpenAI's requests have; see `TurnBody`."""
        return {
            "min_tokens": self.min_tokens,
            "stop_token_ids": tuple(self.stop_token_ids) or None,
        }
