"""Pieces of slots are copied by a kernel of Triton's, which reads and writes the host's memory.

The device's copy engines, given as many pieces, take about a microsecond for each, and Python as
much to name it; a layer's piece of a block is a microsecond of the bus.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from inference_svc.runtime.cuda.kernels.slot_copies import copy_pieces

PROGRAMS, WARPS = 32, 8
BLOCK_BYTES = 16 << 10  # that a program has under way
ITEMS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by size


class SlotPieces(NamedTuple):
    """A piece of each of some slots, all of one size, in memory that the device reaches.

    Attributes:
        address: of the first slot's.
        bytes_apart: from one slot's to the next one's.
        slot_ids: [pieces] int64 on the device.
        piece_bytes: size of each.
    """

    address: int
    bytes_apart: int
    slot_ids: Tensor
    piece_bytes: int


def copy_slots(pieces: SlotPieces, rows: Tensor, *, to_slots: bool) -> None:
    """Enqueue copies of pieces to rows, or the other way; on this thread's current stream.

    Args:
        pieces: at least one.
        rows: [pieces, ...] contiguous on the device.
        to_slots: whether rows are copied to pieces.
    """
    size = math.gcd(8, pieces.address, pieces.bytes_apart, pieces.piece_bytes)
    items = pieces.piece_bytes // size
    block = min(BLOCK_BYTES // size, triton.next_power_of_2(items))
    num_parts = len(pieces.slot_ids) * triton.cdiv(items, block)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        copy_pieces[(min(PROGRAMS, num_parts),)](
            rows.view(-1).view(ITEMS[size]),
            pieces.address,
            pieces.slot_ids,
            num_parts,
            pieces.bytes_apart // size,
            PIECE_ITEMS=items,
            BLOCK=block,
            TO_SLOTS=to_slots,
            ALIGNMENT=math.gcd(16, pieces.address),
            num_warps=WARPS,
        )
