"""One attachment of an engine to a kvd: from the data socket's token to the mapped arena.

The attachment lives while two things live: the Attach stream and the data connection. The end of
either ends it, and kvd then releases all its leases (D10).
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import grpc

from shared import data_socket_protocol as packets
from shared import seqpacket
from shared.arena_map import ArenaMap
from shared.errors import ReportedError, UnavailableError
from shared.grants import KvdProtocolError
from shared.grpc_status import error_from_rpc
from shared.kv_layout import KVLayout
from shared.layout_message import layout_message
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.runtime_dir import DATA_SOCKET, ENGINE_SOCKET, channel_options


class KvdUnavailableError(UnavailableError):
    """kvd is not running, went away during the call, or did not answer in time."""

    reason = "kvd_unavailable"


@dataclass(frozen=True)
class Attachment:
    """A live attachment. Close it with close()."""

    engine_id: int
    arena: ArenaMap
    stub: kvd_pb2_grpc.EngineStub
    channel: grpc.aio.Channel
    events: "grpc.aio.UnaryStreamCall[kvd_pb2.AttachRequest, kvd_pb2.AttachEvent]"
    data: socket
    lost_leases: frozenset[int]

    async def hold(self, on_draining: Callable[[float], None]) -> None:
        """Return when the peer is gone; call `on_draining(deadline_s)` when it announces that."""
        watched = {
            asyncio.create_task(self._follow(on_draining)),
            asyncio.create_task(seqpacket.receive(self.data)),  # kvd sends nothing unasked: its end
        }
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)

    async def _follow(self, on_draining: Callable[[float], None]) -> None:
        while isinstance(event := await self.events.read(), kvd_pb2.AttachEvent):  # else: EOF
            if event.HasField("draining"):
                on_draining(event.draining.deadline_s)

    async def close(self) -> None:
        """End stream and connection; calls still under way end as cancelled."""
        self.events.cancel()
        self.data.close()
        await self.channel.close(None)


async def attach(
    runtime_dir: Path,
    layout: KVLayout,
    engine_name: str,
    held_leases: Sequence[int],
    timeout_s: float,
) -> Attachment:
    """Attach to the kvd of `runtime_dir`.

    Raises:
        KvdUnavailableError: nobody is there, or it does not answer within timeout_s.
        KvdProtocolError: it answers something else than it must.
        ReportedError: it refuses, for example a layout.
    """
    try:
        data = seqpacket.connect(str(runtime_dir / DATA_SOCKET))
    except OSError as error:
        raise KvdUnavailableError(
            f"no kvd in {runtime_dir} ({error.strerror})", "start it with: kvd serve"
        ) from error
    channel = grpc.aio.insecure_channel(
        f"unix:{runtime_dir / ENGINE_SOCKET}", options=channel_options()
    )
    try:
        async with asyncio.timeout(timeout_s):
            return await _shake_hands(data, channel, layout, engine_name, held_leases)
    except BaseException as error:
        data.close()
        await channel.close(None)
        if isinstance(error, grpc.aio.AioRpcError):
            raise error_from_rpc(error) from error
        if isinstance(error, (OSError, TimeoutError)):
            raise KvdUnavailableError(
                f"kvd in {runtime_dir} does not answer ({error!r})", "see its log"
            ) from error
        raise


async def _shake_hands(
    data: socket,
    channel: grpc.aio.Channel,
    layout: KVLayout,
    engine_name: str,
    held_leases: Sequence[int],
) -> Attachment:
    welcome, _ = await _answer(data)
    if not isinstance(welcome, packets.Welcome) or welcome.protocol != packets.PROTOCOL:
        raise _unexpected(welcome)
    stub = kvd_pb2_grpc.EngineStub(channel)
    events = stub.Attach(
        kvd_pb2.AttachRequest(
            data_token=welcome.token,
            layout=layout_message(layout),
            held_leases=held_leases,
            engine_name=engine_name,
        )
    )
    first = await events.read()
    if not isinstance(first, kvd_pb2.AttachEvent) or not first.HasField("attached"):
        raise _unexpected(first)
    attached = first.attached
    arena = await _map_arena(data, attached.arena_id)
    if (arena.slot_bytes, arena.num_slots) != (layout.block_bytes, attached.num_slots):
        raise _unexpected(f"{arena.num_slots} slots of {arena.slot_bytes} bytes")
    lost = frozenset(held_leases) - frozenset(attached.confirmed_leases)
    return Attachment(attached.engine_id, arena, stub, channel, events, data, lost)


async def _map_arena(data: socket, arena_id: str) -> ArenaMap:
    seqpacket.send(data, packets.encode(packets.ArenaRequest(arena_id)))
    mapping, fds = await _answer(data)
    try:
        if not isinstance(mapping, packets.ArenaMapping) or len(fds) != 1:
            raise _unexpected(mapping)
        return ArenaMap(fds[0], mapping.slot_bytes, mapping.num_slots)
    except ValueError as error:
        raise _unexpected(error) from error
    finally:
        for fd in fds:
            os.close(fd)


async def _answer(data: socket) -> tuple[packets.Message, list[int]]:
    packet, fds = await seqpacket.receive(data)
    try:
        if not packet:
            raise KvdUnavailableError("kvd closed the data connection", "see its log")
        message = packets.decode(packet)
        if isinstance(message, packets.Refused):
            raise KvdUnavailableError(f"kvd refused: {message.message}", message.reason)
    except packets.MalformedPacketError as error:
        seqpacket.close_fds(fds)
        raise _unexpected(error) from error
    except ReportedError:
        seqpacket.close_fds(fds)
        raise
    return message, fds


def _unexpected(what: object) -> KvdProtocolError:
    return KvdProtocolError(f"kvd answered {what!s:.80}", "check that both run the same release")
