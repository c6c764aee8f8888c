"""One engine's channel: takes its jobs, has the GPU copy, and says when the bytes are there.

Three threads: one reads jobs and enqueues their copies, loads and stores each on a stream of its
own, so that the bus is used both ways; for each way one waits for copies, in their order.

Invariants: 1. what is copied is within registered slots and within the ring; 2. CLOSED is said once
nothing is copied any more; 3. an error of the GPU ends the process: nobody knows what is under way.
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

MOST_JOBS = 64  # under way at once: an engine has fewer, by the places of its ring

log = get_logger(__name__)


class CopierArena:
    """An arena in a copier: mapped, and locked in place for the GPU while channels come and go."""

    def __init__(self, gpu: Gpu, slots: ArenaMap) -> None:
        """Begin to lock the slots."""
        self.slots = slots
        self.address = address_of(slots.memory)
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        num_bytes = slots.slot_bytes * slots.num_slots
        self.registered = RegisteredMemory(
            gpu, slots.memory[:num_bytes], slots.slot_bytes, on_progress=self._announce
        )

    def add(self, channel: "Channel") -> None:
        """Tell a channel how many slots it may name, now and when there are more."""
        with self._lock:
            self._channels.add(channel)
            channel.answer(Answered.REGISTERED, self.registered.num_slots)

    def remove(self, channel: "Channel") -> None:
        """Tell it no more."""
        with self._lock:
            self._channels.discard(channel)

    @property
    def is_used(self) -> bool:
        """Whether a channel copies from or to it."""
        return bool(self._channels)

    def close(self) -> None:
        """Unlock and unmap; no channel uses it any more."""
        self.registered.close()
        self.slots.close()

    def _announce(self, num_slots: int) -> None:
        with self._lock:
            for channel in self._channels:
                channel.answer(Answered.REGISTERED, num_slots)


@dataclass(frozen=True)
class _Begun:
    """A job whose copies are enqueued."""

    job: Job
    copied: Any
    began_s: float


class Channel:
    """See the module docstring."""

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
        """Make it; `start` follows.

        Args:
            gpu: that copies.
            sock: the channel's end, which blocks; taken over.
            arena: whose slots jobs name.
            ring: the engine's memory on the GPU; taken over.
            ring_bytes: its size.
            on_done: callback, on a thread, after each job.
            on_closed: callback, on a thread, once nothing is copied any more.
        """
        self._gpu = gpu
        self._sock = sock
        self._arena = arena
        self._ring = ring
        self._ring_bytes = ring_bytes
        self._on_done = on_done
        self._on_closed = on_closed
        self._streams = {way: gpu.stream() for way in Way}
        self._begun: dict[Way, SimpleQueue[_Begun | None]] = {way: SimpleQueue() for way in Way}
        self._may_begin = threading.Semaphore(MOST_JOBS)
        self._oldest: dict[Way, float] = {}
        self._waiting = [
            threading.Thread(target=self._complete, args=(way,), name=way.name.lower(), daemon=True)
            for way in Way
        ]
        self._reading = threading.Thread(target=self._read, name="jobs", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        for thread in (*self._waiting, self._reading):
            thread.start()
        self._arena.add(self)

    def answer(self, answered: Answered, number: int = 0) -> None:
        """Say something to the engine, which may be gone."""
        with suppress(OSError):
            self._sock.send(encode_answer(answered, number))

    def waited_s(self) -> float:
        """Return for how long the GPU has been at its oldest job."""
        oldest = list(self._oldest.values())  # a copy: threads change it
        return time.monotonic() - min(oldest) if oldest else 0.0

    def close(self) -> None:
        """Take no more jobs; `on_closed` follows when those under way are done."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def join(self) -> None:
        """Wait for the end."""
        self._reading.join()

    def _read(self) -> None:
        """Begin jobs until the engine closes its side or says nonsense; then end."""
        try:
            while packet := self._sock.recv(MAX_JOB_BYTES):
                job = decode_job(packet)
                slots = self._arena.slots
                job.check(slots.slot_bytes, self._arena.registered.num_slots, self._ring_bytes)
                self._may_begin.acquire()
                self._begin(job)
        except (OSError, MalformedPacketError) as error:
            log.warning("copier_channel_broken", error=str(error))
        except DriverError as error:
            _die(error)
        for way in Way:
            self._begun[way].put(None)
        for thread in self._waiting:
            thread.join()
        self._arena.remove(self)
        self.answer(Answered.CLOSED)
        self._sock.close()
        for stream in self._streams.values():
            self._gpu.end_stream(stream)
        self._ring.close()
        self._on_closed()

    def _begin(self, job: Job) -> None:
        slots, ring = self._arena.slots, self._ring
        first = self._arena.address + job.slot_offset
        in_arena = [first + slot_id * slots.slot_bytes for slot_id in job.slot_ids]
        begin = ring.address + job.ring_offset
        in_ring = [begin + index * job.piece_bytes for index in range(len(in_arena))]
        targets, sources = (in_ring, in_arena) if job.way is Way.LOAD else (in_arena, in_ring)
        sizes = [job.piece_bytes] * len(in_arena)
        copied = self._gpu.copy(targets, sources, sizes, self._streams[job.way])
        self._begun[job.way].put(_Begun(job, copied, time.monotonic()))

    def _complete(self, way: Way) -> None:
        """Wait for jobs of one way, in order, and answer them."""
        while (begun := self._begun[way].get()) is not None:
            self._oldest[way] = begun.began_s
            try:
                self._gpu.wait(begun.copied)
            except DriverError as error:
                _die(error)
            self._oldest.pop(way)
            self._on_done(begun.job)
            self.answer(Answered.DONE, begun.job.job_id)
            self._may_begin.release()


def _die(error: DriverError) -> None:
    """End the process at once."""
    log.error("copier_failed", error=str(error))
    os._exit(1)
