"""AccessInterceptor: determines the caller of every RPC, before anything of the request is read.

A request of one message is read here, within a bounded time: a client that opens a call and then
sends nothing occupies its place for seconds only. Health's Check is open to all, but to few at
once. Reflection is open to known clients.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias

from shared.access.channels import AUTHORIZATION
from shared.access.clients import ClientBook, StreamCounts, authenticate
from shared.access.identity import Identity, act_as
from shared.process.log import RefusalLog, get_logger
from shared.serving.grpc_handlers import CallInterceptor, Handler, behaviour_of, make_handler
from shared.serving.rpc_observer import RpcMetrics
from shared.types.errors import (
    DeadlineError,
    DeniedError,
    ExhaustedError,
    InvalidInputError,
    ReportedError,
)

OPEN_METHOD = "/grpc.health.v1.Health/Check"
MAX_STRANGERS = 8  # health checks at once by callers that are not known
MAX_UNREAD = 128  # calls at once, of one client of a TCP port, whose message has not come
RETRY_S = 1.0
STRANGER = ""  # no client has this name
READ_S = 10.0  # from the start of a call to the end of its one message
AUDITED = "operator"  # the role whose calls change things: each is logged
MAX_NAMES, MAX_NAME = 4, 200  # of a certificate in a log line; names, and characters of each
_NAMES = ("x509_subject_alternative_name", "x509_common_name")  # keys of gRPC's auth context

log = get_logger(__name__)

Check: TypeAlias = Callable[[str, Identity, Any], None]


class RequestLateError(DeadlineError):
    """The one message of a call has not come in time."""

    reason = "request_late"


class TooManyCallsError(ExhaustedError):
    """Too many calls at once whose message has not come, of one client or of unknown callers."""

    reason = "too_many_calls"


def _no_check(_method: str, _identity: Identity, _request: Any) -> None:
    """Accept every request: the servicer checks it."""


class AccessInterceptor(CallInterceptor):
    """Runs each handler as its caller. It comes after shared.serving.grpc_status's interceptor.

    Args:
        book: the clients that may connect.
        roles: the role that a service requires, by its full name; other services require none.
        socket_identity: the identity of callers at this Unix socket; None for TCP.
        streams: limits the streams of clients at a TCP port; None: they are limited elsewhere.
        check: called before the handler with method, identity and what the handler takes: the one
            message, which it may change, or a stream, which it must leave alone. May raise a
            ReportedError.
        leaves_reading: lets grpc read the message before the caller is known. That saves 70 us of
            processor time, and is for a socket that only few may open.
        read_s: most seconds for the one message of a call.
        metrics: counts of refusals.
    """

    def __init__(
        self,
        book: ClientBook,
        roles: Mapping[str, str],
        socket_identity: Identity | None,
        *,
        streams: StreamCounts | None = None,
        check: Check = _no_check,
        leaves_reading: bool = False,
        read_s: float = READ_S,
        metrics: RpcMetrics | None = None,
    ) -> None:
        self._book = book
        self._roles = roles
        self._socket_identity = socket_identity
        self._streams = streams
        self._check = check
        self._leaves_reading = leaves_reading
        self._read_s = read_s
        self._unread: Counter[str] = Counter()  # by client
        self._max_unread = MAX_UNREAD if socket_identity is None else None
        self._metrics = metrics or RpcMetrics()
        self._refusals = RefusalLog()

    def wrap(self, handler: Any, method: str) -> Handler:
        """See CallInterceptor."""
        wrap = self._streaming if handler.response_streaming else self._single
        # Single requests become streams: otherwise grpc reads the message before it calls us.
        is_read_here = not handler.request_streaming and not self._leaves_reading
        return make_handler(
            wrap(method, behaviour_of(handler), is_read_here=is_read_here),
            handler.request_deserializer,
            handler.response_serializer,
            takes_stream=handler.request_streaming or is_read_here,
            gives_stream=handler.response_streaming,
        )

    def _single(self, method: str, behaviour: Any, *, is_read_here: bool) -> Any:
        role = self._role_for(method)

        async def answer(request: Any, context: Any) -> Any:
            identity = self._admit(method, role, context)
            if is_read_here:
                request = await self._read(request, identity)
            if identity is not None:
                self._check_request(method, identity, request, context)
            return await behaviour(request, context)

        return answer

    def _streaming(self, method: str, behaviour: Any, *, is_read_here: bool) -> Any:
        role = self._role_for(method)

        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            identity = self._admit(method, role, context)
            assert identity is not None, "OPEN_METHOD has one response"  # noqa: S101
            self._count_stream(identity, context)
            if is_read_here:
                request = await self._read(request, identity)
            self._check_request(method, identity, request, context)
            responses = behaviour(request, context)
            if inspect.isawaitable(responses):  # health's Watch writes to the context itself
                await responses
                return
            async for response in responses:
                yield response

        return answer

    def _role_for(self, method: str) -> str | None:
        """Return the role that a method requires; None: none."""
        return self._roles.get(method.split("/")[1])

    def _admit(self, method: str, role: str | None, context: Any) -> Identity | None:
        """Return the caller, after checking its role; None: an unknown caller's health check."""
        identity = None
        if self._socket_identity is None:
            self._metrics.tls.on_call(context.peer())
        try:
            identity = self._identify(context)
            if role is not None:
                identity.check_role(role)
            if role == AUDITED:
                log.info("operator_called", method=method, client=identity.name, via=identity.via)
        except ReportedError as error:
            if method == OPEN_METHOD:
                return None
            self._record_refusal(error, method, identity, context)
            raise
        act_as(identity)
        return identity

    def _identify(self, context: Any) -> Identity:
        """Return the identity of the caller by its socket, token or certificate."""
        clients = self._book.current
        if self._socket_identity is not None and not clients:
            return self._socket_identity
        metadata = context.invocation_metadata() or ()
        authorization = next((str(value) for key, value in metadata if key == AUTHORIZATION), "")
        return authenticate(
            clients, authorization, _certificate_names(context), self._socket_identity
        )

    def _record_refusal(
        self, error: ReportedError, method: str, identity: Identity | None, context: Any
    ) -> None:
        """Log and count a refused call, with its caller as far as that is known."""
        client = "" if identity is None else identity.name
        certificate = ",".join(_certificate_names(context)[:MAX_NAMES])[:MAX_NAME]
        self._metrics.refused.add(error.reason, client)
        self._refusals.note(
            error.reason,
            client,
            method=method,
            certificate=certificate,
            peer=context.peer(),
        )

    def _count_stream(self, identity: Identity, context: Any) -> None:
        if self._streams is None or self._socket_identity is not None:
            return
        streams = self._streams
        streams.hold(identity)
        # A callback, not `finally`: a generator abandoned at a yield is not closed in time.
        context.add_done_callback(lambda _: streams.release(identity))

    def _check_request(self, method: str, identity: Identity, request: Any, context: Any) -> None:
        """Check what the handler takes: the stream of requests, or the one request."""
        try:
            self._check(method, identity, request)
        except DeniedError as error:
            self._record_refusal(error, method, identity, context)
            raise

    async def _read(self, requests: Any, identity: Identity | None) -> Any:
        """Read the message of a call; of some callers only so many at once."""
        name = STRANGER if identity is None else identity.name
        most = MAX_STRANGERS if identity is None else self._max_unread
        if most is not None and self._unread[name] >= most:
            raise TooManyCallsError(
                f"{most} calls have not sent their message yet",
                "send the message together with the call",
                retry_after_s=RETRY_S,
            )
        self._unread[name] += 1
        try:
            async with asyncio.timeout(self._read_s):
                return await anext(requests)
        except StopAsyncIteration as error:
            raise InvalidInputError("the call has no message", "send one") from error
        except TimeoutError as error:
            raise RequestLateError(
                f"the message did not arrive within {self._read_s:g} s",
                "send it together with the call",
            ) from error
        finally:
            self._unread[name] -= 1
            if not self._unread[name]:
                del self._unread[name]


def _certificate_names(context: Any) -> list[str]:
    """Return the names in the caller's certificate, which its authority has signed."""
    found = context.auth_context()
    return [name.decode(errors="replace") for kind in _NAMES for name in found.get(kind, ())]
