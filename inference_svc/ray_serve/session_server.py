"""The deployment: each replica stands before one service of its machine, and passes calls on to it.

`app.py` makes a deployment of the class. Ray calls a method of the RPC's name for a call of gRPC,
and `__call__` for a request; the others are its hooks. A call that its client leaves is cancelled
here, and so at the service. A request that the service does not take goes to another replica; a
call of gRPC does not, for the words of its session are here.
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

from inference_svc.ray_serve.elsewhere import other_replicas
from inference_svc.ray_serve.local_service import (
    SERVICE,
    Asked,
    LocalService,
    ServiceAddress,
    ServiceError,
    claim_one,
)
from inference_svc.ray_serve.passing import (
    answered_headers,
    header_of,
    passed_headers,
    passed_metadata,
    session_of,
)
from inference_svc.ray_serve.reports import held_tokens, stats_of

MOST_SESSIONS = 1024  # told of by a replica: every router gets them with every report
# Ray's own setting, which its proxies and replicas have in their environment.
SESSION_HEADER_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"
SESSION_HEADER = "x-session-id"
OWN_NAME = "X-Session-Id"  # of an answer: the service's own name of the session
WAIT_S = 60.0
MAX_BODY_BYTES = 64 << 20  # services have a bound of their own, usually a smaller one
REFUSED = frozenset({502, 503})  # nothing was answered: another server may


class Head(NamedTuple):
    """What an answer begins with.

    Attributes:
        status: of HTTP.
        headers: that go back.
        body: all of it, where nothing follows.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes = b""


Part: TypeAlias = Head | bytes


class NoMessage:
    """Stands for an answer that there is none of: Ray's proxies send the status alone."""

    def SerializeToString(self) -> bytes:  # noqa: N802  # a message's, as Ray calls it
        """Return no bytes."""
        return b""


class SessionServer:
    """A replica.

    Args:
        services: of this machine, one for each replica that runs here; each a mapping with the keys
            of `ServiceAddress`. A replica takes the first that has none.
        most_sessions: used lately, that routers are told of.
        wait_s: how long to wait for the service at first: it may still load its model.

    Raises:
        ServiceError: each service has its replica.
    """

    def __init__(
        self,
        services: Sequence[Mapping[str, str]],
        most_sessions: int = MOST_SESSIONS,
        wait_s: float = WAIT_S,
    ) -> None:
        address, self._claim = claim_one([ServiceAddress.from_dict(one) for one in services])
        self._header = os.environ.get(SESSION_HEADER_VARIABLE, SESSION_HEADER)
        self._service = LocalService(address, most_sessions)
        self._others = other_replicas()
        self._wait_s: float | None = wait_s  # None: Ray has asked before
        self._noting: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End all connections, and leave the service to another replica."""
        await self._service.close()
        self._claim.close()

    # ------------------------------------------------------------------------------- Ray's hooks

    def record_replica_metadata(self) -> dict[str, str]:
        """Tell routers the name of the server, once."""
        return {"server": self._service.name}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Tell routers how the service is, each `request_routing_stats_period_s`."""
        return stats_of(await self._service.report())

    async def check_health(self) -> None:
        """Return while the service is there; one that drains is, and gets no new turns.

        Ray asks before a replica gets calls, and ends one that says no; then each
        `health_check_period_s`, and ends one that says no three times.

        Raises:
            ServiceError: it is not.
        """
        wait_s, self._wait_s = self._wait_s, None
        if wait_s is None:
            await self._service.check()
            return
        try:
            await self._service.wait(wait_s)
        except ServiceError:
            self._claim.close()  # the next replica comes before this process is gone
            raise

    # -------------------------------------------------------------------------------------- gRPC

    async def pass_single(self, name: str, request: Any, context: Any) -> Any:
        """Pass on an RPC that has one answer."""
        metadata = passed_metadata(context.invocation_metadata())
        try:
            return await getattr(self._service.calls, name)(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return _failed(context, error)

    async def pass_stream(self, name: str, request: Any, context: Any) -> AsyncIterator[Any]:
        """Pass on an RPC that has a stream of answers."""
        metadata = passed_metadata(context.invocation_metadata())
        call = getattr(self._service.calls, name)(request, metadata=metadata)
        try:
            async for answer in call:
                if answer.WhichOneof("event") == "finished":
                    session = session_of(metadata) or request.session_id
                    self._service.sessions.used(session, held_tokens(answer.finished.usage))
                yield answer
        except grpc.aio.AioRpcError as error:
            yield _failed(context, error)
        finally:
            call.cancel()

    # -------------------------------------------------------------------------------------- HTTP

    async def __call__(self, request: Request) -> Response:
        """Pass on a request of OpenAI's or Anthropic's API, and its answer as it comes."""
        if not self._service.address.http:
            return _response(_refused(501, "not_served", "no HTTP here: `http` is not set"))
        body = await _body_of(request)
        if body is None:
            return _response(_refused(413, "too_large", f"send {MAX_BODY_BYTES:,} bytes at most"))
        asked = Asked(
            method=request.method,
            path=_path_of(request),
            headers=passed_headers(request.headers.raw),
            body=body,
            session=header_of(request.headers, self._header),
        )
        parts = self._answer_somewhere(asked)
        head = await anext(parts)
        return _response(head, cast("AsyncIterator[bytes]", parts))

    async def answer(self, asked: Asked, tried: Sequence[str] = ()) -> AsyncIterator[Part]:
        """Yield the head of the service's answer, then its body as it comes.

        Args:
            asked: the request.
            tried: servers that have refused it; routers read this, and send it to others.

        Raises:
            aiohttp.ClientError: the answer broke off.
        """
        del tried
        is_begun, own_name = False, ""
        try:
            async with self._service.request(asked) as response:
                is_begun = True
                yield Head(response.status, answered_headers(response.raw_headers))
                async for part in response.content.iter_any():
                    yield part
                own_name = response.headers.get(OWN_NAME, "") if response.ok else ""
        except aiohttp.ClientError as error:
            if is_begun:
                raise
            if isinstance(error, aiohttp.ClientConnectorError):
                yield _refused(503, "no_server", "the server takes no requests just now")
            else:
                yield _refused(502, "server_lost", "the server was lost before it answered")
        if asked.session and own_name:
            task = asyncio.create_task(self._service.note_session(asked.session, own_name))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    async def _answer_somewhere(self, asked: Asked) -> AsyncIterator[Part]:
        """Yield the service's answer; if it takes no requests, that of another server that does."""
        own = self.answer(asked)
        head = await anext(own)
        if isinstance(head, Head) and head.status in REFUSED and self._others is not None:
            refusal = [head, *[part async for part in own]]
            others = self._others.answer(asked, self._service.name)
            head = await anext(others, b"")
            if not isinstance(head, Head) or head.status in REFUSED:
                for part in refusal:
                    yield part
                return
            own = others
        yield head
        async for part in own:
            yield part


def _failed(context: Any, error: grpc.aio.AioRpcError) -> NoMessage:
    """Have an RPC end as it did at the service.

    Ray carries code and text of an exception, but not the metadata in which the reason is. What it
    carries with a message is complete: so there is one more, and `proxies.py` leaves it out.
    """
    context.set_code(error.code())
    context.set_details(error.details() or "")
    context.set_trailing_metadata(list(error.trailing_metadata() or ()))
    return NoMessage()


def _refused(status: int, code: str, message: str) -> Head:
    """Word an error as both APIs do."""
    is_passing = status in REFUSED
    kind = "overloaded_error" if status == 503 else "api_error"
    told = f"{message}: send it again" if is_passing else message
    error = {"type": kind, "code": code, "message": told}
    headers = [("content-type", "application/json")]
    if is_passing:
        headers.append(("retry-after", "1"))
    return Head(status, headers, json.dumps({"type": "error", "error": error}).encode())


def _response(head: Part, parts: AsyncIterator[bytes] | None = None) -> Response:
    """Make Ray's response of a head, and of what comes after it."""
    assert isinstance(head, Head)  # noqa: S101  # what comes first always is
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
    """Return all of a body, so that it can be sent to another server; None: it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _single(name: str) -> Callable[..., Any]:
    async def answer(self: SessionServer, request: Any, grpc_context: Any) -> Any:
        return await self.pass_single(name, request, grpc_context)

    return answer


def _stream(name: str) -> Callable[..., Any]:
    async def answer(self: SessionServer, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        async for one in self.pass_stream(name, request, grpc_context):
            yield one

    return answer


for _method in SERVICE.methods:  # each RPC that there is
    _make = _stream if _method.server_streaming else _single
    setattr(SessionServer, _method.name, _make(_method.name))
