"""The kernel that copies pieces of slots, run by Triton's interpreter: those bytes, and no others."""

import pytest
import torch

from inference_svc.runtime.cuda import slot_copies
from inference_svc.runtime.cuda.slot_copies import SlotPieces, copy_slots

NUM_SLOTS = 5
IDS = [3, 0, 4]


@pytest.fixture(params=[16 << 10, 64], ids=["whole", "in parts"])
def _block(request, monkeypatch):
    monkeypatch.setattr(slot_copies, "BLOCK_BYTES", request.param)
    monkeypatch.setattr(slot_copies, "PROGRAMS", 2)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("to_slots", [False, True])
@pytest.mark.parametrize(
    ("slot_bytes", "first", "piece_bytes"),
    [(4096, 0, 2048), (4096, 32, 96), (400, 8, 200), (100, 4, 36), (90, 2, 10), (33, 1, 7)],
)
def test_pieces_are_copied_and_nothing_beside_them(to_slots, slot_bytes, first, piece_bytes):
    """Whatever they are multiples of, in one part and in several."""
    memory = torch.randint(0, 256, (NUM_SLOTS, slot_bytes), dtype=torch.uint8)
    rows = torch.randint(0, 256, (len(IDS) + 1, piece_bytes), dtype=torch.uint8)
    pieces = SlotPieces(memory.data_ptr() + first, slot_bytes, torch.tensor(IDS), piece_bytes)
    expected, expected_rows = memory.clone(), rows.clone()
    if to_slots:
        expected[IDS, first : first + piece_bytes] = rows[: len(IDS)]
    else:
        expected_rows[: len(IDS)] = memory[IDS, first : first + piece_bytes]
    copy_slots(pieces, rows[: len(IDS)], to_slots=to_slots)
    assert torch.equal(memory, expected)
    assert torch.equal(rows, expected_rows)
