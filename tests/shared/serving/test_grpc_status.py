"""Errors keep their class and fields across a real gRPC server."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.serving.grpc_status import (
    DETAILS_KEY,
    MAX_DETAIL_TEXT,
    MAX_RETRY_S,
    MAX_TEXT,
    InternalError,
    ReportedErrorInterceptor,
    error_from_rpc,
)
from shared.types.errors import (
    ConflictError,
    DeadlineError,
    ExhaustedError,
    InvalidInputError,
    NotFoundError,
    StateError,
    UnavailableError,
)


class SessionBusyError(ConflictError):
    """An example."""

    reason = "session_busy"


class Failing(kvd_pb2_grpc.ReaderServicer):
    """Raises a given exception, in a plain and in a streaming call."""

    def __init__(self, error):
        self.error = error

    async def GetStats(self, request, context):  # noqa: N802
        raise self.error

    async def WatchEvents(self, request, context):  # noqa: N802
        yield kvd_pb2.Event(name="first")
        raise self.error


@asynccontextmanager
async def _reader(tmp_path, error):
    server = grpc.aio.server(interceptors=[ReportedErrorInterceptor("kvd")])
    kvd_pb2_grpc.add_ReaderServicer_to_server(Failing(error), server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        yield kvd_pb2_grpc.ReaderStub(channel)
    await server.stop(None)


async def _caught(stub, *, streaming=False):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (_watch(stub) if streaming else stub.GetStats(kvd_pb2.GetStatsRequest()))
    return error.value


async def _watch(stub):
    async for event in stub.WatchEvents(kvd_pb2.WatchEventsRequest()):
        assert event.name == "first"


@pytest.mark.parametrize("streaming", [False, True])
async def test_reported_errors_are_rebuilt(tmp_path, streaming):
    """Class, reason, message, remedy and retryable are kept."""
    sent = SessionBusyError("session a is busy", "say wait")
    async with _reader(tmp_path, sent) as stub:
        rpc_error = await _caught(stub, streaming=streaming)
    error = error_from_rpc(rpc_error)
    assert rpc_error.code() is grpc.StatusCode.ABORTED
    assert isinstance(error, ConflictError)
    assert (error.reason, error.retryable) == ("session_busy", True)
    assert (error.message, error.remedy, str(error)) == (sent.message, sent.remedy, str(sent))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("x", "y"), grpc.StatusCode.NOT_FOUND),
        (StateError("x", "y"), grpc.StatusCode.FAILED_PRECONDITION),
        (ExhaustedError("x", "y"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (DeadlineError("x", "y"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (UnavailableError("x", "y"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_codes(tmp_path, error, code):
    """Each class has its code, and is rebuilt from it."""
    async with _reader(tmp_path, error) as stub:
        rpc_error = await _caught(stub)
    assert rpc_error.code() is code
    assert isinstance(error_from_rpc(rpc_error), type(error))


@pytest.mark.parametrize("streaming", [False, True])
async def test_details_and_retry_hints_are_rebuilt(tmp_path, streaming):
    """Numbers for programs, beside the line for people."""
    sent = ExhaustedError("x", "y", details={"queue_length": "64"}, retry_after_s=2.25)
    async with _reader(tmp_path, sent) as stub:
        error = error_from_rpc(await _caught(stub, streaming=streaming))
    assert error.details == {"queue_length": "64"}
    assert error.retry_after_s == 2.25


async def test_missing_details_and_hints_stay_missing(tmp_path):
    """No hint is not a hint of zero."""
    async with _reader(tmp_path, ExhaustedError("x", "y")) as stub:
        error = error_from_rpc(await _caught(stub))
    assert (error.details, error.retry_after_s) == ({}, None)


@pytest.mark.parametrize(
    ("said_s", "heard_s"),
    [(0.0, 0.0), (-3.0, 0.0), (float("nan"), 0.0), (float("inf"), MAX_RETRY_S), (1e-9, 1e-9)],
)
async def test_invalid_hints_are_limited(tmp_path, said_s, heard_s):
    """A client may sleep for as long as the hint says."""
    async with _reader(tmp_path, ExhaustedError("x", "y", retry_after_s=said_s)) as stub:
        assert error_from_rpc(await _caught(stub)).retry_after_s == heard_s


async def test_details_cannot_replace_the_errors_own_fields(tmp_path):
    """Reserved names keep their meaning, and long values are cut."""
    details = {"retryable": "true", "remedy": "none", "long": "x" * 9000}
    async with _reader(tmp_path, NotFoundError("x", "y", details=details)) as stub:
        error = error_from_rpc(await _caught(stub))
    assert (error.retryable, error.remedy) == (False, "y")
    assert error.details == {"long": "x" * MAX_DETAIL_TEXT}


async def test_foreign_details_are_ignored():
    """Other servers have their own."""
    trailing = grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff"))
    rpc_error = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing, details="too much"
    )
    error = error_from_rpc(rpc_error)
    assert isinstance(error, ExhaustedError)
    assert "too much" in error.message


async def test_unexpected_errors_reveal_nothing(tmp_path):
    """They become INTERNAL without their text, which callers must not see."""
    async with _reader(tmp_path, ValueError("secret")) as stub:
        rpc_error = await _caught(stub)
    assert rpc_error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in rpc_error.details()
    assert isinstance(error_from_rpc(rpc_error), InternalError)


async def test_long_messages_are_cut(tmp_path):
    """One beyond the size of trailing metadata is cut, not lost."""
    async with _reader(tmp_path, NotFoundError("x" * 50_000, "y" * 50_000)) as stub:
        error = error_from_rpc(await _caught(stub))
    assert isinstance(error, NotFoundError)
    assert len(error.message) == MAX_TEXT


async def test_a_missing_server_is_unavailable(tmp_path):
    """A status without our details becomes the nearest class."""
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as channel:
        rpc_error = await _caught(kvd_pb2_grpc.ReaderStub(channel))
    assert isinstance(error_from_rpc(rpc_error), UnavailableError)


async def test_a_deadline_is_unavailable(tmp_path):
    """A call past its deadline is an UnavailableError too: there was no answer."""
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as channel:
        stub = kvd_pb2_grpc.ReaderStub(channel)
        call = stub.GetStats(kvd_pb2.GetStatsRequest(), timeout=0.01, wait_for_ready=True)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert isinstance(error_from_rpc(late.value), UnavailableError)


async def test_an_end_without_a_status_is_unavailable(tmp_path):
    """A balancer ends the stream of a killed server so: there was no answer."""

    async def serve(reader, writer):
        """Answer a call with headers and the end of its stream, without trailers (HTTP/2)."""
        writer.write(bytes.fromhex("000000 04 00 00000000"))  # SETTINGS
        await reader.readuntil(b"GetStats")  # in the headers of the call
        block = b"\x88\x0f\x10\x10application/grpc"  # :status 200, content-type
        writer.write(len(block).to_bytes(3) + bytes.fromhex("01 04 00000001") + block)
        writer.write(bytes.fromhex("000000 00 01 00000001"))  # DATA, empty, END_STREAM
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(serve, f"{tmp_path}/s")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        rpc_error = await _caught(kvd_pb2_grpc.ReaderStub(channel))
    server.close()
    assert rpc_error.code() is grpc.StatusCode.UNKNOWN
    assert isinstance(error_from_rpc(rpc_error), UnavailableError)


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_invalid_message_is_the_callers_error(tmp_path, streaming):
    """grpc itself would call it UNKNOWN, and log a traceback."""
    async with (
        _reader(tmp_path, NotFoundError("x", "y")),
        grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel,
    ):
        if streaming:
            answer = channel.unary_stream("/kvd.v1.Reader/WatchEvents")(b"\xff").read()
        else:
            answer = channel.unary_unary("/kvd.v1.Reader/GetStats")(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error_from_rpc(refused.value), InvalidInputError)


async def test_unknown_methods_are_left_to_grpc(tmp_path):
    """A missing service is UNIMPLEMENTED, and no crash of the interceptor."""
    async with (
        _reader(tmp_path, NotFoundError("x", "y")),
        grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await kvd_pb2_grpc.OperatorStub(channel).Flush(kvd_pb2.FlushRequest())
    assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
