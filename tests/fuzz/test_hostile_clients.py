"""Hostile clients of kvd learn nothing, cost little, and disturb no others.

One kvd for all of them, with a port for clients that have a token; an honest engine and an honest
operator work all the time.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.access.channels import ClientCredentials, aio_channel_of
from shared.access.tokens import token_digest
from shared.kvd_client import data_socket_protocol as packets
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import MAX_MESSAGE_BYTES, channel_options
from tests.fuzz.fuzzed_kvd import FuzzedKvd
from tests.fuzz.hostile import (
    PREFACE,
    SETTINGS,
    open_unfinished_calls,
    others_are_served,
    silent_connections,
    throw_garbage,
)
from tests.kvd_as_user import let_others_enter
from tests.kvd_polling import eventually
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPS, GREEDY = ClientCredentials("kvt_ops"), ClientCredentials("kvt_greedy")
WRONG = ClientCredentials("kvt_guess")
TOKENS = list(range(60))
NOBODY_UID = 65534
NOBODY = """
import os, socket, sys
uid, *paths = sys.argv[1:]
os.setgroups([])
os.setresgid(*[int(uid)] * 3)
os.setresuid(*[int(uid)] * 3)
for path in paths:
    kind = socket.SOCK_SEQPACKET if path.endswith("data.sock") else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as raw:
        try:
            raw.connect(path)
            print(raw.recv(65536).hex())
        except PermissionError:
            print(b"EACCES".hex())
"""
STATS = "/kvd.v1.Reader/GetStats"
COSTS_BYTES = 100 << 20  # more than a run costs, far less than strangers try to send


@dataclass
class Attacked:
    """The kvd, and its honest users."""

    kvd: FuzzedKvd
    tcp: str
    engine: SyntheticEngine
    ops: kvd_pb2_grpc.ReaderStub
    turns: int = 0

    def addresses(self) -> list[str]:
        """Return all addresses of gRPC."""
        names = ("engine.sock", "operator.sock", "reader.sock")
        return [*(f"unix:{self.kvd.runtime_dir / name}" for name in names), self.tcp]

    async def honest_work(self) -> None:
        """Run a turn of the engine, and queries of two remote operators, one of them new."""
        self.turns += 1
        key = key_of(f"s{self.turns % 4}")
        await self.engine.store(key, TOKENS)
        assert (await self.engine.load(key, TOKENS)).num_tokens == len(TOKENS)
        stats = await self.ops.GetStats(kvd_pb2.GetStatsRequest(), timeout=30)
        assert stats.layouts
        async with self.channel(self.tcp, OPS) as newcomer:
            request = kvd_pb2.ListSessionsRequest()
            await kvd_pb2_grpc.ReaderStub(newcomer).ListSessions(request, timeout=30)

    def channel(self, address: str, credentials: ClientCredentials | None) -> grpc.aio.Channel:
        """Open a separate connection."""
        return aio_channel_of(address, credentials, channel_options())

    def rss_bytes(self) -> int:
        """Return the process's memory without the part that it shares with engines."""
        memory = psutil.Process(self.kvd.pid).memory_info()
        return int(memory.rss - memory.shared)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tmp_path_factory) -> AsyncIterator[Attacked]:
    """Run one for all tests; at the end no connection of theirs is left."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        tcp = f"127.0.0.1:{server.getsockname()[1]}"
    kvd = FuzzedKvd(
        tmp_path_factory.mktemp("h"),
        KVD_ACCESS__TCP=tcp,
        KVD_LIMITS__MAX_RPCS="256",
        KVD_CLIENTS__OPS__TOKEN_SHA256=token_digest("kvt_ops"),
        KVD_CLIENTS__OPS__TENANTS="*",
        KVD_CLIENTS__OPS__ROLES="operator",
        KVD_CLIENTS__GREEDY__TOKEN_SHA256=token_digest("kvt_greedy"),
        KVD_CLIENTS__GREEDY__TENANTS="*",
    )
    try:
        await kvd.start()
        async with (
            attached_engine(kvd.runtime_dir) as engine,
            aio_channel_of(tcp, OPS, channel_options()) as channel,
        ):
            found = Attacked(kvd, tcp, engine, kvd_pb2_grpc.ReaderStub(channel))
            await found.honest_work()
            yield found
        kvd.is_unharmed()
    finally:
        await kvd.stop()
    kvd.is_over_unharmed()


async def test_silent_connections(attacked):
    """Hundreds of them, on every address, some with half of a greeting: others are served."""
    before = await attacked.kvd.connections()
    for address in attacked.addresses():
        async with others_are_served(attacked.honest_work):
            with (
                silent_connections(address, 150),
                silent_connections(address, 50, PREFACE[:10]),
                silent_connections(address, 50, PREFACE + SETTINGS),
            ):
                await attacked.honest_work()
    await attacked.kvd.has_no_more_than(before)


@pytest.mark.long
async def test_silent_connections_are_closed(attacked):
    """After seconds: a half-open connection holds nothing."""
    before = await attacked.kvd.connections()
    for address in attacked.addresses():
        with silent_connections(address, 100):
            await attacked.kvd.has_no_more_than(before)


async def test_other_protocols_are_disconnected(attacked):
    """Noise, other protocols, invalid frames, on every address."""
    before = await attacked.kvd.connections()
    async with others_are_served(attacked.honest_work):
        for seed, address in enumerate(attacked.addresses()):
            await throw_garbage(address, seed)
    await attacked.kvd.has_no_more_than(before)
    attacked.kvd.is_unharmed()


async def test_strangers_who_guess_tokens(attacked):
    """All get the same error, few lines are logged, and no call of theirs is read."""
    told, log_before = set(), attacked.kvd.log().count("\n")

    async def guess(stub: kvd_pb2_grpc.ReaderStub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetStats(kvd_pb2.GetStatsRequest(), timeout=60)
        told.add((refused.value.code(), refused.value.details()))

    async with others_are_served(attacked.honest_work):
        for credentials in (None, WRONG):
            async with attacked.channel(attacked.tcp, credentials) as channel:
                stub = kvd_pb2_grpc.ReaderStub(channel)
                await asyncio.gather(*(guess(stub) for _ in range(100)))
    ((code, _),) = told
    assert code is grpc.StatusCode.UNAUTHENTICATED
    refusals = [line for line in attacked.kvd.log().splitlines() if "access_refused" in line]
    assert 0 < len(refusals) < 100
    assert log_before < attacked.kvd.log().count("\n")


async def test_large_messages_of_strangers(attacked):
    """Many of the largest size at once: refused before they are read."""
    before = attacked.rss_bytes()
    body = bytes(MAX_MESSAGE_BYTES - 100)
    async with (
        others_are_served(attacked.honest_work),
        attacked.channel(attacked.tcp, None) as channel,
    ):
        calls = [channel.unary_unary(STATS)(body, timeout=60) for _ in range(30)]
        for call in calls:
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert attacked.rss_bytes() - before < COSTS_BYTES


@pytest.mark.parametrize("where", ["operator.sock", "engine.sock", "tcp"])
async def test_oversized_messages(attacked, where):
    """Of authenticated clients: the call is refused, the next one is not."""
    address = attacked.tcp if where == "tcp" else f"unix:{attacked.kvd.runtime_dir / where}"
    method = "/kvd.v1.Engine/EndSession" if where == "engine.sock" else STATS
    options = (("grpc.max_send_message_length", -1),)
    async with aio_channel_of(address, OPS if where == "tcp" else None, options) as channel:
        call = channel.unary_unary(method)(bytes(MAX_MESSAGE_BYTES + 1), timeout=60)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = (("x-large", "x" * (64 << 10)),)
        call = channel.unary_unary(method)(b"", timeout=60, metadata=metadata)
        assert await call.code() in (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.UNAVAILABLE,
        )
    await attacked.honest_work()
    attacked.kvd.is_unharmed()


async def test_unfinished_calls(attacked):
    """Strangers' end at once; a client may have a few, and others have room."""
    async with (
        others_are_served(attacked.honest_work),
        attacked.channel(attacked.tcp, None) as strangers,
        attacked.channel(attacked.tcp, GREEDY) as known,
    ):
        with open_unfinished_calls(strangers, STATS, 200) as calls:
            for call in calls:
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        with open_unfinished_calls(known, STATS, 400) as calls:  # more than limits.max_rpcs
            # The order of arrival is unknown: one that waited for its message is late, too.
            ends = asyncio.as_completed([call.code() for call in calls])
            while await next(ends) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                pass
            for _ in range(3):
                await attacked.honest_work()


async def test_health_calls_are_limited(attacked):
    """Strangers have few calls without a message, and cannot watch."""
    check = "/grpc.health.v1.Health/Check"
    async with (
        others_are_served(attacked.honest_work),
        attacked.channel(attacked.tcp, None) as strangers,
    ):
        with open_unfinished_calls(strangers, check, 50) as calls:
            ended, _ = await asyncio.wait(
                [asyncio.ensure_future(call.code()) for call in calls],
                timeout=60,
                return_when=asyncio.FIRST_COMPLETED,
            )
            codes = {task.result() for task in ended}
            assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        watch = health_pb2_grpc.HealthStub(strangers).Watch(health_pb2.HealthCheckRequest())
        assert await watch.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_watchers_who_do_not_read(attacked):
    """Their number is limited, they delay nothing, and free their room at the end."""
    request = kvd_pb2.WatchEventsRequest(num_recent=1000)
    async with others_are_served(attacked.honest_work):
        async with attacked.channel(attacked.tcp, GREEDY) as channel:
            stub = kvd_pb2_grpc.ReaderStub(channel)
            watching = [stub.WatchEvents(request) for _ in range(8)]
            for call in watching:
                await call.wait_for_connection()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.WatchEvents(request).read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await _is_taken(attacked.ops, request)
            for _ in range(20):
                await attacked.honest_work()
        async with attacked.channel(attacked.tcp, OPS) as channel:
            stub = kvd_pb2_grpc.ReaderStub(channel)
            await eventually(lambda: _is_taken(stub, request), True)


async def _is_taken(stub: kvd_pb2_grpc.ReaderStub, request: kvd_pb2.WatchEventsRequest) -> bool:
    call = stub.WatchEvents(request)
    try:
        return await call.read() is not grpc.aio.EOF
    except grpc.aio.AioRpcError:
        return False
    finally:
        call.cancel()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_processes_of_other_users(attacked):
    """No socket opens for them; if its mode did, the kernel would still identify them."""
    run = attacked.kvd.runtime_dir
    names = ("data.sock", "engine.sock", "operator.sock", "reader.sock")
    let_others_enter(run)
    async with others_are_served(attacked.honest_work):
        assert set(await _as_nobody(*(run / name for name in names))) == {b"EACCES"}
        (run / "data.sock").chmod(0o666)
        answers = set(await _as_nobody(*[run / "data.sock"] * 50))
        (run / "data.sock").chmod(0o660)
    (answer,) = answers
    refused = packets.decode(answer)
    assert isinstance(refused, packets.Refused)
    assert refused.reason == "denied"
    assert 0 < attacked.kvd.log().count("data_connection_refused") < 50


async def _as_nobody(*sockets: Path) -> list[bytes]:
    """Return what another user's process gets from each socket; b"EACCES" if it cannot open it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NOBODY, str(NOBODY_UID), *map(str, sockets)),
        stdout=asyncio.subprocess.PIPE,
    )
    stdout, _ = await process.communicate()
    assert process.returncode == 0
    return [bytes.fromhex(line) for line in stdout.decode().split()]
