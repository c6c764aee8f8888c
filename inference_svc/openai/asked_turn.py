"""What a client asks for, whichever API it speaks. Pure.

Sampling is OpenAI's, with the service's own parameters beside it (`top_k`, `min_p`,
`repetition_penalty`, `ignore_eos`). A request that names no temperature gets the one of the
settings, which is OpenAI's default there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference_svc.core.answers import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS
from inference_svc.openai.errors import RequestError
from inference_svc.openai.fields import Fields, Refused
from inference_svc.openai.messages import Message
from shared.pb.inference.v1 import inference_pb2 as pb

MOST_TOKENS = 2**31 - 1
MAX_SEED = 2**63  # negative seeds are taken modulo it
MAX_METADATA = 16  # OpenAI's bounds
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512

# They change nothing that this service does.
IGNORED = frozenset(
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
_NO_TOOLS = "the service has no tools: leave it out"
REFUSED: Mapping[str, Refused] = {
    "tools": Refused(([],), _NO_TOOLS),
    "tool_choice": Refused(("none", "auto"), _NO_TOOLS),
    "service_tier": Refused(("auto", "default"), "leave it out: all turns are of one tier"),
    "moderation": Refused((), "the service does not moderate: leave it out"),
}


@dataclass(frozen=True)
class AskedTurn:
    """One request for an answer.

    Attributes:
        messages: the whole conversation, or what is new of it.
        is_kept: whether the session may be there afterwards (`store` is not false).
        session_id: that the client named; "" if it leaves it to its messages.
        top_logprobs: how many alternatives are shown of each token; None: not even its own.
        truncation: "" for the service's policy, "auto" or "disabled".
    """

    model: str
    messages: tuple[Message, ...]
    sampling: pb.Sampling
    is_streamed: bool = False
    is_kept: bool = True
    session_id: str = ""
    top_logprobs: int | None = None
    truncation: str = ""


def read_sampling(
    fields: Fields, *, max_tokens: int | None, temperature: float, top_logprobs: int | None
) -> pb.Sampling:
    """Read the parameters that both APIs share.

    Raises:
        RequestError: one is off.
    """
    given = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", 0, MOST_TOKENS),
        "min_p": fields.number("min_p", 0, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0, 100),
        "seed": fields.integer("seed", -MAX_SEED, MAX_SEED - 1),
        "max_tokens": max_tokens,
        # The engine reports a token's own log-probability with its most likely ones only.
        "logprobs": None if top_logprobs is None else max(1, top_logprobs),
    }
    if given["temperature"] is None:
        given["temperature"] = temperature
    if given["seed"] is not None:
        given["seed"] = int(given["seed"]) % MAX_SEED
    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return pb.Sampling(**known, stop=_stop(fields), ignore_eos=fields.flag("ignore_eos"))


def read_top_logprobs(fields: Fields) -> int | None:
    """How many alternatives of each token; None if the client does not say."""
    return fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)


def read_metadata(fields: Fields) -> dict[str, str]:
    """A client's own notes.

    Raises:
        RequestError: there are too many, or too long ones.
    """
    inner = fields.inner("metadata")
    notes = fields.any("metadata") or {}
    sizes_fit = len(notes) <= MAX_METADATA and all(len(name) <= MAX_METADATA_NAME for name in notes)
    read = {name: inner.text(name) for name in notes} if sizes_fit else {}
    if not sizes_fit or any(len(text) > MAX_METADATA_TEXT for text in read.values()):
        raise RequestError(
            "metadata is too long",
            f"send at most {MAX_METADATA} texts of {MAX_METADATA_TEXT} characters, under names "
            f"of {MAX_METADATA_NAME}",
            "metadata",
        )
    return read


def read_model(fields: Fields) -> str:
    """The model's name, which OpenAI demands, too."""
    model = fields.text("model")
    if not model:
        raise RequestError("model is missing", "name one of GET /v1/models", "model")
    return model


def _stop(fields: Fields) -> list[str]:
    given = fields.any("stop")
    if given is None or isinstance(given, str):
        return [given] if given else []
    texts = fields.items("stop")
    if len(texts) > MAX_STOP_STRINGS or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            "stop cannot be so", f"send a string, or at most {MAX_STOP_STRINGS} strings", "stop"
        )
    return texts
