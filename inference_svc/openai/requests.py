"""What every request has in common: who sent it, its body, its headers."""

import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import HttpVersion11, hdrs, web

from inference_svc.core.truncation import OLDEST, REJECT, OverflowPolicy
from inference_svc.openai.asked_turn import AskedTurn
from inference_svc.openai.errors import (
    RequestError,
    RequestTooLargeError,
    UnsupportedValueError,
)
from inference_svc.openai.fields import parse_object
from inference_svc.openai.history_chain import HistoryChain
from inference_svc.openai.messages import Message
from inference_svc.openai.places import Caller
from inference_svc.openai.wanted_turn import WantedTurn
from shared.access.identity import current_identity

PROJECT = "OpenAI-Project"  # names the tenant
SESSION = "X-Session-Id"
REPEAT = "Idempotency-Key"
REQUEST_ID = "x-request-id"
CONTINUE = "100-continue"
MAX_HEADER = 256  # characters of one of ours


@dataclass(frozen=True)
class Body:
    """A request's body.

    Attributes:
        values: the JSON object.
        digest: of the bytes.
    """

    values: dict[str, Any]
    digest: bytes


def caller_of(request: web.Request) -> Caller:
    """Who sent it, and the tenant that it is for.

    Raises:
        TenantDeniedError: the client may not use that tenant.
    """
    identity = current_identity()
    tenant = identity.tenant(header_of(request, PROJECT))
    structlog.contextvars.bind_contextvars(tenant=tenant)
    return Caller(identity, tenant)


def header_of(request: web.Request, name: str) -> str:
    """A header of printable ASCII; "" if there is none.

    Raises:
        RequestError: it is something else.
    """
    value = request.headers.get(name, "")
    if len(value) > MAX_HEADER or not (value.isascii() and value.isprintable()):
        raise RequestError(
            f"the header {name} cannot be so", f"send up to {MAX_HEADER} printable ASCII characters"
        )
    return value


async def read_body(request: web.Request) -> Body:
    """Read and decode a body; whoever calls bounds the time.

    Raises:
        RequestError: it is no JSON object, or it does not come as its headers say.
        RequestTooLargeError: it is larger than it may be: at once, if its headers say so.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedValueError("compressed bodies are not supported", "send it as it is")
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large()
    try:
        await _ask_for_body(request)
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large() from error
    except web.RequestPayloadError:  # its text, and its cause's, is what was sent
        raise RequestError(
            "the body ends early, or its chunks are broken", "send it again"
        ) from None
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return Body(parse_object(data), digest)


async def expect_nothing_yet(request: web.Request) -> None:
    """Leave a client that waits for leave to send its body waiting, until it is known who asks.

    Raises:
        HTTPExpectationFailed: it expects something else.
    """
    if request.headers.get(hdrs.EXPECT, "").lower() != CONTINUE:
        raise web.HTTPExpectationFailed


async def _ask_for_body(request: web.Request) -> None:
    if request.version == HttpVersion11 and hdrs.EXPECT in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as aiohttp does: the answer has not begun


def _too_large() -> RequestTooLargeError:
    return RequestTooLargeError(
        "the body is larger than the service takes", "send less, or raise openai.max_body_bytes"
    )


def session_name(request: web.Request, asked: AskedTurn) -> str:
    """The session that the client named, in the body or in a header.

    Raises:
        RequestError: they differ, or it is not to be stored.
    """
    header = header_of(request, SESSION)
    if header and asked.session_id not in {"", header}:
        raise RequestError(
            f"{SESSION} and session_id name different sessions", "name one", "session_id"
        )
    name = header or asked.session_id
    if name and not asked.is_kept:
        raise RequestError("a session is named that is not to be stored", "leave one out", "store")
    return name


def wanted_turn(
    request: web.Request,
    body: Body,
    asked: AskedTurn,
    messages: tuple[Message, ...],
    chain: HistoryChain,
    overflow: OverflowPolicy,
) -> WantedTurn:
    """What is asked for, of whichever API.

    Args:
        request: for its headers.
        body: of the request.
        asked: as it was decoded.
        messages: all that tell the history.
        chain: of the caller's histories.
        overflow: policy of turns that name none.
    """
    repeat = header_of(request, REPEAT)
    key = bytes.fromhex(chain.id_of("repeat", request.path, repeat)) if repeat else None
    names = (request.path, repeat, body.digest.hex()) if repeat else (uuid.uuid4().hex,)
    return WantedTurn(
        messages=messages,
        sampling=asked.sampling,
        session_id=session_name(request, asked),
        is_kept=asked.is_kept,
        overflow=_overflow(asked.truncation, overflow.name),
        request_id="r-" + chain.id_of("request", *names),
        body=body.digest,
        repeat_key=key,
    )


def _overflow(truncation: str, default: str) -> str:
    """OpenAI's word as a policy's name; "" for the service's."""
    if truncation == "disabled":
        return REJECT
    return OLDEST if truncation == "auto" and default == REJECT else ""
