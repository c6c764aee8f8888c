"""LocalChannel: what kvd's generated stub takes in place of gRPC's channel (D16).

Unary calls go over a socket of the attachment, without gRPC; streams go over gRPC. A call behaves
as one of gRPC does: it ends with an answer, with grpc.aio.AioRpcError, or when it is cancelled.
"""

import asyncio
import math
import os
from collections.abc import Callable
from functools import partial
from socket import socket
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.frames import FrameStream
from shared.process.log import get_logger
from shared.process.runtime_dir import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES
from shared.serving.grpc_status import DETAILS_KEY, too_large
from shared.serving.tracing import Metadata

_CODES = {code.value[0]: code for code in grpc.StatusCode}

UnaryCall: TypeAlias = Callable[..., "asyncio.Future[Any]"]

log = get_logger(__name__)


class LocalChannel:
    """A channel to a kvd on this machine.

    Args:
        streams: gRPC's channel to the same service; the caller closes it.

    Attributes:
        unary_stream, stream_unary, stream_stream: gRPC's.
    """

    def __init__(self, streams: grpc.aio.Channel) -> None:
        self.unary_stream = streams.unary_stream
        self.stream_unary = streams.stream_unary
        self.stream_stream = streams.stream_stream
        self._frames = FrameStream(self._take, MAX_FRAME_BYTES)
        self._waiting: dict[int, _Waiting] = {}  # by the call's number
        self._last_number = 0
        # One timer for all calls, because almost none needs it: it fires at the earliest deadline
        # of those that waited when it was set.
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, fd: int) -> None:
        """Call over a connected stream socket, whose descriptor is ours from now on.

        Raises:
            ValueError: it is another descriptor; it is closed.
        """
        try:
            sock = socket(fileno=fd)
        except OSError as error:
            os.close(fd)
            raise ValueError("the descriptor for calls is no socket") from error
        await self._frames.open(sock)
        self._frames.ended.add_done_callback(lambda _: self._end_calls())

    async def wait_ended(self) -> None:
        """Wait until kvd has closed the socket, or it was closed here."""
        await asyncio.shield(self._frames.ended)

    def close(self) -> None:
        """Close the socket; calls that are under way fail."""
        self._frames.close()

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **_options: object,
    ) -> UnaryCall:
        """Return a function that calls a method, as gRPC's channel does.

        It sends the call at once, and returns the future of its response. To cancel that cancels
        the call. There is no task for it: that would take further turns of the event loop.
        """

        def call(
            request: Any, *, timeout: float | None = None, metadata: Metadata | None = None
        ) -> asyncio.Future[Any]:
            loop = asyncio.get_running_loop()
            response: asyncio.Future[Any] = loop.create_future()
            timeout_s = math.inf if timeout is None else timeout
            message = request_serializer(request)
            if (failure := self._reason_not_to_send(message, timeout_s)) is not None:
                # In the loop's next turn: a caller that tries again at once must not keep the loop
                # from noticing that kvd has gone.
                loop.call_soon(_fail, response, failure)
                return response
            self._last_number += 1
            number = self._last_number
            until_s = loop.time() + timeout_s
            self._waiting[number] = _Waiting(
                response, method, response_deserializer, timeout_s, until_s
            )
            self._set_timer(until_s)
            response.add_done_callback(partial(self._stop_waiting, number))
            frame = pb.CallFrame(
                number=number,
                method=method,
                request=message,
                timeout_s=timeout or 0.0,
            )
            for name, value in metadata or ():
                frame.metadata[name] = value
            self._frames.send(frame.SerializeToString())
            return response

        return call

    def _reason_not_to_send(self, message: bytes, timeout_s: float) -> grpc.aio.AioRpcError | None:
        if len(message) > MAX_MESSAGE_BYTES:
            why = too_large(len(message), MAX_MESSAGE_BYTES)
            return _error(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        if self._frames.ended.done():
            why = "kvd has closed the socket of local calls"
            return _error(grpc.StatusCode.UNAVAILABLE, why)
        if timeout_s <= 0:
            return _error(grpc.StatusCode.DEADLINE_EXCEEDED, "the time for the call is over")
        return None

    def _set_timer(self, until_s: float) -> None:
        """Have late calls ended at a time of the event loop, if that is not done before."""
        if until_s == math.inf or (self._timer is not None and self._timer.when() <= until_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(until_s, self._end_late_calls)

    def _end_late_calls(self) -> None:
        """Fail the calls that have no answer in time."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for waiting in self._waiting.values():
            if waiting.until_s > now_s:
                self._set_timer(waiting.until_s)
            elif not waiting.response.done():
                why = f"no answer within {waiting.timeout_s:g} s"
                waiting.response.set_exception(_error(grpc.StatusCode.DEADLINE_EXCEEDED, why))

    def _stop_waiting(self, number: int, _response: asyncio.Future[Any]) -> None:
        """Forget a call that has ended; without an answer, tell kvd that nobody waits any more."""
        if self._waiting.pop(number, None) is not None:
            self._frames.send(pb.CallFrame(number=number).SerializeToString())

    def _take(self, frame: bytes) -> None:
        """Give an answer to its caller; an answer that nobody waits for any more is dropped."""
        try:
            answer = pb.AnswerFrame.FromString(frame)
        except DecodeError:
            self._frames.close("this is no AnswerFrame")
            return
        waiting = self._waiting.pop(answer.number, None)
        if waiting is not None and not waiting.response.done():
            waiting.end_with(answer)

    def _end_calls(self) -> None:
        """Fail the calls that are under way; log why, if kvd has broken the protocol."""
        if self._timer is not None:
            self._timer.cancel()
        if self._frames.fault:
            log.warning("kvd_answer_unreadable", reason=self._frames.fault)
        for waiting in self._waiting.values():
            if not waiting.response.done():
                waiting.response.set_exception(
                    _error(grpc.StatusCode.UNAVAILABLE, "kvd closed the socket during the call")
                )
        self._waiting.clear()


class _Waiting(NamedTuple):
    """A call whose answer has not come."""

    response: asyncio.Future[Any]
    method: str
    deserialize: Callable[[bytes], Any]
    timeout_s: float
    until_s: float  # on the event loop's clock

    def end_with(self, answer: pb.AnswerFrame) -> None:
        """Give the answer to the caller."""
        if answer.code:
            code = _CODES.get(answer.code, grpc.StatusCode.UNKNOWN)
            self.response.set_exception(_error(code, answer.message, answer.status))
            return
        try:
            response = self.deserialize(answer.response)
        except DecodeError:
            why = f"kvd's answer to {self.method} cannot be decoded"
            self.response.set_exception(_error(grpc.StatusCode.INTERNAL, why))
        else:
            self.response.set_result(response)


def _fail(response: asyncio.Future[Any], failure: grpc.aio.AioRpcError) -> None:
    """Fail a call, unless it was cancelled."""
    if not response.done():
        response.set_exception(failure)


def _error(code: grpc.StatusCode, text: str, status: bytes = b"") -> grpc.aio.AioRpcError:
    """Return the error that gRPC's client raises for a status."""
    trailing = grpc.aio.Metadata(*(((DETAILS_KEY, status),) if status else ()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text, "")
