"""Packets between an engine and the copier of its GPU, over their channel.

    engine                             copier
    job and its slots            ->    the GPU copies between these slots and the ring
                                 <-    DONE id           the job's bytes are there
                                 <-    REGISTERED n      jobs may name slots [0, n) from now on
    closes its side              ->    finishes the jobs under way
                                 <-    CLOSED            nothing is being copied any more

The ring is memory of the engine on the GPU. A job copies one piece of each of its slots from or to
a part of the ring, where the pieces lie one after another. A copier that is killed sends no CLOSED:
its jobs under way may continue until its process is gone.
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
    """The direction in which a job copies."""

    LOAD = 0  # from the slots to the ring
    STORE = 1  # from the ring to the slots


class Answered(IntEnum):
    """Kinds of a copier's answers; each carries a number: a job's id, or a number of slots."""

    DONE = 0
    REGISTERED = 1
    CLOSED = 2


@dataclass(frozen=True)
class Job:
    """A copy of one piece of each of some slots from or to the ring; offsets and sizes in bytes.

    Attributes:
        way: the direction.
        job_id: identifies the job in its answer; below 2**32.
        ring_offset: offset of the first piece in the ring.
        slot_offset: offset of the piece in each slot.
        piece_bytes: size of each piece.
        slot_ids: the slots, 1 to MAX_JOB_SLOTS of them.
    """

    way: Way
    job_id: int
    ring_offset: int
    slot_offset: int
    piece_bytes: int
    slot_ids: Sequence[int]

    def check(self, slot_bytes: int, num_slots: int, ring_bytes: int) -> None:
        """Check that the job stays inside the slots and the ring.

        Raises:
            MalformedPacketError: it does not.
        """
        end = self.ring_offset + self.piece_bytes * len(self.slot_ids)
        if not 0 < self.piece_bytes <= slot_bytes - self.slot_offset or end > ring_bytes:
            raise MalformedPacketError(
                f"a part of a copy lies outside its slot or the ring: {self!s:.200}"
            )
        if max(self.slot_ids) >= num_slots:
            raise MalformedPacketError(f"there is no slot {max(self.slot_ids)} among {num_slots}")


def encode_job(job: Job) -> bytes:
    """Encode a job as one packet."""
    numbers = job.ring_offset, job.slot_offset, job.piece_bytes, len(job.slot_ids)
    return _JOB.pack(job.way, job.job_id, *numbers) + array.array("I", job.slot_ids).tobytes()


def decode_job(packet: bytes) -> Job:
    """Decode a job; the caller owes `Job.check` before it uses the slots and offsets.

    Raises:
        MalformedPacketError: the packet is not a job.
    """
    if len(packet) <= _JOB.size:
        raise MalformedPacketError(f"a copy job has an invalid length, {len(packet)} bytes")
    way, job_id, ring_offset, slot_offset, piece_bytes, num_slots = _JOB.unpack_from(packet)
    slots = packet[_JOB.size :]
    if way not in tuple(Way) or len(slots) != num_slots * _SLOT_ID.itemsize:
        raise MalformedPacketError(
            f"a copy job has direction {way}, and {len(slots)} bytes for {num_slots} slots"
        )
    slot_ids = array.array("I", slots)
    return Job(Way(way), job_id, ring_offset, slot_offset, piece_bytes, slot_ids)


def encode_answer(answered: Answered, number: int = 0) -> bytes:
    """Encode an answer as one packet."""
    return _ANSWER.pack(answered, number)


def decode_answer(packet: bytes) -> tuple[Answered, int]:
    """Decode an answer.

    Raises:
        MalformedPacketError: the packet is not an answer.
    """
    if len(packet) != _ANSWER.size or packet[0] not in tuple(Answered):
        raise MalformedPacketError(f"this is not an answer of a copier: {packet[:20]!r}")
    answered, number = _ANSWER.unpack(packet)
    return Answered(answered), number
