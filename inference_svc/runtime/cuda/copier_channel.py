"""CopierChannel: lets any thread copy between slots and our GPU's memory by kvd's copier.

Between slots and KV is the ring: memory of ours on the GPU, which the copier has mapped, divided
into places. A thread takes a place, lets the copier fill or empty it, and gives it back.

A thread of the channel receives the copier's answers. If the copier dies, its socket closes before
the GPU has stopped its copies. So a job counts as over only when the copier's process is gone,
which its pidfd reports.
"""

import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from os import close as close_fd

from torch import Tensor

from inference_svc.runtime.cuda.device_arena import Staging
from shared.kvd_client.arena_map import ArenaMap
from shared.kvd_client.copy_jobs import (
    ANSWER_BYTES,
    Answered,
    Job,
    Way,
    decode_answer,
    encode_job,
)
from shared.process.log import get_logger
from shared.process.packets import MalformedPacketError

PLACES = 8
PLACE_BYTES = 8 << 20
MOST_JOB_ID = 1 << 32

log = get_logger(__name__)


class CopierGoneError(Exception):
    """The copier is dead, and none of its copies is under way: use other copies."""


class Place(Staging):
    """A part of the ring; used by one thread at a time.

    Attributes:
        offset: bytes from the beginning of the ring.
    """

    def __init__(self, ring: Tensor, offset: int, num_bytes: int) -> None:
        super().__init__(ring[offset : offset + num_bytes])
        self.offset = offset


class CopierChannel:
    """A channel to the copier; every method may be called from any thread.

    Attributes:
        arena: the arena whose slots are copied.
        place_bytes: bytes of a place.
        is_gone: whether the copier is gone; then none of its copies is under way.
    """

    def __init__(
        self,
        sock: socket.socket,
        pidfd: int,
        ring: Tensor,
        arena: ArenaMap,
        on_gone: Callable[[], None],
    ) -> None:
        """Start the thread that receives answers.

        Args:
            sock: our end of the channel, which this object closes.
            pidfd: the copier's pidfd, which this object closes.
            ring: [bytes] uint8 of the GPU's memory.
            arena: the arena whose slots are copied.
            on_gone: called on the channel's thread when the copier is gone.
        """
        self.arena = arena
        self.place_bytes = len(ring) // PLACES
        self.is_gone = False
        self._sock = sock
        self._pidfd = pidfd
        self._on_gone = on_gone
        self._changed = threading.Condition()
        self._places = [
            Place(ring, index * self.place_bytes, self.place_bytes) for index in range(PLACES)
        ]
        self._job_ids = count()
        self._under_way: set[int] = set()
        self._num_registered = 0
        sock.setblocking(True)
        self._thread = threading.Thread(target=self._listen, name="copier", daemon=True)
        self._thread.start()

    def has(self, last_slot: int) -> bool:
        """Whether the copier can copy all slots up to this one."""
        return last_slot < self._num_registered and not self.is_gone

    @contextmanager
    def places(self, num_places: int) -> Iterator[Sequence[Place]]:
        """Lend places, once copies from them are complete; at most as many as there are.

        Raises:
            CopierGoneError: the copier is dead.
        """
        num_places = min(num_places, PLACES)
        with self._changed:
            self._changed.wait_for(lambda: len(self._places) >= num_places or self.is_gone)
            if self.is_gone:
                raise CopierGoneError
            lent = [self._places.pop() for _ in range(num_places)]
        try:
            for place in lent:
                place.wait()
            yield lent
        finally:
            with self._changed:
                self._places += lent
                self._changed.notify_all()

    def begin(
        self, way: Way, place: Place, slot_ids: Sequence[int], slot_offset: int, piece_bytes: int
    ) -> int:
        """Submit a job that copies a piece of each slot to a place, or from it.

        Args:
            way: LOAD: slots to place; STORE: place to slots.
            place: the place, which the caller has.
            slot_ids: the slots.
            slot_offset: bytes from the beginning of a slot to its piece.
            piece_bytes: bytes of a piece.

        Returns:
            The job's id, which the caller has to pass to `wait`.
        """
        with self._changed:
            job_id = next(self._job_ids) % MOST_JOB_ID
            self._under_way.add(job_id)
        job = Job(way, job_id, place.offset, slot_offset, piece_bytes, slot_ids)
        with suppress(OSError):  # the copier is dying, and `wait` raises when it is gone
            self._sock.send(encode_job(job))
        return job_id

    def wait(self, job_id: int) -> None:
        """Wait until a submitted job is done.

        Raises:
            CopierGoneError: the copier died before it answered the job.
        """
        with self._changed:
            self._changed.wait_for(lambda: job_id not in self._under_way or self.is_gone)
            if job_id in self._under_way:
                raise CopierGoneError

    def close(self) -> None:
        """Submit no more jobs; the channel is gone once those under way are finished."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        """Wait until the channel is gone."""
        self._thread.join()

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._pidfd, select.POLLIN)
        is_closed = False
        while not is_closed:
            ready = dict(poller.poll())
            if self._sock.fileno() in ready:
                is_silent, is_closed = self._receive_answer()
                if is_silent:  # the copier is dying: from now on wait for its pidfd only
                    poller.unregister(self._sock)
            elif self._pidfd in ready:
                break
        with self._changed:
            self.is_gone = True
            self._changed.notify_all()
        self._sock.close()
        close_fd(self._pidfd)
        self._on_gone()

    def _receive_answer(self) -> tuple[bool, bool]:
        """Receive an answer.

        Returns:
            Whether no answer will follow, and whether the copier has closed with no job under way.
        """
        try:
            packet = self._sock.recv(ANSWER_BYTES)
            if not packet:
                return True, False
            answered, number = decode_answer(packet)
        except (OSError, MalformedPacketError) as error:
            log.warning("copier_channel_broken", error=str(error))
            return True, False
        if answered is Answered.CLOSED:
            return True, True
        with self._changed:
            if answered is Answered.REGISTERED:
                self._num_registered = number
            else:
                self._under_way.discard(number)
                self._changed.notify_all()
        return False, False
