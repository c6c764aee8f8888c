"""Slots that bound the HTTP requests served at once, and the reading of their bodies.

The number of requests is bounded because each may hold a body in memory. A request whose body has
not arrived may lose its slot: when all slots are taken, and more than half of them wait for bodies
of one client, a request of another client takes the slot of the oldest of these. So a client that
sends headers and no bodies, again and again, leaves slots for the others. A client that sends many
complete requests at once may use all slots.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from aiohttp import HttpVersion11, hdrs, web

from inference_svc.http_api.errors import (
    InvalidJsonError,
    RequestError,
    RequestTooLargeError,
    SlowRequestError,
    TooManyRequestsError,
    UnsupportedValueError,
)
from inference_svc.openai_settings import OpenAISettings
from shared.access.identity import current_identity

CONTINUE = "100-continue"
RETRY_S = 1.0  # seconds after which a refused client may try again


@dataclass(frozen=True)
class JsonBody:
    """A request's body.

    Attributes:
        values: the JSON object.
        digest: digest of the body's bytes.
    """

    values: dict[str, Any]
    digest: bytes


async def read_body(request: web.Request) -> JsonBody:
    """Read and decode a body; the caller bounds the time.

    Raises:
        RequestError: it is no JSON object, or does not arrive as its headers say.
        RequestTooLargeError: it is too large; raised before reading if its headers say so.
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedValueError(
            "compressed bodies are not supported", "send the body without Content-Encoding"
        )
    if (request.content_length or 0) > request.client_max_size:
        raise _too_large()
    try:
        await _ask_for_body(request)
        data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large() from error
    except web.RequestPayloadError:  # not chained: its text, and its cause's, is the client's bytes
        raise RequestError(
            "the body is incomplete, or its chunks are malformed", "send it again"
        ) from None
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return JsonBody(parse_object(data), digest)


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode the bytes of a body.

    Raises:
        InvalidJsonError: it is not a JSON object of Unicode text.
    """
    try:
        text = body.decode("utf-8-sig")
        found = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # an escape can be a lone surrogate, which cannot be encoded
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidJsonError(
            f"the body is not JSON ({reason:.120})", "send one JSON object in UTF-8"
        ) from error
    if not isinstance(found, dict):
        raise InvalidJsonError("the body is not a JSON object", "send one JSON object in UTF-8")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


async def delay_continue(request: web.Request) -> None:
    """Delay "100 Continue" until the client is authenticated and the body is wanted.

    Raises:
        HTTPExpectationFailed: the header Expect has another value.
    """
    if request.headers.get(hdrs.EXPECT, "").lower() != CONTINUE:
        raise web.HTTPExpectationFailed


async def _ask_for_body(request: web.Request) -> None:
    if request.version == HttpVersion11 and hdrs.EXPECT in request.headers:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as aiohttp does: the response has not begun


def _too_large() -> RequestTooLargeError:
    return RequestTooLargeError(
        "the body is too large", "send less, or raise openai.max_body_bytes"
    )


@dataclass(eq=False)
class _Slot:
    """The slot of one request.

    Attributes:
        request_id: Python's id of the request object.
        client: name of the client that sent it.
        wait: the timeout of its body; None before the body is read.
        is_lost: whether the slot was given to another client's request.
    """

    request_id: int
    client: str
    wait: asyncio.Timeout | None = None
    is_lost: bool = False


class RequestSlots:
    """The slots of the requests that are served at once.

    Args:
        settings: the section [openai].
    """

    def __init__(self, settings: OpenAISettings) -> None:
        self._most = settings.max_requests
        self._body_s = settings.body_s
        self._taken: dict[int, _Slot] = {}  # by request_id
        # Slots that wait for their bodies, the oldest first, by client: as many as are configured.
        self._unread: defaultdict[str, OrderedDict[_Slot, None]] = defaultdict(OrderedDict)

    @contextmanager
    def hold(self, request: web.Request) -> Iterator[None]:
        """Hold a slot for a request of the current client.

        Raises:
            TooManyRequestsError: none is free.
        """
        slot = _Slot(id(request), current_identity().name)
        if len(self._taken) >= self._most:
            self._free_unread(slot.client)
        self._taken[slot.request_id] = slot
        try:
            yield
        finally:
            self._taken.pop(slot.request_id, None)

    async def read(self, request: web.Request) -> JsonBody:
        """Wait for the body of a request that has a slot, and decode it.

        Raises:
            TooManyRequestsError: its slot was given away before the body arrived.
            SlowRequestError: the body did not arrive in time.
            RequestError: the body is invalid; see `read_body`.
        """
        slot = self._taken[id(request)]
        unread = self._unread[slot.client]
        unread[slot] = None
        try:
            async with asyncio.timeout(self._body_s) as slot.wait:
                return await read_body(request)
        except TimeoutError as error:
            if slot.is_lost:
                raise self._full_error(
                    f", most of them from {slot.client}, which has not sent their bodies",
                    "send the body of each request without delay",
                ) from error
            raise SlowRequestError(
                f"the body did not arrive within {self._body_s:g} s", "send it without delay"
            ) from error
        finally:
            unread.pop(slot, None)

    def _free_unread(self, client: str) -> None:
        """Free a slot that waits for a body of the client with the most such slots.

        Raises:
            TooManyRequestsError: that client is the caller, or has at most half of all slots.
        """
        most = max(self._unread, key=lambda name: len(self._unread[name]), default=client)
        if most == client or len(self._unread[most]) <= self._most // 2:
            raise self._full_error("", "come back")
        slot, _ = self._unread[most].popitem(last=False)
        slot.is_lost = True
        del self._taken[slot.request_id]
        assert slot.wait is not None, "what is unread is waited for"  # noqa: S101
        # Expiring its timeout ends the request's read; one that has expired raises when set again.
        if not slot.wait.expired():
            slot.wait.reschedule(asyncio.get_running_loop().time())

    def _full_error(self, detail: str, remedy: str) -> TooManyRequestsError:
        message = f"{self._most} requests are running{detail}, and no more are accepted"
        return TooManyRequestsError(message, remedy, retry_after_s=RETRY_S)
