"""LocalChannel with a kvd that breaks the protocol: calls fail as gRPC's do, and no other way."""

import asyncio
import os
import socket
import struct
from contextlib import asynccontextmanager

import grpc
import pytest
from structlog.testing import capture_logs

from shared.kvd_client.local_channel import LocalChannel
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.process.frames import FrameStream
from shared.process.runtime_dir import MAX_FRAME_BYTES
from shared.serving.grpc_status import DETAILS_KEY, InternalError, error_from_rpc
from shared.types.errors import ReportedError, UnavailableError
from tests.until import until

TOO_LONG = struct.pack("<I", MAX_FRAME_BYTES + 1)


@asynccontextmanager
async def channel_to(fd):
    """Yield a channel over a descriptor."""
    async with grpc.aio.insecure_channel("unix:/without/streams") as streams:
        local = LocalChannel(streams)
        await local.open(fd)
        try:
            yield local
        finally:
            local.close()
            await local.wait_ended()


@asynccontextmanager
async def answering(make_answer):
    """Yield a channel whose calls get the frame that is made of the number of each."""
    ours, kvds = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def answer(frame):
        stream.send(make_answer(pb.CallFrame.FromString(frame).number))

    stream = FrameStream(answer, MAX_FRAME_BYTES)
    await stream.open(kvds)
    async with channel_to(ours.detach()) as local:
        yield local
    await stream.ended


async def failure_of(local):
    """Make a call, which must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await kvd_pb2_grpc.EngineStub(local).EndSession(pb.EndSessionRequest(), timeout=60)
    return caught.value


async def test_an_answer_that_cannot_be_decoded_fails_its_call():
    """Alone: the next call is made."""
    async with answering(
        lambda n: pb.AnswerFrame(number=n, response=b"\xff").SerializeToString()
    ) as local:
        for _ in range(2):
            failure = await failure_of(local)
            assert failure.code() is grpc.StatusCode.INTERNAL
            assert "EndSession cannot be decoded" in failure.details()
            assert type(error_from_rpc(failure)).__name__ == InternalError.__name__


@pytest.mark.parametrize("code", [1, 13, 17, 4_000_000_000])
async def test_any_code_and_status_is_an_error(code):
    """Of the nearest class; an unreadable status is none."""

    def refuse(number):
        answer = pb.AnswerFrame(number=number, code=code, message="so", status=b"\xff")
        return answer.SerializeToString()

    async with answering(refuse) as local:
        failure = await failure_of(local)
    assert dict(failure.trailing_metadata())[DETAILS_KEY] == b"\xff"
    error = error_from_rpc(failure)
    assert isinstance(error, ReportedError)
    assert "so" in str(error)


@pytest.mark.parametrize("wire", [struct.pack("<I", 1) + b"\xff", TOO_LONG], ids=["junk", "long"])
async def test_a_frame_that_is_no_answer_ends_the_channel(wire):
    """Calls fail as if kvd had gone; the log has one line about it."""
    ours, kvds = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with kvds, capture_logs() as logged:
        kvds.send(wire)
        async with channel_to(ours.detach()) as local:
            assert isinstance(error_from_rpc(await failure_of(local)), UnavailableError)
            assert isinstance(error_from_rpc(await failure_of(local)), UnavailableError)
    assert [entry["event"] for entry in logged] == ["kvd_answer_unreadable"]


async def test_answers_to_nobody_are_dropped():
    """Of calls that were never made, or were answered before."""

    def answer_odd_ones(number):
        return pb.AnswerFrame(number=number if number % 2 else 1).SerializeToString()

    async with answering(answer_odd_ones) as local:
        call = kvd_pb2_grpc.EngineStub(local).EndSession
        assert await call(pb.EndSessionRequest(), timeout=60) == pb.EndSessionResponse()
        unanswered = asyncio.ensure_future(call(pb.EndSessionRequest(), timeout=60))
        await until(lambda: 2 in local._waiting)
        assert await call(pb.EndSessionRequest(), timeout=60) == pb.EndSessionResponse()
        assert not unanswered.done()
        local.close()
        with pytest.raises(grpc.aio.AioRpcError):
            await unanswered


async def test_each_call_ends_at_its_own_deadline():
    """Whichever was made first; kvd is told so, and the other calls wait on."""
    ours, kvds = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    taken = []
    stream = FrameStream(
        lambda frame: taken.append(pb.CallFrame.FromString(frame)), MAX_FRAME_BYTES
    )
    await stream.open(kvds)
    async with channel_to(ours.detach()) as local:
        call = kvd_pb2_grpc.EngineStub(local).EndSession
        calls = [call(pb.EndSessionRequest(), timeout=s) for s in (60, 0.2, None, 0.1, 0.3)]
        for late in (calls[3], calls[1], calls[4]):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(taken) == 5 + 3)
        assert sorted(frame.number for frame in taken if not frame.method) == [2, 4, 5]
        assert not calls[0].done()
        assert not calls[2].done()
        calls[0].cancel()
        await until(lambda: len(taken) == 5 + 4)
        assert (taken[-1].number, taken[-1].method) == (1, "")
        stream.close()
        with pytest.raises(grpc.aio.AioRpcError):
            await calls[2]
    await stream.ended


@pytest.mark.parametrize("kind", ["file", "packets"])
async def test_only_a_stream_socket_is_called_over(tmp_path, kind):
    """Another descriptor is an error, and is closed."""
    socks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.open(tmp_path, os.O_RDONLY) if kind == "file" else socks[0].detach()
    async with grpc.aio.insecure_channel("unix:/without/streams") as streams:
        with pytest.raises(ValueError, match=r"(s|S)ocket"):
            await LocalChannel(streams).open(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for sock in socks:
        sock.close()
