"""The body of POST /v1/responses, decoded. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from inference_svc.openai.errors import RequestError, UnsupportedValueError
from inference_svc.openai.fields import Fields, Refused
from inference_svc.openai.messages import SYSTEM, Message, input_messages

LOGPROBS = "message.output_text.logprobs"  # of `include`
_REFUSED = {
    **REFUSED,
    "background": Refused((False,), "keep the connection open while it is answered"),
    "background_options": Refused((), "leave it out"),
    "access_programs": Refused((), "leave it out"),
    "image": Refused((), "the service reads text only"),
    "conversation": Refused((), "use previous_response_id"),
    "prompt": Refused((), "send instructions and input"),
    "context_management": Refused(([],), "the service's [overflow] settings say what is dropped"),
    "reasoning": Refused(({}, {"effort": "none"}), "the model does not reason: leave it out"),
}


@dataclass(frozen=True)
class ResponseRequest:
    """A decoded body.

    Attributes:
        asked: its messages are the input alone; `messages` has the instructions, too.
        previous_id: of the response that this one follows; "" if it follows none.
        max_output_tokens: as the client said.
    """

    asked: AskedTurn
    instructions: str = ""
    previous_id: str = ""
    max_output_tokens: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        """Instructions and input as one list of messages."""
        leading = (Message(SYSTEM, self.instructions),) if self.instructions else ()
        return (*leading, *self.asked.messages)


def decode_response(body: dict[str, Any], temperature: float) -> ResponseRequest:
    """Decode a body.

    Args:
        body: as it came.
        temperature: of a request that names none.

    Raises:
        RequestError: something is off, unknown or not supported.
    """
    fields = Fields(body)
    fields.refuse(_REFUSED)
    _read_text(fields.inner("text"))
    fields.inner("stream_options").finish({"include_obfuscation"})
    max_tokens = fields.integer("max_output_tokens", 1, MOST_TOKENS)
    top_logprobs = _top_logprobs(fields)
    asked = AskedTurn(
        model=read_model(fields),
        messages=input_messages(fields.any("input")),
        sampling=read_sampling(
            fields, max_tokens=max_tokens, temperature=temperature, top_logprobs=top_logprobs
        ),
        is_streamed=fields.flag("stream"),
        is_kept=fields.flag("store", default=True),
        session_id=fields.text("session_id"),
        top_logprobs=top_logprobs,
        truncation=_truncation(fields),
    )
    request = ResponseRequest(
        asked,
        instructions=fields.text("instructions"),
        previous_id=fields.text("previous_response_id"),
        max_output_tokens=max_tokens,
        metadata=read_metadata(fields),
    )
    fields.finish(IGNORED)
    if request.previous_id and asked.session_id:
        raise RequestError(
            "both previous_response_id and a session are named",
            "name one of them: a response belongs to a session",
            "previous_response_id",
        )
    return request


def _read_text(text: Fields) -> None:
    text.refuse(
        {
            "format": Refused(({"type": "text"},), "the service writes plain text only"),
            "verbosity": Refused(("medium",), "say it in a message"),
        }
    )
    text.finish()


def _top_logprobs(fields: Fields) -> int | None:
    top = read_top_logprobs(fields)
    included = fields.items("include")
    for name in included:
        if name != LOGPROBS:
            raise UnsupportedValueError(
                f"include {str(name)[:60]!r} is not supported", f"send {LOGPROBS!r} only", "include"
            )
    return (top or 0) if included or top is not None else None


def _truncation(fields: Fields) -> str:
    truncation = fields.text("truncation")
    if truncation not in {"", "auto", "disabled"}:
        raise RequestError(
            f"truncation {truncation[:40]!r} cannot be", "send auto or disabled", "truncation"
        )
    return truncation
