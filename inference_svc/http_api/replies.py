"""Replies to clients: objects, errors, and answers, whole or as server-sent events.

*Source:* WHATWG HTML, "Server-sent events".
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, ClassVar, Protocol

import structlog
from aiohttp import web

from inference_svc.core.turn_record import AnswerToken, Finished, Started
from inference_svc.http_api.errors import error_headers, status_of
from inference_svc.http_api.requests import REQUEST_IDS, SESSION, B, TurnRequest
from inference_svc.http_api.sessions.answers import LiveAnswer
from inference_svc.http_api.sessions.http_turn import HttpTurn
from inference_svc.openai_settings import OpenAISettings
from shared.process.log import get_logger
from shared.serving.grpc_status import InternalError
from shared.types.errors import ReportedError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies shall not collect events
}
PING = b": ping\n\n"  # a comment, which clients do not show
# Statuses after which the connection is closed: the request's body may not have been read.
CLOSES = frozenset({401, 408, 413, 429})

log = get_logger(__name__)


class AnswerObjects(Protocol):
    """Builds the JSON object or the stream events of one answer, in the format of an API."""

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> Mapping[str, Any]:
        """Build the object of an answer that is not streamed."""

    def opening(self, started: Started) -> Iterable[Mapping[str, Any]]:
        """Build the events of the beginning."""

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterable[Mapping[str, Any]]:
        """Build the events of the next tokens; there may be none."""

    def closing(self, finished: Finished) -> Iterable[Mapping[str, Any]]:
        """Build the events of the end."""

    def failure(self, error: ReportedError) -> Mapping[str, Any]:
        """Build the event of a turn that failed."""


class Streamed(Protocol):
    """A reply as a stream of events.

    Attributes:
        stream_end: bytes after the last event.
    """

    stream_end: ClassVar[bytes]

    def events(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the events of the stream."""

    def failure(self, error: ReportedError) -> Mapping[str, Any]:
        """Build the last event of a stream that fails."""


class Reply(Streamed, Protocol):
    """The reply to a request, whole or as a stream.

    Attributes:
        session_id: the session of the answer; of several answers, the first one's.
    """

    session_id: str

    async def whole(self) -> Mapping[str, Any]:
        """Return the whole reply, once it is complete."""


class OneAnswer:
    """A reply with the answer of one turn.

    Args:
        answer: the turn's answer.
        objects: builds its objects.
    """

    stream_end: ClassVar[bytes] = b""

    def __init__(self, answer: LiveAnswer, objects: AnswerObjects) -> None:
        self._answer = answer
        self._objects = objects
        self.session_id = answer.session_id

    async def whole(self) -> Mapping[str, Any]:
        """See Reply."""
        return self._objects.whole(*await self._answer.whole())

    async def events(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """See Reply."""
        for each in self._objects.opening(self._answer.started):
            yield each
        async for event in self._answer.events():
            objects = (
                self._objects.closing(event)
                if isinstance(event, Finished)
                else self._objects.piece(event.tokens)
            )
            for each in objects:
                yield each

    def failure(self, error: ReportedError) -> Mapping[str, Any]:
        """See Reply."""
        return self._objects.failure(error)


async def send_reply(
    turn_request: TurnRequest[B], turn: HttpTurn, result: Reply
) -> web.StreamResponse:
    """Send a reply, whole or as a stream, as the client asked; bind the request's log fields.

    Args:
        turn_request: the request.
        turn: its turn; of several turns, the first one.
        result: the reply.
    """
    headers = {SESSION: result.session_id, **dict.fromkeys(REQUEST_IDS, turn.request_id)}
    structlog.contextvars.bind_contextvars(
        session=result.session_id, request_id=turn.request_id, **turn_request.hints.log_fields
    )
    if not turn_request.body.stream:
        return reply(await result.whole(), headers)
    return await send_events(turn_request.request, turn_request.settings, result, headers)


async def send_events(
    request: web.Request,
    settings: OpenAISettings,
    result: Streamed,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Send the events of a reply.

    Args:
        request: the request.
        settings: the section [openai].
        result: the reply.
        headers: response headers beside those of every stream.
    """
    stream = EventStream(request, settings.write_s)
    await stream.open(headers)
    try:
        async with stream.pinging(settings.ping_s), aclosing(result.events()) as events:
            async for event in events:
                await stream.send(event)
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:  # noqa: BLE001  # the status was sent: report an event instead
        await stream.send(result.failure(reported(error)))
    await stream.end(result.stream_end)
    return stream.response


class EventStream:
    """Sends server-sent events to one client, and disconnects a client that does not read.

    Args:
        request: the request.
        write_s: seconds after which a blocked write ends the connection.
    """

    def __init__(self, request: web.Request, write_s: float) -> None:
        self._request = request
        self._write_s = write_s
        self._written_s = 0.0  # time of the last write, by the loop's clock
        self.response = web.StreamResponse(headers=HEADERS)

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.response.headers.update(headers)
        await self.response.prepare(self._request)

    async def send(self, *events: Mapping[str, Any]) -> None:
        """Send events; an event's `type`, if it has one, is also its name."""
        for event in events:
            name = b"event: %s\n" % str(event["type"]).encode() if "type" in event else b""
            await self._write(b"%sdata: %s\n\n" % (name, json_bytes(event)))

    @asynccontextmanager
    async def pinging(self, every_s: float) -> AsyncIterator[None]:
        """Inside the block, send a comment whenever nothing was sent for `every_s` seconds."""
        pinging = asyncio.create_task(self._ping(every_s))
        try:
            yield
        finally:
            pinging.cancel()
            await asyncio.wait({pinging})

    async def _ping(self, every_s: float) -> None:
        now_s = asyncio.get_running_loop().time
        self._written_s = now_s()
        with suppress(ConnectionError):  # the next event raises it to its sender
            while True:
                left_s = self._written_s + every_s - now_s()
                if left_s > 0:
                    await asyncio.sleep(left_s)
                else:
                    await self._write(PING)

    async def end(self, last: bytes = b"") -> None:
        """Send the last bytes, and close the stream."""
        if last:
            await self._write(last)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        self._written_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._write_s):
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read the response") from error


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """Encode compact JSON without line breaks; lone surrogates (of a path's bytes) become "?"."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def reply(data: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> web.Response:
    """Return the JSON response with an object."""
    return web.Response(body=json_bytes(data), content_type="application/json", headers=headers)


def refusal(error: ReportedError, body: Mapping[str, Any]) -> web.Response:
    """Return the response with an error, whose body is made for the client's API."""
    status = status_of(error)
    structlog.contextvars.bind_contextvars(error=error.reason)
    response = web.Response(
        status=status,
        body=json_bytes(body),
        content_type="application/json",
        headers=error_headers(error),
    )
    if status in CLOSES:
        response.force_close()
    return response


def reported(error: Exception) -> ReportedError:
    """Return the error that clients see; an unexpected one is logged, and becomes InternalError."""
    if isinstance(error, ReportedError):
        return error
    log.error("http_request_failed", exc_info=error)
    return InternalError("internal error", "the log of the service says more")
