"""An engine's raw attachment: its data connection, its stream, its three descriptors."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import grpc

from shared.kvd_client import data_socket_protocol as packets
from shared.kvd_client.messages import layout_message
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process import packets as any_packets
from shared.types.kv_layout import KVLayout

ANSWER_S = 30.0


@dataclass(frozen=True)
class RawEngine:
    """What an engine process gets from kvd; it owns all descriptors."""

    engine_id: int
    arena_id: str
    stub: kvd_pb2_grpc.EngineStub
    data: socket
    slots_fd: int
    progress_fd: int
    wakeup_fd: int


async def receive(data: socket) -> tuple[packets.Message | None, list[int]]:
    """Return the next packet and its descriptors; None at the end of the connection."""
    async with asyncio.timeout(ANSWER_S):
        try:
            packet, fds = await any_packets.receive(data)
        except ConnectionError:
            return None, []
    return (packets.decode(packet) if packet else None), fds


async def open_calls(engine: RawEngine) -> socket:
    """Return the engine's socket for local calls; it does not block."""
    packets.send(engine.data, packets.CallsRequest(engine.arena_id))
    answer, fds = await receive(engine.data)
    assert isinstance(answer, packets.CallSocket)
    calls = socket(fileno=fds[0])
    calls.setblocking(False)
    return calls


@asynccontextmanager
async def raw_engine(runtime_dir: Path, layout: KVLayout) -> AsyncIterator[RawEngine]:
    """Attach, and announce the exit at the end."""
    data = packets.connect(str(runtime_dir / "data.sock"))
    welcome, _ = await receive(data)
    assert isinstance(welcome, packets.Welcome)
    async with grpc.aio.insecure_channel(f"unix:{runtime_dir / 'engine.sock'}") as channel:
        stub = kvd_pb2_grpc.EngineStub(channel)
        request = kvd_pb2.AttachRequest(
            data_token=welcome.token,
            layout=layout_message(layout),
            engine_name="raw",
            instance=secrets.token_hex(16),
        )
        events = stub.Attach(request)
        attached = (await events.read()).attached
        packets.send(data, packets.ArenaRequest(attached.arena_id))
        mapping, fds = await receive(data)
        assert isinstance(mapping, packets.ArenaMapping)
        try:
            yield RawEngine(attached.engine_id, attached.arena_id, stub, data, *fds)
        finally:
            for fd in fds:
                os.close(fd)
            with suppress(OSError):  # kvd has ended
                packets.send(data, packets.Leaving())
            data.close()
