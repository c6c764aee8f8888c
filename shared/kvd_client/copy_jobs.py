"""What travels between an engine and the copier of its GPU, once they have a channel.

    engine                             copier
    job and its slots            ->    has the GPU copy between these slots and the ring
                                 <-    DONE id           the bytes are there
                                 <-    REGISTERED n      slots [0, n) may be named from now on
    closes its side              ->    ends what is under way
                                 <-    CLOSED            nothing is copied any more

The ring is memory of the engine on the GPU; a job copies a piece of each of its slots from or to a
part of the ring, where they lie one after another. Who is killed says no CLOSED: what it had begun
may go on until its process is gone.
"""

import array
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from shared.process.packets import MalformedPacketError

MAX_JOB_SLOTS = 4096
_JOB = struct.Struct("<BIQQQI")
_ANSWER = struct.Struct("<BQ")
_SLOT_ID = array.array("I")
MAX_JOB_BYTES = _JOB.size + MAX_JOB_SLOTS * _SLOT_ID.itemsize
ANSWER_BYTES = _ANSWER.size


class Way(IntEnum):
    """Where a job copies to."""

    LOAD = 0  # from the slots to the ring
    STORE = 1  # from the ring to the slots


class Answered(IntEnum):
    """What a copier says; its number is a job's, or a number of slots."""

    DONE = 0
    REGISTERED = 1
    CLOSED = 2


@dataclass(frozen=True)
class Job:
    """A piece of each of some slots, and where they are in the ring; all in bytes.

    Attributes:
        way: which is copied to which.
        job_id: below 2**32; names it in its answer.
        ring_offset: where the first piece is in the ring.
        slot_offset: where the piece begins in its slot.
        piece_bytes: size of each piece.
        slot_ids: at least one, at most MAX_JOB_SLOTS.
    """

    way: Way
    job_id: int
    ring_offset: int
    slot_offset: int
    piece_bytes: int
    slot_ids: Sequence[int]

    def check(self, slot_bytes: int, num_slots: int, ring_bytes: int) -> None:
        """Refuse what leaves the slots or the ring.

        Raises:
            MalformedPacketError: it does.
        """
        end = self.ring_offset + self.piece_bytes * len(self.slot_ids)
        if not 0 < self.piece_bytes <= slot_bytes - self.slot_offset or end > ring_bytes:
            raise MalformedPacketError(f"a piece that leaves its slot or the ring: {self!s:.200}")
        if max(self.slot_ids) >= num_slots:
            raise MalformedPacketError(f"slot {max(self.slot_ids)} of {num_slots}")


def encode_job(job: Job) -> bytes:
    """Encode a job as one packet."""
    numbers = job.ring_offset, job.slot_offset, job.piece_bytes, len(job.slot_ids)
    return _JOB.pack(job.way, job.job_id, *numbers) + array.array("I", job.slot_ids).tobytes()


def decode_job(packet: bytes) -> Job:
    """Parse a job; see `Job.check` for what it names.

    Raises:
        MalformedPacketError: if it is none.
    """
    if len(packet) <= _JOB.size:
        raise MalformedPacketError(f"a job of {len(packet)} bytes")
    way, job_id, ring_offset, slot_offset, piece_bytes, num_slots = _JOB.unpack_from(packet)
    slots = packet[_JOB.size :]
    if way not in tuple(Way) or len(slots) != num_slots * _SLOT_ID.itemsize:
        raise MalformedPacketError(f"way {way}, {len(slots)} bytes for {num_slots} slots")
    slot_ids = array.array("I", slots)
    return Job(Way(way), job_id, ring_offset, slot_offset, piece_bytes, slot_ids)


def encode_answer(answered: Answered, number: int = 0) -> bytes:
    """Encode an answer as one packet."""
    return _ANSWER.pack(answered, number)


def decode_answer(packet: bytes) -> tuple[Answered, int]:
    """Parse an answer.

    Raises:
        MalformedPacketError: if it is none.
    """
    if len(packet) != _ANSWER.size or packet[0] not in tuple(Answered):
        raise MalformedPacketError(f"no answer of a copier: {packet[:20]!r}")
    answered, number = _ANSWER.unpack(packet)
    return Answered(answered), number
