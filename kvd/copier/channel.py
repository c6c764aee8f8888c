"""The channel of one engine: receives copy jobs, runs them on the GPU, and reports their ends.

A channel has three threads. One reads jobs and enqueues their copies; loads and stores have a
stream each, so that the bus is used in both directions. For each direction one thread waits for
copies in their order.

Invariants:
1. Copies are within registered slots and within the ring.
2. CLOSED is sent only once nothing is copied any more.
3. An error of the GPU ends the process, because the state of running copies is unknown then.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from kvd.copier.gpu import Gpu, Ring
from shared.cuda.driver_calls import DriverError
from shared.cuda.registered_memory import RegisteredMemory, address_of
from shared.kvd_client.arena_map import ArenaMap
from shared.kvd_client.copy_jobs import (
    MAX_JOB_BYTES,
    Answered,
    Job,
    Way,
    decode_job,
    encode_answer,
)
from shared.process.log import get_logger
from shared.process.packets import MalformedPacketError

MAX_JOBS = 64  # jobs under way at once: more than an engine can have with the places of its ring

log = get_logger(__name__)


class CopierArena:
    """An arena in a copier: mapped and locked for the GPU, and shared by channels.

    Attributes:
        slots: mapping of the slots.
        address: address of the first slot.
        registered: the part of the slots that is locked for the GPU so far.
    """

    def __init__(self, gpu: Gpu, slots: ArenaMap) -> None:
        """Begin to lock the slots, in the background."""
        self.slots = slots
        self.address = address_of(slots.memory)
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        num_bytes = slots.slot_bytes * slots.num_slots
        self.registered = RegisteredMemory(
            gpu, slots.memory[:num_bytes], slots.slot_bytes, on_progress=self._announce
        )

    def add(self, channel: "Channel") -> None:
        """Report to a channel how many slots its jobs may name, now and whenever there are more."""
        with self._lock:
            self._channels.add(channel)
            channel.answer(Answered.REGISTERED, self.registered.num_slots)

    def remove(self, channel: "Channel") -> None:
        """Stop reporting to a channel."""
        with self._lock:
            self._channels.discard(channel)

    @property
    def is_used(self) -> bool:
        """Whether a channel uses the arena."""
        return bool(self._channels)

    def close(self) -> None:
        """Unlock and unmap the slots; no channel may use them any more."""
        self.registered.close()
        self.slots.close()

    def _announce(self, num_slots: int) -> None:
        with self._lock:
            for channel in self._channels:
                channel.answer(Answered.REGISTERED, num_slots)


@dataclass(frozen=True)
class _EnqueuedJob:
    """A job whose copies are enqueued.

    Attributes:
        job: the job.
        copied: handle of the copies, for Gpu.wait().
        began_s: monotonic time at which the copies were enqueued.
    """

    job: Job
    copied: Any
    began_s: float


class Channel:
    """A channel between the copier and one engine."""

    def __init__(
        self,
        gpu: Gpu,
        sock: socket.socket,
        arena: CopierArena,
        ring: Ring,
        ring_bytes: int,
        on_done: Callable[[Job], None],
        on_closed: Callable[[], None],
    ) -> None:
        """Create a channel; start() begins to serve it.

        Args:
            gpu: GPU that copies.
            sock: the channel's end of the socket, blocking; the channel owns it from now on.
            arena: arena of the slots.
            ring: the engine's ring on the GPU; the channel owns it from now on.
            ring_bytes: size of the ring.
            on_done: called on a thread of the channel after each job.
            on_closed: called on a thread of the channel once nothing is copied any more.
        """
        self._gpu = gpu
        self._sock = sock
        self._arena = arena
        self._ring = ring
        self._ring_bytes = ring_bytes
        self._on_done = on_done
        self._on_closed = on_closed
        self._streams = {way: gpu.stream() for way in Way}
        self._enqueued: dict[Way, SimpleQueue[_EnqueuedJob | None]] = {
            way: SimpleQueue() for way in Way
        }
        self._may_begin = threading.Semaphore(MAX_JOBS)
        self._oldest: dict[Way, float] = {}  # direction → begin of the job that is waited for
        self._completers = [
            threading.Thread(target=self._complete, args=(way,), name=way.name.lower(), daemon=True)
            for way in Way
        ]
        self._reader = threading.Thread(target=self._read, name="jobs", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._completers, self._reader):
            thread.start()
        self._arena.add(self)

    def answer(self, answered: Answered, number: int = 0) -> None:
        """Send an answer to the engine; ignore that it may be gone."""
        with suppress(OSError):
            self._sock.send(encode_answer(answered, number))

    def oldest_job_s(self) -> float:
        """Return for how many seconds the oldest running job has been running."""
        oldest = list(self._oldest.values())  # a copy: threads change it
        return time.monotonic() - min(oldest) if oldest else 0.0

    def close(self) -> None:
        """Accept no more jobs; `on_closed` is called once the running ones are done."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def join(self) -> None:
        """Wait until the channel is closed."""
        self._reader.join()

    def _read(self) -> None:
        """Enqueue jobs until the engine closes its end or sends an invalid job; then clean up."""
        try:
            while packet := self._sock.recv(MAX_JOB_BYTES):
                job = decode_job(packet)
                slots = self._arena.slots
                job.check(slots.slot_bytes, self._arena.registered.num_slots, self._ring_bytes)
                self._may_begin.acquire()
                self._enqueue(job)
        except (OSError, MalformedPacketError) as error:
            log.warning("copier_channel_broken", error=str(error))
        except DriverError as error:
            _die(error)
        for way in Way:
            self._enqueued[way].put(None)
        for thread in self._completers:
            thread.join()
        self._arena.remove(self)
        self.answer(Answered.CLOSED)
        self._sock.close()
        for stream in self._streams.values():
            self._gpu.end_stream(stream)
        self._ring.close()
        self._on_closed()

    def _enqueue(self, job: Job) -> None:
        slots, ring = self._arena.slots, self._ring
        first = self._arena.address + job.slot_offset
        in_arena = [first + slot_id * slots.slot_bytes for slot_id in job.slot_ids]
        begin = ring.address + job.ring_offset
        in_ring = [begin + index * job.piece_bytes for index in range(len(in_arena))]
        targets, sources = (in_ring, in_arena) if job.way is Way.LOAD else (in_arena, in_ring)
        sizes = [job.piece_bytes] * len(in_arena)
        copied = self._gpu.copy(targets, sources, sizes, self._streams[job.way])
        self._enqueued[job.way].put(_EnqueuedJob(job, copied, time.monotonic()))

    def _complete(self, way: Way) -> None:
        """Wait for the jobs of one direction in their order, and answer them."""
        while (enqueued := self._enqueued[way].get()) is not None:
            self._oldest[way] = enqueued.began_s
            try:
                self._gpu.wait(enqueued.copied)
            except DriverError as error:
                _die(error)
            self._oldest.pop(way)
            self._on_done(enqueued.job)
            self.answer(Answered.DONE, enqueued.job.job_id)
            self._may_begin.release()


def _die(error: DriverError) -> None:
    """End the process at once after an error of the GPU."""
    log.error("copier_failed", error=str(error))
    os._exit(1)
