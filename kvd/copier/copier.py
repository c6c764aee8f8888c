"""The main loop of a copier: opens and closes channels on kvd's request, and answers pings."""

import os
import socket
import threading
from collections.abc import Sequence

from kvd.copier.channel import Channel, CopierArena
from kvd.copier.control import (
    CONTROL,
    Close,
    Closed,
    Failed,
    Forget,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
)
from kvd.copier.gpu import Gpu
from shared.cuda.driver_calls import DriverError
from shared.kvd_client.arena_map import ArenaMap
from shared.kvd_client.copy_jobs import Job, Way
from shared.process.log import get_logger
from shared.process.packets import close_fds, take

MAX_JOB_S = 10.0  # a longer job is stuck: the copier stops answering pings, and kvd kills it

log = get_logger(__name__)


class Copier:
    """Serves kvd in one thread; channels have their own threads.

    Args:
        gpu: GPU that copies.
        control: blocking socket to kvd.
    """

    def __init__(self, gpu: Gpu, control: socket.socket) -> None:
        self._gpu = gpu
        self._control = control
        self._arenas: dict[str, CopierArena] = {}
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._jobs = 0
        self._num_bytes = dict.fromkeys(Way, 0)

    def run(self) -> None:
        """Handle kvd's messages until it closes the socket.

        Raises:
            OSError: the socket is broken.
            MalformedPacketError: a packet is not a valid message.
        """
        while True:
            packet, fds = take(self._control)
            if not packet:
                return
            try:
                self._handle(CONTROL.decode(packet), fds)
            finally:
                close_fds(fds)

    def _handle(self, message: Message, fds: Sequence[int]) -> None:
        if isinstance(message, Open):
            self._open(message, *fds)
        elif isinstance(message, Close) and message.channel in self._channels:
            self._channels[message.channel].close()
        elif isinstance(message, Forget):
            arena = self._arenas.get(message.arena_id)
            if arena is not None and not arena.is_used:
                del self._arenas[message.arena_id]
                arena.close()
        elif isinstance(message, Ping):
            channels = list(self._channels.values())
            if all(channel.oldest_job_s() < MAX_JOB_S for channel in channels):
                self._send(self._pong())

    def _open(self, request: Open, arena_fd: int, ring_fd: int, channel_fd: int) -> None:
        number = request.channel
        try:
            arena = self._arenas.get(request.arena_id)
            if arena is None:
                slots = ArenaMap(arena_fd, request.slot_bytes, request.num_slots)
                arena = self._arenas[request.arena_id] = CopierArena(self._gpu, slots)
            ring = self._gpu.ring(ring_fd, request.ring_bytes)
        except (OSError, ValueError, DriverError) as error:
            self._send(Failed(number, str(error)))
            return
        sock = socket.socket(fileno=os.dup(channel_fd))
        self._send(Opened(number))
        channel = self._channels[number] = Channel(
            self._gpu,
            sock,
            arena,
            ring,
            request.ring_bytes,
            on_done=self._count,
            on_closed=lambda: self._on_channel_closed(number),
        )
        channel.start()

    def _on_channel_closed(self, number: int) -> None:
        """Remove a channel, and report that it is closed. Called on one of its threads."""
        del self._channels[number]
        self._send(Closed(number))

    def _count(self, job: Job) -> None:
        """Count a finished job. Called on a thread of its channel."""
        with self._lock:
            self._jobs += 1
            self._num_bytes[job.way] += job.piece_bytes * len(job.slot_ids)

    def _pong(self) -> Pong:
        arenas = self._arenas.values()
        registered = sum(arena.registered.num_slots * arena.slots.slot_bytes for arena in arenas)
        done = self._num_bytes
        return Pong(self._jobs, done[Way.LOAD], done[Way.STORE], registered)

    def _send(self, message: Message) -> None:
        try:
            CONTROL.send(self._control, message)
        except OSError:
            os._exit(1)  # kvd is gone
