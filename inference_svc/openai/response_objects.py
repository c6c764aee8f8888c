"""The response object of /v1/responses, and what is remembered to make it again. Pure.

*Source:* OpenAI API reference, "Responses"; beside it stands `session_id`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inference_svc.core.turn_record import Usage

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"
FAILED = "failed"


@dataclass(frozen=True)
class ResponseFacts:
    """What a response says beside its answer, all of which its turn's record does not have.

    Attributes:
        created_s: seconds of the epoch.
        model: as the client named it.
        instructions: their beginning.
        instructions_digest: of all of them.
        truncation: "auto" or "disabled".
    """

    created_s: float
    model: str
    instructions: str = ""
    instructions_digest: str = ""
    previous_id: str = ""
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    truncation: str = "auto"
    is_kept: bool = True
    top_logprobs: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)


def status_of_turn(finish_reason: str) -> str:
    """A turn's finish reason as a response's status."""
    return INCOMPLETE if finish_reason == "length" else COMPLETED


def response_object(
    response_id: str,
    session_id: str,
    facts: ResponseFacts,
    status: str,
    output: list[dict[str, Any]],
    usage: Usage | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A response as it stands."""
    is_cut = status == INCOMPLETE
    return {
        "id": response_id,
        "object": "response",
        "created_at": facts.created_s,
        "status": status,
        "background": False,
        "error": dict(error) if error else None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": facts.instructions or None,
        "max_output_tokens": facts.max_output_tokens,
        "metadata": dict(facts.metadata),
        "model": facts.model,
        "output": output,
        "parallel_tool_calls": False,
        "previous_response_id": facts.previous_id or None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": facts.is_kept,
        "temperature": facts.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "top_logprobs": facts.top_logprobs,
        "top_p": facts.top_p,
        "truncation": facts.truncation,
        "usage": response_usage(usage) if usage else None,
        "session_id": session_id,
    }


def message_item(
    response_id: str, status: str, parts: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The one item of a response's output."""
    return {
        "id": item_id(response_id),
        "type": "message",
        "status": COMPLETED if status == COMPLETED else status,
        "role": "assistant",
        "content": parts or [],
    }


def text_part(text: str, logprobs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The one part of that item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def item_id(response_id: str) -> str:
    """The id of a response's message."""
    return "msg_" + response_id.removeprefix("resp_")


def response_usage(usage: Usage) -> dict[str, Any]:
    """What it cost: tokens that were not computed again are `cached_tokens`."""
    input_tokens = usage.history_tokens + usage.new_tokens
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.reused_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + usage.output_tokens,
    }
