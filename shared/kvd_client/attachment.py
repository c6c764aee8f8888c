"""One attachment of an engine to a kvd: handshake, mapped arena, events and their end.

The attachment lasts as long as both the Attach stream and the data connection. When either ends,
kvd ends the attachment's loads, and keeps the slots of its stores reserved for this process until
the process attaches again, has said that it leaves, or dies (D10).
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
from shared.kvd_client.local_channel import LocalChannel
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.process.packets import MAX_FDS, MalformedPacketError, close_fds, receive
from shared.process.runtime_dir import DATA_SOCKET, ENGINE_SOCKET, channel_options
from shared.serving.grpc_status import error_from_rpc
from shared.types.errors import ReportedError, UnavailableError

COPIER_FDS = 2  # a channel and a pidfd
WAKEUP_BYTES = 512  # read at a time: more than fits before kvd finds the socket full


class KvdUnavailableError(UnavailableError):
    """kvd is not running, went away during the call, or did not answer in time."""

    reason = "kvd_unavailable"


@dataclass(frozen=True)
class MappedArena:
    """A mapped arena, which the next attachment reuses if it is the same memory.

    Attributes:
        memory: the arena's id, device and inode of its file, bytes per slot, number of slots.
        slots: the mapped slots.
    """

    memory: tuple[str, int, int, int, int]
    slots: ArenaMap


@dataclass(frozen=True)
class Attachment:
    """A live attachment; the owner closes it with close().

    Attributes:
        engine_id: id of this engine at kvd, which works like a key: see messages.shown_id.
        mapped: the mapped arena.
        progress: the progress words of our loads.
        wakeup_fd: socket to which kvd writes after it has changed a progress word.
        stub: the RPCs of kvd's Engine service.
        channel: gRPC's channel to it.
        local: the channel of the stub's unary calls; None: an older kvd, they use gRPC as well.
        events: the Attach stream; to cancel it ends the attachment.
        data: the connection to the data socket.
        confirmed_leases: earlier store leases that are still ours, and owed a complete_store.
        lost_leases: earlier store leases whose slots other engines may have already.
        max_queue_jobs: most requests of the queue that kvd takes.
        offers_copiers: whether kvd gives channels to the copiers of GPUs.
        offers_retention: whether kvd retains sessions on request.
        offers_expectations: whether kvd takes hints about sessions after a turn.
        offers_grafts: whether kvd grafts KV of one session onto another.
        offers_fetch_waits: whether loads may wait for sessions that come from a remote store.
        offers_states: whether kvd keeps the states of a layout that has them.
        offers_windows: whether kvd keeps the windows of a layout that has them.
    """

    engine_id: int
    mapped: MappedArena
    progress: ProgressWords
    wakeup_fd: int
    stub: kvd_pb2_grpc.EngineStub
    channel: grpc.aio.Channel
    local: LocalChannel | None
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
    _copier_replies: "list[asyncio.Future[tuple[bytes, list[int]]]]" = field(default_factory=list)

    async def hold(self, on_draining: Callable[[float], None]) -> None:
        """Wait until the attachment ends; call `on_draining(deadline_s)` when kvd announces it."""
        watched = {
            asyncio.create_task(self._read_events(on_draining)),
            asyncio.create_task(self._listen()),
        }
        if self.local is not None:
            watched.add(asyncio.create_task(self.local.wait_ended()))
        loop = asyncio.get_running_loop()
        # If the descriptor cannot be polled, waits for layers end by their deadlines only.
        with contextlib.suppress(OSError):
            loop.add_reader(self.wakeup_fd, self._wake)
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self.wakeup_fd)
            self.progress.end("kvd is not attached any more")
            for reply in self._copier_replies:
                if not reply.done():
                    reply.set_exception(ConnectionResetError("the attachment has ended"))
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)

    async def open_copier(self, device: str, ring_fd: int, ring_bytes: int) -> tuple[socket, int]:
        """Request a channel to the copier of a GPU; one request at a time, while `hold` runs.

        Args:
            device: the GPU's UUID.
            ring_fd: descriptor of our memory on that GPU; the caller keeps it.
            ring_bytes: size of that memory.

        Returns:
            The channel, and a pidfd of the copier; the caller owns both.

        Raises:
            KvdUnavailableError: there is no copier, or kvd has gone.
            KvdProtocolError: kvd answers with another message.
        """
        if not self.offers_copiers:
            raise KvdUnavailableError(
                "kvd starts no copiers", "set copier.enabled in kvd's settings"
            )
        reply: asyncio.Future[tuple[bytes, list[int]]] = asyncio.get_running_loop().create_future()
        self._copier_replies.append(reply)
        try:
            request = packets.CopierRequest(self.mapped.memory[0], device, ring_bytes)
            packets.send(self.data, request, [ring_fd])
            packet, fds = await reply
        except OSError as error:
            raise KvdUnavailableError(
                "kvd closed the data connection", "the log of kvd says why"
            ) from error
        finally:
            self._copier_replies.remove(reply)
        answer = _decode(packet, fds)
        if isinstance(answer, packets.NoCopier):
            close_fds(fds)
            raise KvdUnavailableError(
                f"kvd has no copier for this GPU: {answer.message}", answer.remedy
            )
        if not isinstance(answer, packets.CopierChannel) or len(fds) != COPIER_FDS:
            close_fds(fds)
            raise _unexpected(answer)
        return socket(fileno=fds[0]), fds[1]

    async def _listen(self) -> None:
        """Receive answers until the connection ends; kvd sends only what was requested."""
        while True:
            packet, fds = await receive(self.data)
            waiting = [reply for reply in self._copier_replies if not reply.done()]
            if packet and waiting:
                waiting[0].set_result((packet, fds))
                continue
            close_fds(fds)
            return

    def _wake(self) -> None:
        """Drain the wakeup, and let waiting threads read their progress words."""
        try:
            is_alive = bool(os.read(self.wakeup_fd, WAKEUP_BYTES))
        except BlockingIOError:
            is_alive = True
        except OSError:  # it cannot be read
            is_alive = False
        if not is_alive:  # kvd has closed it: it would stay readable and spin the loop
            asyncio.get_running_loop().remove_reader(self.wakeup_fd)
        self.progress.wake()

    async def _read_events(self, on_draining: Callable[[float], None]) -> None:
        """Read the events of the Attach stream until it ends."""
        while isinstance(event := await self.events.read(), pb.AttachEvent):  # else: EOF
            if event.HasField("draining"):
                on_draining(event.draining.deadline_s)

    async def close(self, *, leaving: bool) -> None:
        """End the stream and the connection; calls still under way end as cancelled.

        Args:
            leaving: whether no thread of ours uses a slot, now or later, so that kvd may free all.
        """
        if leaving:
            with contextlib.suppress(OSError):  # kvd is gone already
                packets.send(self.data, packets.Leaving())
        self.events.cancel()
        self.data.close()
        if self.local is not None:
            self.local.close()
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
        request: our identity, the layout of the blocks to load and store, and the leases of earlier
            attachments whose slots our threads may still be copying; the token is added here.
        block_bytes: bytes per block of that layout.
        known: the arena that is mapped already; None: none.
        timeout_s: most seconds for the whole handshake.

    Raises:
        KvdUnavailableError: kvd is not running, or does not answer within timeout_s.
        KvdProtocolError: its answers break the protocol.
        ReportedError: it refuses, for example because of the layout.
    """
    try:
        data = packets.connect(str(runtime_dir / DATA_SOCKET))
    except OSError as error:
        raise KvdUnavailableError(
            f"kvd is not running in {runtime_dir} ({error.strerror})", "start it with: kvd serve"
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
                f"kvd in {runtime_dir} does not answer ({error!r})", "the log of kvd may say why"
            ) from error
        raise


async def _shake_hands(
    data: socket,
    channel: grpc.aio.Channel,
    request: pb.AttachRequest,
    block_bytes: int,
    known: MappedArena | None,
) -> Attachment:
    """Do the handshake: token, Attach, checks of what kvd offers, mapping of the arena."""
    welcome, fds = await _receive_message(data)
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
        raise KvdUnavailableError(
            "this kvd cannot store the states of recurrent layers", "update kvd"
        )
    windows = {layer.window for layer in request.layout.layers if layer.components}
    if 0 in windows and any(windows) and not attached.windows:
        raise KvdUnavailableError(
            "this kvd cannot store the KV of windowed layers separately", "update kvd"
        )
    mapped, progress, wakeup_fd = await _map_arena(data, attached.arena_id, known)
    slots = mapped.slots
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, wakeup_fd)
        if (slots.slot_bytes, slots.num_slots) != (block_bytes, attached.num_slots):
            raise _unexpected(f"{slots.num_slots} slots of {slots.slot_bytes} bytes")
        local = None
        if attached.local_calls:
            local = await _open_calls(data, attached.arena_id, channel)
        undo.pop_all()
    held = frozenset(request.held_leases)
    confirmed = held & frozenset(attached.confirmed_leases)
    return Attachment(
        engine_id=attached.engine_id,
        mapped=mapped,
        progress=progress,
        wakeup_fd=wakeup_fd,
        stub=stub if local is None else kvd_pb2_grpc.EngineStub(local),
        channel=channel,
        local=local,
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
    """Request the arena's descriptors and map them; the caller owns the returned wakeup."""
    packets.send(data, packets.ArenaRequest(arena_id))
    answer, fds = await _receive_message(data)
    keep_fd = -1
    try:
        if not isinstance(answer, packets.ArenaMapping) or len(fds) != MAX_FDS:
            raise _unexpected(answer)
        slots_fd, progress_fd, wakeup_fd = fds
        status = os.fstat(slots_fd)
        sizes = answer.slot_bytes, answer.num_slots
        memory = arena_id, status.st_dev, status.st_ino, *sizes
        if known is not None and known.memory == memory:  # keep its registration with the GPU
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


async def _open_calls(data: socket, arena_id: str, streams: grpc.aio.Channel) -> LocalChannel:
    """Request a socket for our calls."""
    packets.send(data, packets.CallsRequest(arena_id))
    answer, fds = await _receive_message(data)
    if not isinstance(answer, packets.CallSocket) or len(fds) != 1:
        close_fds(fds)
        raise _unexpected(answer)
    local = LocalChannel(streams)
    try:
        await local.open(fds[0])
    except ValueError as error:
        raise _unexpected(error) from error
    return local


async def _receive_message(data: socket) -> tuple[packets.Message, list[int]]:
    packet, fds = await receive(data)
    return _decode(packet, fds), fds


def _decode(packet: bytes, fds: list[int]) -> packets.Message:
    """Decode an answer; close its descriptors if that raises."""
    try:
        if not packet:
            raise KvdUnavailableError("kvd closed the data connection", "the log of kvd says why")
        message = packets.decode(packet)
        if isinstance(message, packets.Refused):
            raise KvdUnavailableError(
                f"kvd refused the connection ({message.reason}): {message.message}",
                "the log of kvd says more",
            )
    except MalformedPacketError as error:
        close_fds(fds)
        raise _unexpected(error) from error
    except ReportedError:
        close_fds(fds)
        raise
    return message


def _unexpected(what: object) -> KvdProtocolError:
    return KvdProtocolError(
        f"kvd sent an unexpected answer: {what!s:.80}",
        "check that kvd and the engine run the same release",
    )
