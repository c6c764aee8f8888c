"""LocalChannel: what kvd's generated stub takes in place of gRPC's channel (D16).

Unary calls go over a socket of the attachment, without gRPC; streams go over gRPC. A call behaves
as one of gRPC does: it ends with an answer, with grpc.aio.AioRpcError, or when it is cancelled.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from socket import socket
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.frames import FrameStream
from shared.process.log import get_logger
from shared.process.runtime_dir import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES
from shared.serving.grpc_status import DETAILS_KEY, too_large
from shared.serving.tracing import Metadata

_CODES = {code.value[0]: code for code in grpc.StatusCode}

UnaryCall: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

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
        self._waiting: dict[int, asyncio.Future[pb.AnswerFrame]] = {}  # by the call's number
        self._last_number = 0

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
        """Return a function that calls a method, as gRPC's channel does."""

        async def call(
            request: Any, *, timeout: float | None = None, metadata: Metadata | None = None
        ) -> Any:
            message = request_serializer(request)
            if len(message) > MAX_MESSAGE_BYTES:
                why = too_large(len(message), MAX_MESSAGE_BYTES)
                raise _error(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            frame = pb.CallFrame(
                method=method,
                request=message,
                timeout_s=timeout or 0.0,
                metadata=dict(metadata or ()),
            )
            answer = await self._answer(frame, timeout)
            if answer.code:
                code = _CODES.get(answer.code, grpc.StatusCode.UNKNOWN)
                raise _error(code, answer.message, answer.status)
            try:
                return response_deserializer(answer.response)
            except DecodeError as error:
                code = grpc.StatusCode.INTERNAL
                raise _error(code, f"kvd's answer to {method} cannot be decoded") from error

        return call

    async def _answer(self, call: pb.CallFrame, timeout_s: float | None) -> pb.AnswerFrame:
        """Send a call and wait for its answer; if we wait no longer, tell kvd so."""
        if self._frames.ended.done():
            raise _error(grpc.StatusCode.UNAVAILABLE, "kvd has closed the socket of local calls")
        if timeout_s is not None and timeout_s <= 0:
            raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "the time for the call is over")
        self._last_number += 1
        number = call.number = self._last_number
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._frames.send(call.SerializeToString())
        try:
            async with asyncio.timeout(timeout_s):
                answer: pb.AnswerFrame = await waiting
                return answer
        except TimeoutError as error:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise _error(code, f"no answer within {timeout_s:g} s") from error
        finally:
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
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _end_calls(self) -> None:
        """Fail the calls that are under way; log why, if kvd has broken the protocol."""
        if self._frames.fault:
            log.warning("kvd_answer_unreadable", reason=self._frames.fault)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    _error(grpc.StatusCode.UNAVAILABLE, "kvd closed the socket during the call")
                )
        self._waiting.clear()


def _error(code: grpc.StatusCode, text: str, status: bytes = b"") -> grpc.aio.AioRpcError:
    """Return the error that gRPC's client raises for a status."""
    trailing = grpc.aio.Metadata(*(((DETAILS_KEY, status),) if status else ()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, text, "")
