"""A malicious kvd: it attaches engines like the real one, and answers their calls with nonsense."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from shared.kvd_client import data_socket_protocol as packets
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.packets import close_fds, receive
from shared.process.runtime_dir import DATA_SOCKET, ENGINE_SOCKET

SLOT_BYTES = 3 * 64 * 1024
NUM_SLOTS = 4
Answer = Callable[[kvd_pb2.PrepareLoadRequest], kvd_pb2.PrepareLoadResponse]


class HostileEngineService(kvd_pb2_grpc.EngineServicer):
    """Answers every PrepareLoad with the given response, and refuses every store for no reason."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.num_loads = 0

    async def Attach(self, request, context):  # noqa: N802
        """Attach every engine."""
        attached = kvd_pb2.Attached(
            engine_id=1,
            arena_id="lies",
            slot_bytes=SLOT_BYTES,
            num_slots=NUM_SLOTS,
            max_queue_jobs=1000,
        )
        yield kvd_pb2.AttachEvent(attached=attached)
        await asyncio.get_running_loop().create_future()  # until the engine disconnects

    async def PrepareLoad(self, request, context):  # noqa: N802
        """Return the given response."""
        self.num_loads += 1
        return self._answer(request)

    async def CompleteLoad(self, request, context):  # noqa: N802
        """Report every lease as unknown."""
        await context.abort(grpc.StatusCode.NOT_FOUND, "what lease?")

    async def PushQueue(self, requests, context):  # noqa: N802
        """Acknowledge snapshots that were never sent, and finally nothing."""
        async for snapshot in requests:
            if snapshot.sequence % 5 == 0:
                return
            yield kvd_pb2.QueueAck(sequence=snapshot.sequence + 7)

    async def PrepareStore(self, request, context):  # noqa: N802
        """Grant a slot that does not exist."""
        block = kvd_pb2.StoreBlock(slot_id=10**6, num_tokens=1)
        return kvd_pb2.PrepareStoreResponse(lease_id=7, blocks=[block], end_token=1)


@asynccontextmanager
async def hostile_kvd(runtime_dir: Path, answer: Answer) -> AsyncIterator[HostileEngineService]:
    """Serve nonsense in the directory where the engine looks for kvd."""
    _clear(runtime_dir)
    service = HostileEngineService(answer)
    server = grpc.aio.server()
    kvd_pb2_grpc.add_EngineServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{runtime_dir / ENGINE_SOCKET}")
    await server.start()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    listener.bind(str(runtime_dir / DATA_SOCKET))
    listener.listen()
    serving = asyncio.create_task(_hand_out_arenas(listener))
    try:
        yield service
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
        await server.stop(None)


def _clear(runtime_dir: Path) -> None:
    """Remove the sockets that a killed kvd has left."""
    runtime_dir.mkdir(parents=True, exist_ok=True)
    for name in (ENGINE_SOCKET, DATA_SOCKET):
        (runtime_dir / name).unlink(missing_ok=True)


async def _hand_out_arenas(listener: socket.socket) -> None:
    fd = os.memfd_create("lies")
    os.ftruncate(fd, SLOT_BYTES * NUM_SLOTS)
    wakeup_fd = os.eventfd(0)  # what an older kvd hands out; no engine writes it
    connections = []
    try:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            connection.setblocking(False)
            connections.append(connection)
            packets.send(connection, packets.Welcome("token"))
            await receive(connection)
            mapping = packets.ArenaMapping(SLOT_BYTES, NUM_SLOTS, NUM_SLOTS)
            packets.send(connection, mapping, [fd, fd, wakeup_fd])
    finally:
        close_fds([fd, wakeup_fd])
        for connection in connections:
            connection.close()
