"""POST /v1/embeddings: vectors of texts, by embedding models.

*Source:* OpenAI API reference, "Embeddings".
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from aiohttp import web
from pydantic import AfterValidator, BeforeValidator, Field

from inference_svc.core.submission import TextInput, TokenInput
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import (
    MOST_TOKENS,
    Count,
    ModelBody,
    WrongMemberError,
    check_named,
)
from inference_svc.http_api.replies import reply
from inference_svc.http_api.requests import caller_of
from inference_svc.runtime.turns.embeddings import Embedding

MOST_INPUTS = 2048  # OpenAI's bound
_REMEDY = f"send a text, token ids, or up to {MOST_INPUTS} of either"


def _to_inputs(raw: Any) -> list[TextInput | TokenInput]:
    """Convert one input, or a list of inputs, to a list; a validator."""
    if raw is None:
        raise WrongMemberError("{path} is missing", _REMEDY)
    is_one = isinstance(raw, str) or (isinstance(raw, list) and _are_ids(raw))
    found = [raw] if is_one else raw
    if not isinstance(found, list) or not 0 < len(found) <= MOST_INPUTS:
        raise WrongMemberError("{path} is not valid", _REMEDY)
    return [_to_input(each) for each in found]


def _to_input(raw: Any) -> TextInput | TokenInput:
    if isinstance(raw, str) and raw:
        return TextInput(raw)
    if isinstance(raw, list) and _are_ids(raw):
        return TokenInput(tuple(raw))
    problem = "an empty text" if raw == "" else "something else"
    raise WrongMemberError(f"{{path}} has {problem}", _REMEDY)


def _are_ids(raw: list[Any]) -> bool:
    return bool(raw) and all(type(each) is int and 0 <= each <= MOST_TOKENS for each in raw)


class EmbeddingsBody(ModelBody):
    """The body of POST /v1/embeddings.

    Attributes:
        input: the texts, or lists of token ids, to embed.
        encoding_format: how vectors are written: numbers, or base64 of little-endian float32.
        dimensions: number of a vector's first values to return; None: all.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})

    model: Annotated[str, AfterValidator(check_named)] = Field(default="", validate_default=True)
    input: Annotated[list[TextInput | TokenInput], BeforeValidator(_to_inputs)] = Field(
        default=None, validate_default=True
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None


async def create_embeddings(api: Api, request: web.Request) -> web.Response:
    """Embed one or several inputs, in the same batches as the turns of other clients."""
    body, caller = await api.read_body(request, EmbeddingsBody), caller_of(request)
    found = await api.gateway.embed(caller.identity, caller.tenant, body.input, body.dimensions)
    vectors = await asyncio.to_thread(_encode_vectors, found, body.encoding_format)
    num_tokens = sum(each.num_tokens for each in found)
    return reply(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors)
            ],
            "model": body.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _encode_vectors(found: Sequence[Embedding], encoding: str) -> list[str | list[float]]:
    if encoding == "base64":
        return [base64.b64encode(each.values.astype("<f4").tobytes()).decode() for each in found]
    return [each.values.tolist() for each in found]
