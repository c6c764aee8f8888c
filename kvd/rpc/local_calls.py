"""Local calls: the unary methods of a service over a stream socket, without gRPC (D16).

Between two processes of one machine gRPC takes milliseconds of a call, and most of kvd's processor
time. Handlers and interceptors are those of the gRPC server, so that a call is checked, counted,
traced and answered in the same way. `CallFrame` in the .proto file describes the messages.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from socket import socket
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from kvd.errors import LimitReachedError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.frames import FrameStream
from shared.process.log import get_logger
from shared.process.runtime_dir import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES
from shared.serving.grpc_handlers import CallInterceptor, Handler, with_behaviour
from shared.serving.grpc_status import DETAILS_KEY, too_large

log = get_logger(__name__)


class LocalCalls:
    """Answers calls of a service's unary methods.

    Args:
        add: function of the stubs that adds a servicer to a server.
        servicer: the servicer.
        interceptors: those of the service's gRPC server; the first one is the outermost.
        max_calls: most calls at once over one socket.
    """

    def __init__(
        self,
        add: Callable[[Any, Any], None],
        servicer: object,
        interceptors: Sequence[CallInterceptor],
        max_calls: int,
    ) -> None:
        self._max_calls = max_calls
        self._handlers: dict[str, Handler] = {}  # by the full name of the method
        self._refusals: dict[str, Handler] = {}  # what answers in their place if there are too many
        for method, handler in _unary_handlers(add, servicer).items():
            refusal = with_behaviour(handler, self._refuse)
            self._handlers[method] = _wrapped(handler, method, interceptors)
            self._refusals[method] = _wrapped(refusal, method, interceptors)

    async def serve(self, sock: socket) -> None:
        """Answer calls until the other side closes or breaks the protocol, or this is cancelled.

        Args:
            sock: a connected stream socket, ours from now on. Calls that are not answered at its
                end are cancelled.
        """
        running: dict[int, asyncio.Task[None]] = {}
        frames = FrameStream(
            lambda frame: self._take(frame, frames, running), MAX_FRAME_BYTES, is_patient=True
        )
        await frames.open(sock)
        try:
            await frames.ended
            if frames.fault:
                log.warning("local_calls_ended", reason=frames.fault)
        finally:
            frames.close()
            for answering in running.values():
                answering.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    def _take(
        self, frame: bytes, frames: FrameStream, running: dict[int, asyncio.Task[None]]
    ) -> None:
        """Begin the call of a frame, or cancel it."""
        try:
            call = pb.CallFrame.FromString(frame)
        except DecodeError:
            frames.close("this is no CallFrame")
            return
        known = running.get(call.number)
        if not call.method:
            if known is not None:
                known.cancel()
        elif known is not None:
            frames.close("the number of a running call is given to another one")
        elif (handler := self._handlers.get(call.method)) is None:
            code, why = grpc.StatusCode.UNIMPLEMENTED, f"no local method {call.method!r:.80}"
            frames.send(_failure(call.number, code, why).SerializeToString())
        else:
            if len(running) >= self._max_calls:
                handler = self._refusals[call.method]
            running[call.number] = asyncio.create_task(self._answer(call, handler, frames))
            running[call.number].add_done_callback(lambda _: running.pop(call.number))

    async def _answer(self, call: pb.CallFrame, handler: Any, frames: FrameStream) -> None:
        """Run a call, and send its answer.

        Args:
            call: the call.
            handler: the handler of its method, a Handler whose parts mypy takes for optional.
            frames: where the answer is sent.
        """
        context: Any = _Context(call)
        try:
            request = handler.request_deserializer(call.request)
            response = await handler.unary_unary(request, context)
            message = handler.response_serializer(response)
            answer = pb.AnswerFrame(number=call.number, response=message)
            if len(message) > MAX_MESSAGE_BYTES:
                why = too_large(len(message), MAX_MESSAGE_BYTES)
                answer = _failure(call.number, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        except grpc.aio.AbortError:
            answer = context.failure
        frames.send(answer.SerializeToString())

    async def _refuse(self, _request: Any, _context: Any) -> NoReturn:
        raise LimitReachedError(
            f"{self._max_calls} calls of this engine are running, too many for limits.max_rpcs",
            "let some of them end",
        )


class _Context:
    """What interceptors take from a gRPC call's context."""

    def __init__(self, call: pb.CallFrame) -> None:
        self.failure: pb.AnswerFrame  # set by abort
        self._call = call
        self._code: grpc.StatusCode | None = None
        self._until_s = time.monotonic() + call.timeout_s if call.timeout_s else None

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, bytes]] = (),
    ) -> NoReturn:
        """End the call with a status."""
        self._code = code
        status = dict(trailing_metadata).get(DETAILS_KEY, b"")
        self.failure = _failure(self._call.number, code, details, status)
        raise grpc.aio.AbortError

    def code(self) -> grpc.StatusCode | None:
        """Return the code with which the call was ended."""
        return self._code

    def time_remaining(self) -> float | None:
        """Return the seconds for which the caller still waits; None: it waits without end."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """Return what came with the call."""
        metadata = self._call.metadata
        return [(name, metadata[name]) for name in metadata]  # items() takes twice as long

    def peer(self) -> str:
        """Return where the call comes from, as gRPC names a Unix socket without a path."""
        return "unix:"

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return the caller's certificates: none on a Unix socket."""
        return {}


class _UnaryHandlers:
    """A server to which the stubs add a servicer: keeps its unary methods."""

    def __init__(self) -> None:
        self.found: dict[str, Handler] = {}

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Ignore the same handlers in another form."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Keep handlers of unary methods, by the full name of the method."""
        for name, handler in handlers.items():
            if handler.unary_unary is not None:
                self.found[f"/{service}/{name}"] = handler


def _unary_handlers(add: Callable[[Any, Any], None], servicer: object) -> Mapping[str, Handler]:
    server = _UnaryHandlers()
    add(servicer, server)
    return server.found


def _wrapped(handler: Handler, method: str, interceptors: Sequence[CallInterceptor]) -> Handler:
    """Wrap a handler in all interceptors, the first one outermost."""
    for interceptor in reversed(interceptors):
        handler = interceptor.wrap(handler, method)
    return handler


def _failure(number: int, code: grpc.StatusCode, why: str, status: bytes = b"") -> pb.AnswerFrame:
    return pb.AnswerFrame(number=number, code=code.value[0], message=why, status=status)
