"""The replica class: each replica forwards calls to one inference service on its machine.

`app.py` makes a deployment of the class. For a gRPC call, Ray calls the method with the RPC's
name; for an HTTP request, it calls `__call__`; other methods are Ray's hooks. If a client leaves,
its call is cancelled here and at the service. An HTTP request that the service refuses is sent to
another replica. A gRPC call is not, because its session's transcript is on this server.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import aiohttp
import grpc
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from inference_svc.ray_serve.forwarding import (
    forwarded_headers,
    forwarded_metadata,
    header_of,
    response_headers,
    session_of,
)
from inference_svc.ray_serve.local_service import (
    SERVICE,
    Asked,
    LocalService,
    ServiceAddress,
    ServiceError,
    claim_one,
)
from inference_svc.ray_serve.other_replicas import other_replicas
from inference_svc.ray_serve.reports import held_tokens, stats_of

MOST_SESSIONS = 1024  # sessions of a report: every router gets all of them with every report
# A setting of Ray, in the environment of its proxies and replicas.
SESSION_HEADER_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"
SESSION_HEADER = "x-session-id"  # Ray's default
OWN_NAME = "X-Session-Id"  # response header with the service's name of the session
WAIT_S = 60.0  # for the service at the start of a replica
MAX_BODY_BYTES = 64 << 20  # the service has a bound of its own, usually a smaller one
REFUSED = frozenset({502, 503})  # statuses without any answer: another server can be tried


class Head(NamedTuple):
    """The beginning of an HTTP response.

    Attributes:
        status: HTTP status.
        headers: headers to send back.
        body: the whole body if no parts follow.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes = b""


Part: TypeAlias = Head | bytes


class NoMessage:
    """A placeholder for the message of a failed call: Ray's proxies then send the status alone."""

    def SerializeToString(self) -> bytes:  # noqa: N802  # protobuf's name, which Ray calls
        """Return no bytes."""
        return b""


class SessionServer:
    """A replica, which forwards calls to its service.

    Args:
        services: the services of this machine, one for each replica on it, as mappings with the
            keys of `ServiceAddress`. The replica claims the first one without a replica.
        most_sessions: most recently used sessions that are reported to routers.
        wait_s: seconds to wait for the service at the start: it may still load its model.

    Raises:
        ServiceError: each service has its replica.
    """

    def __init__(
        self,
        services: Sequence[Mapping[str, str]],
        most_sessions: int = MOST_SESSIONS,
        wait_s: float = WAIT_S,
    ) -> None:
        address, self._claim = claim_one(
            [ServiceAddress.from_dict(service) for service in services]
        )
        self._header = os.environ.get(SESSION_HEADER_VARIABLE, SESSION_HEADER)
        self._service = LocalService(address, most_sessions)
        self._others = other_replicas()
        self._wait_s: float | None = wait_s  # None after Ray's first health check
        self._noting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close all connections, and release the service for another replica."""
        await self._service.close()
        self._claim.close()

    # ------------------------------------------------------------------------------- Ray's hooks

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the server's name for routers; Ray calls it once."""
        return {"server": self._service.name}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the service's report for routers, every `request_routing_stats_period_s`."""
        return stats_of(await self._service.report())

    async def check_health(self) -> None:
        """Check that the service answers; one that drains does, and gets no new turns.

        Ray checks a replica before it gets calls, and ends it if that fails; then every
        `health_check_period_s`, and ends it after three failures.

        Raises:
            ServiceError: the service does not answer.
        """
        wait_s, self._wait_s = self._wait_s, None
        if wait_s is None:
            await self._service.check()
            return
        try:
            await self._service.wait(wait_s)
        except ServiceError:
            self._claim.close()  # Ray starts the next replica before this process has ended
            raise

    # -------------------------------------------------------------------------------------- gRPC

    async def pass_single(self, name: str, request: Any, context: Any) -> Any:
        """Forward an RPC with one answer."""
        metadata = forwarded_metadata(context.invocation_metadata())
        try:
            return await getattr(self._service.calls, name)(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return _set_failure(context, error)

    async def pass_stream(self, name: str, request: Any, context: Any) -> AsyncIterator[Any]:
        """Forward an RPC with a stream of answers."""
        metadata = forwarded_metadata(context.invocation_metadata())
        call = getattr(self._service.calls, name)(request, metadata=metadata)
        try:
            async for answer in call:
                if answer.WhichOneof("event") == "finished":
                    session = session_of(metadata) or request.session_id
                    self._service.sessions.record_use(session, held_tokens(answer.finished.usage))
                yield answer
        except grpc.aio.AioRpcError as error:
            yield _set_failure(context, error)
        finally:
            call.cancel()

    # -------------------------------------------------------------------------------------- HTTP

    async def __call__(self, request: Request) -> Response:
        """Forward a request to OpenAI's or Anthropic's API, and stream its answer back."""
        if not self._service.address.http:
            return _response(
                _error_head(501, "not_served", "HTTP is not served here, because `http` is not set")
            )
        body = await _body_of(request)
        if body is None:
            return _response(
                _error_head(
                    413,
                    "too_large",
                    f"the body is too large: send at most {MAX_BODY_BYTES:,} bytes",
                )
            )
        asked = Asked(
            method=request.method,
            path=_path_of(request),
            headers=forwarded_headers(request.headers.raw),
            body=body,
            session=header_of(request.headers, self._header),
        )
        parts = self._answer_with_fallback(asked)
        head = await anext(parts)
        return _response(head, cast("AsyncIterator[bytes]", parts))

    async def answer(self, asked: Asked, tried: Sequence[str] = ()) -> AsyncIterator[Part]:
        """Yield the head of the service's answer, then its body as it arrives.

        Args:
            asked: the request.
            tried: servers that have refused it; read by routers, which then choose other servers.

        Raises:
            aiohttp.ClientError: the connection broke in the middle of the answer.
        """
        del tried
        is_begun, own_name = False, ""
        try:
            async with self._service.request(asked) as response:
                is_begun = True
                yield Head(response.status, response_headers(response.raw_headers))
                async for part in response.content.iter_any():
                    yield part
                own_name = response.headers.get(OWN_NAME, "") if response.ok else ""
        except aiohttp.ClientError as error:
            if is_begun:
                raise
            if isinstance(error, aiohttp.ClientConnectorError):
                yield _error_head(
                    503, "no_server", "the server does not accept requests at the moment"
                )
            else:
                yield _error_head(
                    502, "server_lost", "the connection to the server broke before it answered"
                )
        if asked.session and own_name:
            task = asyncio.create_task(self._service.record_session(asked.session, own_name))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    async def _answer_with_fallback(self, asked: Asked) -> AsyncIterator[Part]:
        """Yield the service's answer; if the service refuses the request, another server's."""
        own_parts = self.answer(asked)
        head = await anext(own_parts)
        if isinstance(head, Head) and head.status in REFUSED and self._others is not None:
            refusal = [head, *[part async for part in own_parts]]
            other_parts = self._others.answer(asked, self._service.name)
            head = await anext(other_parts, b"")
            if not isinstance(head, Head) or head.status in REFUSED:
                for part in refusal:
                    yield part
                return
            own_parts = other_parts
        yield head
        async for part in own_parts:
            yield part


def _set_failure(context: Any, error: grpc.aio.AioRpcError) -> NoMessage:
    """Set an RPC's status, details and trailing metadata to those of the service's error.

    With an exception, Ray transmits code and text, but not the metadata that has the reason. With
    a message it transmits everything. So the error is sent with a message, which `proxies.py`
    drops.
    """
    context.set_code(error.code())
    context.set_details(error.details() or "")
    context.set_trailing_metadata(list(error.trailing_metadata() or ()))
    return NoMessage()


def _error_head(status: int, code: str, message: str) -> Head:
    """Return an error response in a format that clients of both APIs read."""
    is_transient = status in REFUSED
    kind = "overloaded_error" if status == 503 else "api_error"
    text = f"{message}: send it again" if is_transient else message
    error = {"type": kind, "code": code, "message": text}
    headers = [("content-type", "application/json")]
    if is_transient:
        headers.append(("retry-after", "1"))
    return Head(status, headers, json.dumps({"type": "error", "error": error}).encode())


def _response(head: Part, parts: AsyncIterator[bytes] | None = None) -> Response:
    """Return the Starlette response of a head, and of the parts after it."""
    assert isinstance(head, Head)  # noqa: S101  # `answer` yields the head first
    if head.body or parts is None:
        response = Response(head.body, head.status)
    else:
        response = StreamingResponse(parts, head.status)
    response.raw_headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in head.headers
    ]
    return response


def _path_of(request: Request) -> str:
    """Return path and query as the client wrote them, without the application's prefix."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    path = raw.decode("latin-1").removeprefix(request.scope.get("root_path", ""))
    query = request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def _body_of(request: Request) -> bytes | None:
    """Return a whole body, so that it can be sent to another server; None if it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _unary_method(name: str) -> Callable[..., Any]:
    async def answer(self: SessionServer, request: Any, grpc_context: Any) -> Any:
        return await self.pass_single(name, request, grpc_context)

    return answer


def _stream_method(name: str) -> Callable[..., Any]:
    async def answer(self: SessionServer, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        async for answer_part in self.pass_stream(name, request, grpc_context):
            yield answer_part

    return answer


# A method for each RPC: Ray finds the methods of a deployment by their names.
for _method in SERVICE.methods:
    _make = _stream_method if _method.server_streaming else _unary_method
    setattr(SessionServer, _method.name, _make(_method.name))
