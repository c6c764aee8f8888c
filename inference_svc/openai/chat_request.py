"""The body of POST /v1/chat/completions, decoded. Pure."""

from dataclasses import dataclass
from typing import Any

from inference_svc.openai.asked_turn import (
    IGNORED,
    MOST_TOKENS,
    REFUSED,
    AskedTurn,
    read_metadata,
    read_model,
    read_sampling,
    read_top_logprobs,
)
from inference_svc.openai.errors import RequestError
from inference_svc.openai.fields import Fields, Refused
from inference_svc.openai.messages import chat_messages

_TEXT_ONLY = "the service writes plain text only: leave it out"
_NO_REASONING = "the model does not reason apart from its answer: leave it out"
_REFUSED = {
    **REFUSED,
    "n": Refused((1,), "send the request several times: the history is computed once"),
    "audio": Refused((), _TEXT_ONLY),
    "modalities": Refused((["text"],), _TEXT_ONLY),
    "response_format": Refused(({"type": "text"},), _TEXT_ONLY),
    "verbosity": Refused(("medium",), "say it in a message"),
    "reasoning_effort": Refused(("none",), _NO_REASONING),
    "functions": Refused(([],), "the service has no tools: leave it out"),
    "function_call": Refused(("none", "auto"), "the service has no tools: leave it out"),
    "web_search_options": Refused((), "the service has no tools: leave it out"),
    "frequency_penalty": Refused((0,), "use repetition_penalty"),
    "presence_penalty": Refused((0,), "use repetition_penalty"),
    "logit_bias": Refused(({},), "leave it out"),
}


@dataclass(frozen=True)
class ChatRequest:
    """A decoded body.

    Attributes:
        includes_usage: a stream ends with a chunk that has the usage.
    """

    asked: AskedTurn
    includes_usage: bool


def decode_chat(body: dict[str, Any], temperature: float) -> ChatRequest:
    """Decode a body.

    Args:
        body: as it came.
        temperature: of a request that names none.

    Raises:
        RequestError: something is off, unknown or not supported.
    """
    fields = Fields(body)
    fields.refuse(_REFUSED)
    read_metadata(fields)
    top_logprobs = _top_logprobs(fields)
    options = fields.inner("stream_options")
    includes_usage = options.flag("include_usage")
    options.finish({"include_obfuscation"})
    asked = AskedTurn(
        model=read_model(fields),
        messages=chat_messages(fields.items("messages")),
        sampling=read_sampling(
            fields,
            max_tokens=_max_tokens(fields),
            temperature=temperature,
            top_logprobs=top_logprobs,
        ),
        is_streamed=fields.flag("stream"),
        is_kept=fields.flag("store", default=True),
        session_id=fields.text("session_id"),
        top_logprobs=top_logprobs,
    )
    fields.finish(IGNORED)
    return ChatRequest(asked, includes_usage)


def _max_tokens(fields: Fields) -> int | None:
    """The bound under its new name, or its old one."""
    new = fields.integer("max_completion_tokens", 1, MOST_TOKENS)
    old = fields.integer("max_tokens", 1, MOST_TOKENS)
    return old if new is None else new


def _top_logprobs(fields: Fields) -> int | None:
    top = read_top_logprobs(fields)
    if fields.flag("logprobs"):
        return top or 0
    if top:
        raise RequestError(
            "top_logprobs is given without logprobs", "send logprobs: true, too", "top_logprobs"
        )
    return None
