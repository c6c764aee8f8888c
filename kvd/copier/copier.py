"""What a copier does: opens and closes channels as kvd says, and says that it is alive."""

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

MOST_JOB_S = 10.0  # a job that takes longer is stuck: kvd hears no more from us, and kills us

log = get_logger(__name__)


class Copier:
    """Serves kvd; one thread, beside those of the channels.

    Args:
        gpu: that copies.
        control: the socket to kvd, which blocks.
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
        """Do what kvd says until it closes the socket.

        Raises:
            OSError: the socket breaks.
            MalformedPacketError: it says what is none of its messages.
        """
        while True:
            packet, fds = take(self._control)
            if not packet:
                return
            try:
                self._do(CONTROL.decode(packet), fds)
            finally:
                close_fds(fds)

    def _do(self, message: Message, fds: Sequence[int]) -> None:
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
            if all(channel.waited_s() < MOST_JOB_S for channel in channels):
                self._say(self._pong())

    def _open(self, wanted: Open, arena_fd: int, ring_fd: int, channel_fd: int) -> None:
        number = wanted.channel
        try:
            arena = self._arenas.get(wanted.arena_id)
            if arena is None:
                slots = ArenaMap(arena_fd, wanted.slot_bytes, wanted.num_slots)
                arena = self._arenas[wanted.arena_id] = CopierArena(self._gpu, slots)
            ring = self._gpu.ring(ring_fd, wanted.ring_bytes)
        except (OSError, ValueError, DriverError) as error:
            self._say(Failed(number, str(error)))
            return
        sock = socket.socket(fileno=os.dup(channel_fd))
        self._say(Opened(number))
        channel = self._channels[number] = Channel(
            self._gpu,
            sock,
            arena,
            ring,
            wanted.ring_bytes,
            on_done=self._count,
            on_closed=lambda: self._closed(number),
        )
        channel.start()

    def _closed(self, number: int) -> None:
        """Note that nothing is copied for a channel any more. On one of its threads."""
        del self._channels[number]
        self._say(Closed(number))

    def _count(self, job: Job) -> None:
        """Count a job that is done. On a thread of its channel."""
        with self._lock:
            self._jobs += 1
            self._num_bytes[job.way] += job.piece_bytes * len(job.slot_ids)

    def _pong(self) -> Pong:
        arenas = self._arenas.values()
        registered = sum(arena.registered.num_slots * arena.slots.slot_bytes for arena in arenas)
        done = self._num_bytes
        return Pong(self._jobs, done[Way.LOAD], done[Way.STORE], registered)

    def _say(self, message: Message) -> None:
        try:
            CONTROL.send(self._control, message)
        except OSError:
            os._exit(1)  # kvd is gone
