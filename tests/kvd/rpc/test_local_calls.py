"""Local calls: answered, refused, counted and ended as gRPC's, over a real socket."""

import asyncio
import socket
import struct
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
import structlog
from structlog.testing import capture_logs

from kvd.rpc.access import Access
from kvd.rpc.local_calls import LocalCalls
from shared.access.identity import current_identity
from shared.kvd_client.local_channel import LocalChannel
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.process.runtime_dir import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, channel_options
from shared.serving.grpc_handlers import server_options
from shared.serving.grpc_status import (
    InternalError,
    MessageTooLargeError,
    ReportedErrorInterceptor,
    error_from_rpc,
)
from shared.serving.rpc_observer import EARLY_S, RpcMetrics, RpcObserver
from shared.types.errors import ExhaustedError, InvalidInputError, UnavailableError
from tests.kvd.rpc.service_bench import settings
from tests.until import until

METHOD = "/kvd.v1.Engine/PrepareLoad"
COUNTED = "Engine/PrepareLoad"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)
HUGE = "x" * MAX_MESSAGE_BYTES  # with what is around it more than a message may have


class NoRoomError(ExhaustedError):
    """An example with everything that an error can have."""

    reason = "no_room"
    retryable = True


class Deeds(kvd_pb2_grpc.EngineServicer):
    """Does what the session of a load is called, and records it.

    Attributes:
        begun: deeds that were begun, oldest first.
        cancelled: those of them that were cancelled.
        bound: what log lines of each would have.
        callers: names of the callers.
    """

    def __init__(self):
        self.begun = []
        self.cancelled = []
        self.bound = []
        self.callers = []
        self._ends = {}

    async def PrepareLoad(self, request, context):  # noqa: N802
        deed = request.session.session_id
        self.bound.append(structlog.contextvars.get_contextvars())
        self.callers.append(current_identity().name)
        self.begun.append(deed)
        try:
            await self._do(deed)
        except asyncio.CancelledError:
            for _ in range(10):  # as one that puts something in order takes its time
                await asyncio.sleep(0)
            self.cancelled.append(deed)
            if deed != "wait stubbornly":
                raise
        reason = HUGE if deed == "answer hugely" else deed
        return pb.PrepareLoadResponse(end_token=len(request.token_ids), miss_reason=reason)

    async def _do(self, deed):
        if deed == "refuse":
            raise NoRoomError("it is full", "wait", details={"rooms": "0"}, retry_after_s=2.5)
        if deed == "break":
            raise ValueError
        if deed.startswith("wait"):
            await self._ends.setdefault(deed, asyncio.Event()).wait()

    def end(self, deed):
        """Let a deed that waits end."""
        self._ends[deed].set()


class Kvd:
    """Local calls of a servicer, with the interceptors of kvd."""

    def __init__(self, directory, max_calls=100):
        self.deeds = Deeds()
        self.metrics = RpcMetrics()
        loaded = settings(directory).loaded.settings
        self.interceptors = [
            RpcObserver(self.metrics),
            ReportedErrorInterceptor("kvd"),
            Access(loaded, self.metrics).guard("engine"),
        ]
        add = kvd_pb2_grpc.add_EngineServicer_to_server
        self._calls = LocalCalls(add, self.deeds, self.interceptors, max_calls)
        self.serving = []  # a task for each engine

    def connect(self):
        """Serve another engine; return its end of the socket."""
        ours, engine_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.serving.append(asyncio.create_task(self._calls.serve(ours)))
        engine_end.setblocking(False)
        return engine_end

    @asynccontextmanager
    async def engine(self):
        """Serve an engine; yield its channel."""
        async with grpc.aio.insecure_channel("unix:/without/streams") as streams:
            local = LocalChannel(streams)
            await local.open(self.connect().detach())
            serving = self.serving[-1]
            try:
                yield local
            finally:
                local.close()
                await asyncio.gather(serving, return_exceptions=True)

    @asynccontextmanager
    async def grpc(self, directory):
        """Serve the same over gRPC; yield a channel."""
        options = server_options(MAX_MESSAGE_BYTES, 10, is_tcp=False)
        server = grpc.aio.server(interceptors=self.interceptors, options=options)
        kvd_pb2_grpc.add_EngineServicer_to_server(self.deeds, server)
        server.add_insecure_port(f"unix:{directory}/engine.sock")
        await server.start()
        async with grpc.aio.insecure_channel(
            f"unix:{directory}/engine.sock", options=channel_options()
        ) as channel:
            yield channel
        await server.stop(None)


def load(deed, token_ids=b""):
    """Return a request for a deed."""
    return pb.PrepareLoadRequest(session=pb.SessionKey(session_id=deed), token_ids=token_ids)


async def do(channel, deed, token_ids=b"", **options):
    """Call for a deed."""
    return await kvd_pb2_grpc.EngineStub(channel).PrepareLoad(load(deed, token_ids), **options)


def send_bytes(channel, method, request):
    """Call a method with any bytes."""
    call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
    return call(request)


async def failure_of(call):
    """Return the error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def on_the_wire(frame):
    """Return the bytes of a CallFrame."""
    message = frame.SerializeToString()
    return struct.pack("<I", len(message)) + message


async def next_answer(engine_end):
    """Read one short answer from the bare end of a socket."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        (length,) = struct.unpack("<I", await loop.sock_recv(engine_end, 4))
        return pb.AnswerFrame.FromString(await loop.sock_recv(engine_end, length))


async def test_a_call_is_answered_counted_and_traced(tmp_path):
    """In the name of the engines' socket; log lines of its handler have the caller's trace id."""
    kvd = Kvd(tmp_path)
    async with kvd.engine() as local:
        answer = await do(local, "a", b"1234", metadata=PARENT)
        assert (answer.miss_reason, answer.end_token) == ("a", 4)
        await do(local, "b", timeout=30)
    assert kvd.deeds.callers == ["engine.sock", "engine.sock"]
    assert kvd.deeds.bound[0]["trace_id"] == TRACE
    assert kvd.deeds.bound[1]["trace_id"] != TRACE
    assert kvd.metrics.ended.counts == {(COUNTED, "OK"): 2}
    assert set(kvd.metrics.seconds.series) == {(COUNTED,)}


async def test_calls_that_run_at_once_have_each_their_own_trace(tmp_path):
    """A method is wrapped once for all of its calls."""
    kvd = Kvd(tmp_path)
    traces = [f"{number:032x}" for number in range(1, 4)]
    async with kvd.engine() as local:
        calls = [
            asyncio.create_task(
                do(local, f"wait {n}", metadata=(("traceparent", f"00-{trace}-{n:016x}-01"),))
            )
            for n, trace in enumerate(traces, 1)
        ]
        await until(lambda: len(kvd.deeds.begun) == 3)
        for n, call in enumerate(calls, 1):
            kvd.deeds.end(f"wait {n}")
            await call
    assert [bound["trace_id"] for bound in kvd.deeds.bound] == traces
    assert kvd.metrics.ended.counts == {(COUNTED, "OK"): 3}


async def test_failures_are_those_of_grpc(tmp_path):
    """Code, text, and all that an error carries; they are counted in the same way, too."""
    seen = []
    for transport in ("local", "grpc"):
        kvd = Kvd(tmp_path)
        serve = kvd.engine() if transport == "local" else kvd.grpc(tmp_path)
        with capture_logs() as logged:
            async with serve as channel:
                failures = [
                    await failure_of(do(channel, "refuse")),
                    await failure_of(do(channel, "break")),
                    await failure_of(send_bytes(channel, METHOD, b"\xff")),
                    await failure_of(do(channel, "answer hugely")),
                    await failure_of(do(channel, "a", HUGE.encode())),
                ]
        refused, broken, unreadable, *large = map(error_from_rpc, failures)
        assert isinstance(refused, ExhaustedError)
        assert (refused.reason, refused.message, refused.remedy) == (
            "no_room",
            "it is full",
            "wait",
        )
        assert (refused.retryable, refused.details) == (True, {"rooms": "0"})
        assert refused.retry_after_s == 2.5
        assert type(broken).__name__ == InternalError.__name__
        assert isinstance(unreadable, InvalidInputError)
        assert unreadable.message == "the request cannot be decoded"
        assert [type(error) for error in large] == [MessageTooLargeError] * 2
        assert [entry["method"] for entry in logged if entry["event"] == "rpc_failed"] == [METHOD]
        assert kvd.deeds.begun == ["refuse", "break", "answer hugely"]
        texts = [failure.details() for failure in failures[:3]]
        seen.append(([failure.code() for failure in failures], texts, kvd.metrics.ended.counts))
    assert seen[0] == seen[1]


async def test_the_largest_request_is_answered(tmp_path):
    """One more byte would be too many."""
    around = load("", HUGE.encode()).ByteSize() - len(HUGE)
    kvd = Kvd(tmp_path)
    async with kvd.engine() as local:
        num_bytes = MAX_MESSAGE_BYTES - around
        assert (await do(local, "", bytes(num_bytes))).end_token == num_bytes
        error = error_from_rpc(await failure_of(do(local, "", bytes(num_bytes + 1))))
        assert isinstance(error, MessageTooLargeError)
    assert len(kvd.deeds.begun) == 1


@pytest.mark.parametrize("method", ["Engine/Attach", "Engine/PushQueue", "Engine/No", "Reader/x"])
async def test_only_unary_methods_of_the_service_can_be_called(tmp_path, method):
    """Others are unimplemented, and make no label of metrics."""
    kvd = Kvd(tmp_path)
    async with kvd.engine() as local:
        failure = await failure_of(send_bytes(local, f"/kvd.v1.{method}", b""))
        assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
        assert method in failure.details()
        await do(local, "a")
    assert kvd.metrics.ended.counts == {(COUNTED, "OK"): 1}


async def test_calls_end_in_any_order(tmp_path):
    """Each gets its own answer."""
    kvd = Kvd(tmp_path)
    async with kvd.engine() as local:
        first, second = (asyncio.create_task(do(local, f"wait {name}")) for name in "ab")
        await until(lambda: len(kvd.deeds.begun) == 2)
        assert (await do(local, "c")).miss_reason == "c"
        kvd.deeds.end("wait b")
        assert (await second).miss_reason == "wait b"
        assert not first.done()
        kvd.deeds.end("wait a")
        assert (await first).miss_reason == "wait a"


async def test_a_caller_that_waits_no_longer_cancels_the_handler(tmp_path):
    """Cancelled or out of time, which is counted as with gRPC."""
    kvd = Kvd(tmp_path)
    async with kvd.engine() as local:
        await do(local, "a")  # from now on each frame is read before a later timer fires
        cancelled = asyncio.create_task(do(local, "wait", timeout=60))
        await until(lambda: "wait" in kvd.deeds.begun)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until(lambda: kvd.deeds.cancelled == ["wait"])
        late = await failure_of(do(local, "wait longer", timeout=EARLY_S / 2))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: kvd.deeds.cancelled == ["wait", "wait longer"])
        for timeout_s in (0, -1):
            late = await failure_of(do(local, "without time", timeout=timeout_s))
            assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not local._waiting
    assert kvd.deeds.begun == ["a", "wait", "wait longer"]
    codes = ("OK", "CANCELLED", "DEADLINE_EXCEEDED")
    assert kvd.metrics.ended.counts == {(COUNTED, code): 1 for code in codes}


async def test_an_answer_to_a_cancelled_call_is_dropped(tmp_path):
    """It had been on its way; the next answer reaches its caller."""
    kvd = Kvd(tmp_path)
    async with kvd.engine() as local:
        cancelled = asyncio.create_task(do(local, "wait stubbornly"))
        await until(lambda: kvd.deeds.begun)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await until(lambda: kvd.deeds.cancelled)
        assert (await do(local, "a")).miss_reason == "a"
        assert not local._frames.ended.done()
    assert kvd.metrics.ended.counts == {(COUNTED, "OK"): 2}, "kvd has answered both"


async def test_calls_of_an_engine_are_bounded(tmp_path):
    """One too many is refused, while those that run end; the calls of others do not count."""
    kvd = Kvd(tmp_path, max_calls=2)
    async with kvd.engine() as local, kvd.engine() as other:
        running = [asyncio.create_task(do(local, f"wait {n}")) for n in range(2)]
        await until(lambda: len(kvd.deeds.begun) == 2)
        refused = error_from_rpc(await failure_of(do(local, "a")))
        assert isinstance(refused, ExhaustedError)
        assert refused.reason == "limit_reached"
        assert "limits.max_rpcs" in refused.message
        assert (await do(other, "b")).miss_reason == "b"
        for number, call in enumerate(running):
            kvd.deeds.end(f"wait {number}")
            assert (await call).miss_reason == f"wait {number}"
        assert (await do(local, "c")).miss_reason == "c"
    assert kvd.deeds.begun == ["wait 0", "wait 1", "b", "c"]
    counts = kvd.metrics.ended.counts
    assert counts == {(COUNTED, "OK"): 4, (COUNTED, "RESOURCE_EXHAUSTED"): 1}


@pytest.mark.parametrize("who", ["engine", "kvd"])
async def test_the_end_of_the_socket_ends_all_calls(tmp_path, who):
    """Handlers are cancelled before serving ends; callers see an unavailable kvd, as later ones."""
    kvd = Kvd(tmp_path)
    async with kvd.engine() as local:
        calls = [asyncio.create_task(do(local, f"wait {n}")) for n in range(3)]
        await until(lambda: len(kvd.deeds.begun) == 3)
        if who == "engine":
            local.close()
        else:
            kvd.serving[0].cancel()
        with suppress(asyncio.CancelledError):
            await kvd.serving[0]
        assert len(kvd.deeds.cancelled) == 3
        await local.wait_ended()
        for call in (*calls, do(local, "too late")):
            assert isinstance(error_from_rpc(await failure_of(call)), UnavailableError)
    assert len(kvd.deeds.begun) == 3
    assert kvd.metrics.ended.counts == {(COUNTED, "CANCELLED"): 3}


@pytest.mark.parametrize(
    "wire",
    [
        struct.pack("<I", 1) + b"\xff",
        on_the_wire(pb.CallFrame(number=1, method=METHOD)),
        struct.pack("<I", MAX_FRAME_BYTES + 1),
    ],
    ids=["garbage", "number of a running call", "too long"],
)
async def test_a_broken_protocol_ends_the_connection(tmp_path, wire):
    """Its calls are cancelled; that is logged once, and other engines do not notice."""
    kvd = Kvd(tmp_path)
    async with kvd.engine() as other:
        waiting = asyncio.create_task(do(other, "wait"))
        with kvd.connect() as engine_end, capture_logs() as logged:
            frame = pb.CallFrame(
                number=1, method=METHOD, request=load("wait too").SerializeToString()
            )
            engine_end.send(on_the_wire(frame))
            await until(lambda: len(kvd.deeds.begun) == 2)
            engine_end.send(wire)
            await kvd.serving[1]
            assert engine_end.recv(1) == b""
        assert kvd.deeds.cancelled == ["wait too"]
        assert [(one["event"], one["log_level"]) for one in logged] == [
            ("local_calls_ended", "warning")
        ]
        kvd.deeds.end("wait")
        assert (await waiting).miss_reason == "wait"


async def test_what_is_harmless_in_a_frame_is_ignored(tmp_path):
    """Cancelling what does not run; odd times; a number that was answered is free again."""
    kvd = Kvd(tmp_path)
    with kvd.connect() as engine_end:
        engine_end.send(on_the_wire(pb.CallFrame()) + on_the_wire(pb.CallFrame(number=7)))
        for timeout_s in (float("nan"), float("inf"), -1.0, 1e300):
            call = pb.CallFrame(number=7, method=METHOD, timeout_s=timeout_s)
            engine_end.send(on_the_wire(call))
            answer = await next_answer(engine_end)
            assert (answer.number, answer.code) == (7, 0)
    await kvd.serving[0]
    assert kvd.metrics.ended.counts == {(COUNTED, "OK"): 4}
