"""Slots of requests, and their bodies.

So many requests are served at once, and no more, for each may hold a body. One whose body has not
come may lose its slot: when all are taken, and more than half of them wait for bodies of one
client, a request of another client takes that of the oldest of these. So whoever sends headers and
then nothing, again and again, leaves slots for everybody else, and whoever sends many whole
requests at once has as many slots as there are.
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
RETRY_S = 1.0  # after a refusal


@dataclass(frozen=True)
class JsonBody:
    """A request's body.

    Attributes:
        values: the JSON object.
        digest: digest of the bytes.
    """

    values: dict[str, Any]
    digest: bytes


async def read_body(request: web.Request) -> JsonBody:
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
    return JsonBody(parse_object(data), digest)


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode the bytes of a body.

    Raises:
        InvalidJsonError: it is not a JSON object of Unicode text.
    """
    try:
        text = body.decode("utf-8-sig")
        found = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:  # escapes can write half a character, which is no text
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
    raise ValueError(f"{name} is no JSON")


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


@dataclass(eq=False)
class _Slot:
    """The slot of one request.

    Attributes:
        request_id: Python's id of the request.
        client: name of the client that sent it.
        wait: bounds the time until its body has come; None once it has.
        is_lost: whether another client's request has it now.
    """

    request_id: int
    client: str
    wait: asyncio.Timeout | None = None
    is_lost: bool = False


class RequestSlots:
    """Holds the requests that are served at once; see the module docstring.

    Args:
        settings: the section [openai].
    """

    def __init__(self, settings: OpenAISettings) -> None:
        self._most = settings.max_requests
        self._body_s = settings.body_s
        self._taken: dict[int, _Slot] = {}  # by request_id
        # By client, of which there are as many as the settings name; the oldest first.
        self._unread: defaultdict[str, OrderedDict[_Slot, None]] = defaultdict(OrderedDict)

    @contextmanager
    def taken(self, request: web.Request) -> Iterator[None]:
        """Hold a slot for a request of the current client.

        Raises:
            TooManyRequestsError: there is none.
        """
        slot = _Slot(id(request), current_identity().name)
        if len(self._taken) >= self._most:
            self._take_unread(slot.client)
        self._taken[slot.request_id] = slot
        try:
            yield
        finally:
            self._taken.pop(slot.request_id, None)

    async def read(self, request: web.Request) -> JsonBody:
        """Wait for the body of a request that has a slot, and decode it.

        Raises:
            TooManyRequestsError: its slot was needed before the body came.
            SlowRequestError: it does not come.
            RequestError: it is off; see `read_body`.
        """
        slot = self._taken[id(request)]
        unread = self._unread[slot.client]
        unread[slot] = None
        try:
            async with asyncio.timeout(self._body_s) as slot.wait:
                return await read_body(request)
        except TimeoutError as error:
            if slot.is_lost:
                raise self._full(
                    f", most of them of {slot.client}, whose bodies have not come",
                    "send each with its request",
                ) from error
            raise SlowRequestError(
                f"the body did not come within {self._body_s:g} s", "send it at once"
            ) from error
        finally:
            unread.pop(slot, None)

    def _take_unread(self, client: str) -> None:
        """Free the slot of a request whose body has not come.

        Raises:
            TooManyRequestsError: it has to keep it.
        """
        most = max(self._unread, key=lambda name: len(self._unread[name]), default=client)
        if most == client or len(self._unread[most]) <= self._most // 2:
            raise self._full("", "come back")
        slot, _ = self._unread[most].popitem(last=False)
        slot.is_lost = True
        del self._taken[slot.request_id]
        assert slot.wait is not None, "what is unread is waited for"  # noqa: S101
        if not slot.wait.expired():
            slot.wait.reschedule(asyncio.get_running_loop().time())

    def _full(self, whose: str, remedy: str) -> TooManyRequestsError:
        message = f"{self._most} requests are under way{whose}"
        return TooManyRequestsError(message, remedy, retry_after_s=RETRY_S)
