"""One attachment of an engine to a kvd: from the data socket's token to the mapped arena.

The attachment lives while two things live: the Attach stream and the data connection. The end of
either ends it. kvd then ends its loads, and keeps the slots of its stores for this process until it
attaches again, or dies, or has said that it leaves (D10).
"""

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket

import grpc

from shared.kvd_client import data_socket_protocol as packets
from shared.kvd_client.arena_map import ArenaMap, ProgressWords
from shared.kvd_client.grants import KvdProtocolError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.process.packets import MAX_FDS, MalformedPacketError, close_fds, receive
from shared.process.runtime_dir import DATA_SOCKET, ENGINE_SOCKET, channel_options
from shared.serving.grpc_status import error_from_rpc
from shared.types.errors import ReportedError, UnavailableError

COPIER_FDS = 2  # a channel and a pidfd
WAKEUP_BYTES = 512  # taken at once: more than kvd can have sent before it finds the socket full


class KvdUnavailableError(UnavailableError):
    """kvd is not running, went away during the call, or did not answer in time."""

    reason = "kvd_unavailable"


@dataclass(frozen=True)
class MappedArena:
    """A mapping that an attachment takes over from the one before, if it is the same memory.

    Attributes:
        memory: the arena's id, device and inode of its file, bytes of a slot, number of slots.
        slots: the mapped slots.
    """

    memory: tuple[str, int, int, int, int]
    slots: ArenaMap


@dataclass(frozen=True)
class Attachment:
    """A live attachment. Close it with close().

    Attributes:
        confirmed_leases: leases held before that are still ours, and owed a complete_store.
        lost_leases: leases held before whose slots other engines may have already.
        max_queue_jobs: most requests that kvd takes of the queue.
        offers_copiers: kvd may be asked for a channel to the copier of a GPU.
        offers_retention: kvd may be told how long sessions are to be kept.
        offers_expectations: kvd may be told what is likely to become of sessions.
        offers_grafts: a session may be given KV of another one's tokens.
        offers_fetch_waits: a load may wait for a session that is fetched from elsewhere.
        offers_states: states of a layout that has them are kept; `offers_windows`: windows.
    """

    engine_id: int
    mapped: MappedArena
    progress: ProgressWords
    wakeup_fd: int
    stub: kvd_pb2_grpc.EngineStub
    channel: grpc.aio.Channel
    events: "grpc.aio.UnaryStreamCall[pb.AttachRequest, pb.AttachEvent]"
    data: socket
    confirmed_leases: frozenset[int]
    lost_leases: frozenset[int]
    max_queue_jobs: int
    offers_copiers: bool
    offers_retention: bool
    offers_expectations: bool
    offers_grafts: bool
    offers_fetch_waits: bool
    offers_states: bool
    offers_windows: bool
    _asked: "list[asyncio.Future[tuple[bytes, list[int]]]]" = field(default_factory=list)

    async def hold(self, on_draining: Callable[[float], None]) -> None:
        """Return when kvd is gone; call `on_draining(deadline_s)` when it announces that."""
        watched = {
            asyncio.create_task(self._follow(on_draining)),
            asyncio.create_task(self._listen()),
        }
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # nothing that can be waited for: waits end by deadline
            loop.add_reader(self.wakeup_fd, self._wake)
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self.wakeup_fd)
            self.progress.end("kvd is not attached any more")
            for asked in self._asked:
                if not asked.done():
                    asked.set_exception(ConnectionResetError("the attachment has ended"))
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)

    async def open_copier(self, device: str, ring_fd: int, ring_bytes: int) -> tuple[socket, int]:
        """Ask for a channel to the copier of a GPU; one at a time, while `hold` runs.

        Args:
            device: the GPU's UUID.
            ring_fd: memory of ours on it; stays the caller's.
            ring_bytes: its size.

        Returns:
            The channel, and a pidfd of the copier; both are the caller's.

        Raises:
            KvdUnavailableError: there is no copier, or kvd has gone.
            KvdProtocolError: kvd answers something else.
        """
        if not self.offers_copiers:
            raise KvdUnavailableError("kvd starts no copiers", "set copier.enabled in its settings")
        asked: asyncio.Future[tuple[bytes, list[int]]] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        try:
            request = packets.CopierRequest(self.mapped.memory[0], device, ring_bytes)
            packets.send(self.data, request, [ring_fd])
            packet, fds = await asked
        except OSError as error:
            raise KvdUnavailableError("kvd closed the data connection", "see its log") from error
        finally:
            self._asked.remove(asked)
        answer = _decoded(packet, fds)
        if isinstance(answer, packets.NoCopier):
            close_fds(fds)
            raise KvdUnavailableError(f"no copier: {answer.message}", answer.remedy)
        if not isinstance(answer, packets.CopierChannel) or len(fds) != COPIER_FDS:
            close_fds(fds)
            raise _unexpected(answer)
        return socket(fileno=fds[0]), fds[1]

    async def _listen(self) -> None:
        """Take answers until the connection ends; kvd sends nothing that was not asked for."""
        while True:
            packet, fds = await receive(self.data)
            waiting = [asked for asked in self._asked if not asked.done()]
            if packet and waiting:
                waiting[0].set_result((packet, fds))
                continue
            close_fds(fds)
            return

    def _wake(self) -> None:
        """Take what kvd has sent over the wakeup, and let waiting threads look at their words."""
        try:
            is_alive = bool(os.read(self.wakeup_fd, WAKEUP_BYTES))
        except BlockingIOError:
            is_alive = True
        except OSError:  # nothing that can be read
            is_alive = False
        if not is_alive:  # kvd has closed it, and it would be readable for ever
            asyncio.get_running_loop().remove_reader(self.wakeup_fd)
        self.progress.wake()

    async def _follow(self, on_draining: Callable[[float], None]) -> None:
        while isinstance(event := await self.events.read(), pb.AttachEvent):  # else: EOF
            if event.HasField("draining"):
                on_draining(event.draining.deadline_s)

    async def close(self, *, leaving: bool) -> None:
        """End stream and connection; calls still under way end as cancelled.

        Args:
            leaving: no thread of ours touches a slot any more, and none will.
        """
        if leaving:
            with contextlib.suppress(OSError):  # it is gone: then there is nobody to notify
                packets.send(self.data, packets.Leaving())
        self.events.cancel()
        self.data.close()
        os.close(self.wakeup_fd)
        await self.channel.close(None)


async def attach(
    runtime_dir: Path,
    request: pb.AttachRequest,
    block_bytes: int,
    known: MappedArena | None,
    timeout_s: float,
) -> Attachment:
    """Attach to the kvd of `runtime_dir`.

    Args:
        runtime_dir: the directory of its sockets.
        request: who we are, the layout of the blocks to load and store, and the leases of earlier
            attachments whose slots threads of ours may be copying; the token is put in here.
        block_bytes: bytes of a block of that layout.
        known: the arena that is mapped already; None: none.
        timeout_s: most seconds for all of it.

    Raises:
        KvdUnavailableError: nobody is there, or it does not answer within timeout_s.
        KvdProtocolError: it answers something else than it must.
        ReportedError: it refuses, for example a layout.
    """
    try:
        data = packets.connect(str(runtime_dir / DATA_SOCKET))
    except OSError as error:
        raise KvdUnavailableError(
            f"no kvd in {runtime_dir} ({error.strerror})", "start it with: kvd serve"
        ) from error
    channel = grpc.aio.insecure_channel(
        f"unix:{runtime_dir / ENGINE_SOCKET}", options=channel_options()
    )
    try:
        async with asyncio.timeout(timeout_s):
            return await _shake_hands(data, channel, request, block_bytes, known)
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
    request: pb.AttachRequest,
    block_bytes: int,
    known: MappedArena | None,
) -> Attachment:
    welcome, fds = await _answer(data)
    close_fds(fds)
    if not isinstance(welcome, packets.Welcome) or welcome.protocol != packets.PROTOCOL:
        raise _unexpected(welcome)
    stub = kvd_pb2_grpc.EngineStub(channel)
    request.data_token = welcome.token
    events = stub.Attach(request)
    first = await events.read()
    if not isinstance(first, pb.AttachEvent) or not first.HasField("attached"):
        raise _unexpected(first)
    attached = first.attached
    if request.layout.state_bytes and not attached.states:
        raise KvdUnavailableError("this kvd keeps no states of recurrent layers", "update kvd")
    windows = {layer.window for layer in request.layout.layers if layer.components}
    if 0 in windows and any(windows) and not attached.windows:
        raise KvdUnavailableError("this kvd keeps no windows of layers apart", "update kvd")
    mapped, progress, wakeup_fd = await _map_arena(data, attached.arena_id, known)
    slots = mapped.slots
    if (slots.slot_bytes, slots.num_slots) != (block_bytes, attached.num_slots):
        os.close(wakeup_fd)
        raise _unexpected(f"{slots.num_slots} slots of {slots.slot_bytes} bytes")
    held = frozenset(request.held_leases)
    confirmed = held & frozenset(attached.confirmed_leases)
    return Attachment(
        engine_id=attached.engine_id,
        mapped=mapped,
        progress=progress,
        wakeup_fd=wakeup_fd,
        stub=stub,
        channel=channel,
        events=events,
        data=data,
        confirmed_leases=confirmed,
        lost_leases=held - confirmed,
        max_queue_jobs=attached.max_queue_jobs,
        offers_copiers=attached.copiers,
        offers_retention=attached.retention,
        offers_expectations=attached.expectations,
        offers_grafts=attached.grafts,
        offers_fetch_waits=attached.fetch_waits,
        offers_states=attached.states,
        offers_windows=attached.windows,
    )


async def _map_arena(
    data: socket, arena_id: str, known: MappedArena | None
) -> tuple[MappedArena, ProgressWords, int]:
    """Map what kvd hands out; the wakeup is the caller's to close."""
    packets.send(data, packets.ArenaRequest(arena_id))
    answer, fds = await _answer(data)
    keep_fd = -1
    try:
        if not isinstance(answer, packets.ArenaMapping) or len(fds) != MAX_FDS:
            raise _unexpected(answer)
        slots_fd, progress_fd, wakeup_fd = fds
        status = os.fstat(slots_fd)
        sizes = answer.slot_bytes, answer.num_slots
        memory = arena_id, status.st_dev, status.st_ino, *sizes
        if known is not None and known.memory == memory:  # what is registered of it stays so
            mapped = known
        else:
            mapped = MappedArena(memory, ArenaMap(slots_fd, *sizes))
        progress = ProgressWords(progress_fd, answer.num_words)
        os.set_blocking(wakeup_fd, False)
        keep_fd = wakeup_fd
    except ValueError as error:
        raise _unexpected(error) from error
    finally:
        close_fds([fd for fd in fds if fd != keep_fd])
    return mapped, progress, keep_fd


async def _answer(data: socket) -> tuple[packets.Message, list[int]]:
    packet, fds = await receive(data)
    return _decoded(packet, fds), fds


def _decoded(packet: bytes, fds: list[int]) -> packets.Message:
    """Parse an answer; its descriptors are closed if that raises."""
    try:
        if not packet:
            raise KvdUnavailableError("kvd closed the data connection", "see its log")
        message = packets.decode(packet)
        if isinstance(message, packets.Refused):
            raise KvdUnavailableError(f"kvd refused: {message.message}", message.reason)
    except MalformedPacketError as error:
        close_fds(fds)
        raise _unexpected(error) from error
    except ReportedError:
        close_fds(fds)
        raise
    return message


def _unexpected(what: object) -> KvdProtocolError:
    return KvdProtocolError(f"kvd answered {what!s:.80}", "check that both run the same release")
