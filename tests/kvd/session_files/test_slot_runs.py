"""Rows go between slots and session files unchanged."""

from kvd.session_files.file_format import row_bytes
from kvd.session_files.slot_runs import RowBuffer, SlotRuns
from tests.synthetic_engine import small_layout

LAYOUT = small_layout()
ROW = sum(row_bytes(LAYOUT))


def test_rows_come_back_to_their_places():
    """Rows of a slot, through frames, into other slots at other places."""
    runs = SlotRuns.of_tokens(LAYOUT)
    slot = memoryview(bytearray(range(256)) * (LAYOUT.block_bytes // 256))
    buffer = RowBuffer(row_bytes(LAYOUT))
    buffer.add(memoryview(b"".join(runs.read(slot, 5, 4))), 4)
    buffer.add(memoryview(b"".join(runs.read(slot, 9, 7))), 7)
    assert (buffer.num_tokens, buffer.num_bytes) == (11, 11 * ROW)
    buffer.drop(2)
    other = memoryview(bytearray(LAYOUT.block_bytes))
    runs.write(other, 1, 8, buffer.runs)
    assert buffer.token_offset == 2
    assert list(map(bytes, runs.read(other, 0, 8))) == list(map(bytes, runs.read(slot, 8, 8)))
