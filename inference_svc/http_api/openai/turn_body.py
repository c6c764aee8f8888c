"""What OpenAI's chats and responses have in common."""

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from inference_svc.core.answers import MAX_TOP_LOGPROBS
from inference_svc.core.template_arguments import effort_arguments
from inference_svc.http_api.bodies.body import Refused
from inference_svc.http_api.bodies.template import Effort, TemplateArguments
from inference_svc.http_api.openai.tools import ToolsBody


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
            "prediction",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "user",
        }
    )

    prompt_cache_key: str = ""
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
