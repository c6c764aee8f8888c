"""Every RPC is counted by its outcome, and has a trace id, over a real channel."""

import asyncio
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared.serving.grpc_status import ReportedErrorInterceptor
from shared.serving.rpc_observer import EARLY_S, RpcMetrics, RpcObserver, code_without_answer
from shared.serving.tracing import outgoing
from shared.types.errors import NotFoundError

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
# As a client with a deadline sends it, but without the client's own: the server ends the
# call. Long enough for a call to begin on a busy machine.
DEADLINE = (("grpc-timeout", "500m"),)


class World:
    """A service that does what a request says, and the observations of its calls."""

    def __init__(self):
        self.metrics = RpcMetrics()
        self.bound = []
        self.passed_on = []
        self.begun = asyncio.Event()

    async def unary(self, request, _context):
        self.bound.append(structlog.contextvars.get_contextvars())
        self.passed_on.append(dict(outgoing() or ()))
        await self._do(request)
        return b"answer"

    async def stream(self, request, _context):
        yield b"first"
        await self._do(request)
        yield b"last"

    async def _do(self, request):
        self.begun.set()
        if request == b"refuse":
            raise NotFoundError("it is not there", "look elsewhere")
        if request == b"break":
            raise ValueError
        if request == b"wait":
            await asyncio.Event().wait()

    async def until_counted(self, num_calls):
        """Wait until so many calls are counted: a client may see the end earlier."""
        async with asyncio.timeout(30):
            while sum(self.metrics.ended.counts.values()) < num_calls:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0)

    @asynccontextmanager
    async def channel(self):
        observer = RpcObserver(self.metrics, long_lived=["Test/Hold"])
        server = grpc.aio.server(interceptors=[observer, ReportedErrorInterceptor("test")])
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
            "Hold": grpc.unary_stream_rpc_method_handler(self.stream),
        }
        generic = grpc.method_handlers_generic_handler("test.v1.Test", handlers)
        server.add_generic_rpc_handlers((generic,))
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        await server.stop(None)  # every call has ended, and is counted


async def code_of(call):
    """Read all of a call, and return its status; an unread stream never ends."""
    with suppress(grpc.aio.AioRpcError):
        if isinstance(call, grpc.aio.UnaryStreamCall):
            _ = [answer async for answer in call]
        else:
            await call
    return (await call.code()).name


@pytest.fixture
def world():
    """Make a new one."""
    return World()


@pytest.mark.parametrize(
    ("request_", "code"),
    [(b"", "OK"), (b"refuse", "NOT_FOUND"), (b"break", "INTERNAL")],
)
async def test_calls_are_counted_by_their_code(world, request_, code):
    """A call has the status that its client sees, one answer or a stream."""
    async with world.channel() as channel:
        for method, call in (
            ("Unary", channel.unary_unary("/test.v1.Test/Unary")(request_)),
            ("Stream", channel.unary_stream("/test.v1.Test/Stream")(request_)),
        ):
            assert await code_of(call) == code, method
        await world.until_counted(2)
    assert world.metrics.ended.counts == {("Test/Unary", code): 1, ("Test/Stream", code): 1}
    assert set(world.metrics.seconds.series) == {
        ("Test/Unary",),
        ("Test/Stream",),
    }


async def test_cancelled_and_late_calls(world):
    """A cancelled one counts as CANCELLED; one past its deadline as such."""
    async with world.channel() as channel:
        methods = (
            channel.unary_unary("/test.v1.Test/Unary"),
            channel.unary_stream("/test.v1.Test/Stream"),
        )
        for method in methods:
            world.begun.clear()
            call = method(b"wait")
            await world.begun.wait()
            call.cancel()
        for late in [method(b"wait", metadata=DEADLINE) for method in methods]:
            assert await code_of(late) == "DEADLINE_EXCEEDED"
        await world.until_counted(4)
    for method in ("Test/Unary", "Test/Stream"):
        assert world.metrics.ended.counts[method, "CANCELLED"] == 1
        assert world.metrics.ended.counts[method, "DEADLINE_EXCEEDED"] == 1


@pytest.mark.parametrize(
    ("left_s", "code"),
    [
        (None, "CANCELLED"),
        (2 * EARLY_S, "CANCELLED"),
        (EARLY_S, "DEADLINE_EXCEEDED"),
        (0.0, "DEADLINE_EXCEEDED"),
    ],
)
def test_a_client_may_time_out_just_before_the_server(left_s, code):
    """A disconnect at the deadline counts as late, though the server's clock is not there yet."""
    assert code_without_answer(left_s) == code


async def test_unknown_methods_make_no_labels(world):
    """Unknown methods and foreign services are not counted."""
    async with world.channel() as channel:
        unknown = channel.unary_unary("/test.v1.Test/Whatever")(b"")
        assert await code_of(unknown) == "UNIMPLEMENTED"
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert not world.metrics.ended.counts


async def test_long_streams_are_not_timed(world):
    """A stream that lasts as long as its caller is counted at its end, without a time."""
    async with world.channel() as channel:
        assert await code_of(channel.unary_stream("/test.v1.Test/Hold")(b"")) == "OK"
        await world.until_counted(1)
    assert world.metrics.ended.counts == {("Test/Hold", "OK"): 1}
    assert not world.metrics.seconds.series


async def test_a_trace_is_continued(world):
    """Log lines have the caller's trace id, and further calls carry it."""
    async with world.channel() as channel:
        call = channel.unary_unary("/test.v1.Test/Unary")
        await call(b"", metadata=(("traceparent", PARENT), ("tracestate", "a=b")))
    assert world.bound == [{"trace_id": TRACE}]
    (passed_on,) = world.passed_on
    assert passed_on["traceparent"].split("-")[1] == TRACE
    assert passed_on["tracestate"] == "a=b"


@pytest.mark.parametrize(
    "sent", [None, "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000]
)
async def test_a_new_trace_begins(world, sent):
    """A call without a usable trace context gets a trace id of its own."""
    metadata = () if sent is None else (("traceparent", sent),)
    async with world.channel() as channel:
        for _ in range(2):
            await channel.unary_unary("/test.v1.Test/Unary")(b"", metadata=metadata)
    first, second = (bound["trace_id"] for bound in world.bound)
    assert first != second
    assert [len(first), len(second)] == [32, 32]
    assert [carried["traceparent"].split("-")[1] for carried in world.passed_on] == [first, second]
