"""Every RPC with arbitrary requests: it answers or refuses, and at the end nothing is left.

Two engines of one layout and one of another are attached, and have leases that some of the requests
name. Each call has to end, and must not end in certain ways.
"""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from shared.kvd_client import data_socket_protocol as packets
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.packets import receive
from shared.process.runtime_dir import channel_options
from shared.types.errors import ReportedError
from tests.fuzz.amounts import few, many
from tests.fuzz.fuzzed_kvd import FuzzedKvd
from tests.fuzz.messages import LAYOUTS, NUM_MARKS, requests_of, resolve
from tests.synthetic_engine import SyntheticEngine, attached_engine, encode, key_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOCKETS = {"Engine": "engine.sock", "Operator": "operator.sock", "Reader": "reader.sock"}
METHODS = tuple(
    method for name in SOCKETS for method in kvd_pb2.DESCRIPTOR.services_by_name[name].methods
)
HANGS_S = 30.0  # kvd waits for 0.1 s where a caller names no deadline
PATIENCE_S = 0.2  # with a caller's own deadline
STREAM_S = 0.05  # how long a stream is read
NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED}


@dataclass(frozen=True)
class Call:
    """A call: one message or raw bytes, or several of a stream that is then cancelled.

    It goes over gRPC, or as a local call over the socket of an engine.
    """

    method: MethodDescriptor
    requests: tuple[Message | bytes, ...]
    is_local: bool = False

    @property
    def may_wait(self) -> bool:
        """Return whether its caller has allowed kvd to wait."""
        return any(getattr(request, "deadline_s", 0) for request in self.requests)


def calls_of(method: MethodDescriptor) -> st.SearchStrategy[Call]:
    """Draw calls of one RPC."""
    made = requests_of(method)
    request = st.one_of(made, made, made, made, made, st.binary(max_size=200))
    sizes = {"min_size": 1, "max_size": 4 if method.client_streaming else 1}
    may_be_local = method.containing_service.name == "Engine" and not method.server_streaming
    transport = st.booleans() if may_be_local else st.just(False)
    return st.builds(Call, st.just(method), st.lists(request, **sizes).map(tuple), transport)


any_call = st.sampled_from(METHODS).flatmap(calls_of)
scenes = st.lists(st.lists(any_call, min_size=1, max_size=4), min_size=1, max_size=6)


class Fuzzed:
    """A kvd with its engines, and the ids that requests can name."""

    def __init__(self, kvd: FuzzedKvd, engines: list[SyntheticEngine]) -> None:
        self.kvd = kvd
        self.engines = engines
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.leases: list[int] = []
        self.page_tokens: list[str] = []
        self.data: list = []  # open connections to the data socket

    async def call(self, call: Call) -> None:
        """Make a call, and check its end."""
        requests = [await self._encoded(request) for request in call.requests]
        method = call.method
        channel = self._channel(call)
        path = f"/{method.containing_service.full_name}/{method.name}"
        patience_s = PATIENCE_S if call.may_wait else HANGS_S
        try:
            if not method.server_streaming:
                make_call = channel.unary_unary(path, bytes, bytes)
                answer = await make_call(requests[0], timeout=patience_s)
                self._learn(method, answer)
            else:
                await self._stream(channel, call, path, requests)
        except grpc.aio.AioRpcError as error:
            _judge(call, error)

    def _channel(self, call: Call):
        """Return what a call goes over; gRPC if a fuzzed call has just ended the attachment."""
        attachment = self.engines[0].client._attachment
        if call.is_local and attachment is not None:
            return attachment.local
        return self.channels[call.method.containing_service.name]

    async def _stream(self, channel, call: Call, path: str, requests: list[bytes]) -> None:
        """Send to a stream and read it for a while, then cancel it."""
        if not call.method.client_streaming:
            stream = channel.unary_stream(path)(requests[0])
            await _listen(stream)
        else:
            stream = channel.stream_stream(path)()
            for request in requests:
                await stream.write(request)
                if not await _listen(stream, num_answers=1):
                    break  # it has ended: another write would be the test's error
        stream.cancel()

    def _learn(self, method: MethodDescriptor, answer: bytes) -> None:
        """Record ids that later requests may name."""
        message = getattr(kvd_pb2, method.output_type.name).FromString(answer)
        if method.name in ("PrepareLoad", "PrepareStore") and message.lease_id:
            self.leases = [message.lease_id, *self.leases][:NUM_MARKS]
        if method.name == "ListSessions" and message.next_page_token:
            self.page_tokens = [message.next_page_token, *self.page_tokens][:NUM_MARKS]

    async def _encoded(self, request: Message | bytes) -> bytes:
        if isinstance(request, bytes):
            return request
        message = type(request)()
        message.CopyFrom(request)
        clients = [engine.client for engine in self.engines]
        if isinstance(message, kvd_pb2.AttachRequest):
            await asyncio.gather(*(client.wait_attached(HANGS_S) for client in clients))
        known = {
            "engine_id": [c._attachment.engine_id for c in clients if c._attachment is not None],
            "lease_id": self.leases,
            "held_leases": self.leases,
            "instance": [client._identity.instance for client in clients] + ["", "ab" * 16],
            "page_token": self.page_tokens,
            "data_token": await self._tokens(message),
        }
        resolve(message, known)
        return message.SerializeToString()

    async def _tokens(self, message: Message) -> list[str]:
        """Return a token of a connection that stays open, for a request that needs one."""
        if not isinstance(message, kvd_pb2.AttachRequest):
            return []
        data = packets.connect(str(self.kvd.runtime_dir / "data.sock"))
        self.data.append(data)
        welcome = packets.decode((await receive(data))[0])
        return [welcome.token] if isinstance(welcome, packets.Welcome) else []

    async def leave(self) -> None:
        """Close the connections of fuzzed attachments: they announce that they hold nothing."""
        for data in self.data:
            with suppress(OSError):  # kvd has closed it
                packets.send(data, packets.Leaving())
            data.close()
        self.data.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fuzzed(tmp_path_factory):
    """Run one kvd for all tests; at the end all attached engines leave."""
    kvd = FuzzedKvd(tmp_path_factory.mktemp("rpcs"))
    await kvd.start()
    before = await kvd.connections()
    try:
        async with AsyncExitStack() as stack:
            layouts = (LAYOUTS[0], LAYOUTS[0], LAYOUTS[1])
            engines = [
                await stack.enter_async_context(attached_engine(kvd.runtime_dir, layout, f"e{n}"))
                for n, layout in enumerate(layouts)
            ]
            fuzzed = Fuzzed(kvd, engines)
            for name, path in SOCKETS.items():
                address = f"unix:{kvd.runtime_dir / path}"
                channel = grpc.aio.insecure_channel(address, options=channel_options())
                fuzzed.channels[name] = await stack.enter_async_context(channel)
            yield fuzzed
            await _all_serve(fuzzed)
        await kvd.leaves_nothing(before)
        assert await kvd.stop() == 0, "its invariants hold"
        kvd.is_over_unharmed()
    finally:
        await kvd.kill()


def _judge(call: Call, error: grpc.aio.AioRpcError) -> None:
    """Check that a refusal has its reason, and comes in time."""
    assert error.code() not in NEVER, f"{error.code()}: {error.details()}"
    is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert call.may_wait or not is_late, "it hangs"


async def _listen(stream, num_answers: int = 100) -> bool:
    """Read so many answers, or those that come in time; return False if the stream has ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STREAM_S):
            for _ in range(num_answers):
                if await stream.read() is grpc.aio.EOF:
                    return False
    return not stream.done()


async def _play(fuzzed: Fuzzed, scene: list[list[Call]]) -> None:
    """Make the calls, those of one list at once; check that kvd serves afterwards."""
    num_errors = len(fuzzed.kvd.errors())
    await _store_some(fuzzed)
    for at_once in scene:
        await asyncio.gather(*map(fuzzed.call, at_once))
    await fuzzed.leave()
    await fuzzed.channels["Reader"].unary_unary("/kvd.v1.Reader/GetStats")(b"", timeout=HANGS_S)
    assert fuzzed.kvd.errors()[num_errors:] == []


async def _store_some(fuzzed: Fuzzed) -> None:
    """Store sessions that requests may name."""
    engine = fuzzed.engines[0]
    await engine.client.wait_attached(HANGS_S)
    for number in range(3):
        with suppress(ReportedError):  # fuzzed requests have leased all slots
            await engine.store(key_of(f"s{number}"), range(1000 * number, 1000 * number + 50))


async def _all_serve(fuzzed: Fuzzed) -> None:
    """Check that each engine is attached again, is served, and loads the right rows."""
    for engine in fuzzed.engines:
        await engine.client.wait_attached(HANGS_S)
        # Leases of fuzzed requests belong to the engine, which does not know them.
        await _complete(fuzzed, engine)
    for number, engine in enumerate(fuzzed.engines):
        key = key_of(f"after-{number}", model=engine.layout.model)
        tokens = list(range(90_000 + 1000 * number, 90_050 + 1000 * number))
        stored = await engine.store(key, tokens)
        assert stored == (await engine.load(key, tokens)).num_tokens
    fuzzed.kvd.is_unharmed()


async def _complete(fuzzed: Fuzzed, engine: SyntheticEngine) -> None:
    """Complete every lease of an engine; those of others are refused."""
    answer = await fuzzed.channels["Reader"].unary_unary("/kvd.v1.Reader/ListLeases")(b"")
    attachment = engine.client._attachment
    assert attachment is not None
    for lease in kvd_pb2.ListLeasesResponse.FromString(answer).leases:
        named = {"engine_id": attachment.engine_id, "lease_id": lease.lease_id}
        with suppress(grpc.aio.AioRpcError, ReportedError):
            if lease.kind == kvd_pb2.LEASE_KIND_LOAD:
                await attachment.stub.CompleteLoad(kvd_pb2.CompleteLoadRequest(**named))
            else:
                await attachment.stub.CompleteStore(
                    kvd_pb2.CompleteStoreRequest(**named, success=False)
                )


@few(8)
@given(scenes)
async def test_any_calls(fuzzed, scene):
    """Calls in any order, some at the same time."""
    await _play(fuzzed, scene)


@pytest.mark.long
@many(30)
@given(scenes)
async def test_any_calls_long(fuzzed, scene):
    """Run the same for minutes."""
    await _play(fuzzed, scene)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@few(2)
@given(st.data())
async def test_each_rpc_is_fuzzed(fuzzed, method, data):
    """Separately, so that none is left out."""
    await _play(fuzzed, [[data.draw(calls_of(method))]])


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@many(4)
@given(st.data())
async def test_each_rpc_long(fuzzed, method, data):
    """Run the same for minutes."""
    await _play(fuzzed, [[data.draw(calls_of(method))]])


async def test_oversized_requests(fuzzed):
    """Larger messages than allowed are refused, the largest allowed is not."""
    engine = fuzzed.engines[0]
    await engine.client.wait_attached(HANGS_S)
    attachment = engine.client._attachment
    assert attachment is not None
    method = kvd_pb2.DESCRIPTOR.services_by_name["Engine"].methods_by_name["PrepareLoad"]
    for num_tokens in (4_000_000, 5_000_000):
        request = kvd_pb2.PrepareLoadRequest(
            engine_id=attachment.engine_id,
            session=kvd_pb2.SessionKey(session_id="huge"),
            token_ids=encode(range(num_tokens)),
        )
        for is_local in (False, True):
            await fuzzed.call(Call(method, (request,), is_local))
    fuzzed.kvd.is_unharmed()
