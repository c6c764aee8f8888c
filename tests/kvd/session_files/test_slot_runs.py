"""Rows are copied unchanged between slots and session files."""

from kvd.session_files.file_format import row_bytes
from kvd.session_files.slot_runs import RowBuffer, SlotRuns
from tests.synthetic_engine import layout_with_windows, small_layout

LAYOUT = small_layout()
ROW = sum(row_bytes(LAYOUT))


def test_rows_round_trip():
    """Rows of a slot, through frames, into other slots at other places."""
    runs = SlotRuns.of_tokens(LAYOUT)
    slot = memoryview(bytearray(range(256)) * (LAYOUT.block_bytes // 256))
    buffer = RowBuffer(ROW)
    lent = memoryview(bytearray(b"".join(runs.read(slot, 5, 4))))
    buffer.add(lent, 4)
    buffer.keep()
    lent[:] = bytes(len(lent))  # rows of no session any more
    buffer.add(memoryview(b"".join(runs.read(slot, 9, 7))), 7)
    assert (buffer.num_tokens, buffer.num_bytes) == (11, 11 * ROW)
    buffer.drop(2)
    other = memoryview(bytearray(LAYOUT.block_bytes))
    buffer.write_to(other, runs, 3, 8)
    assert (buffer.token_offset, buffer.num_tokens) == (2, 9)
    assert list(map(bytes, runs.read(other, 0, 8))) == list(map(bytes, runs.read(slot, 8, 8)))


def test_rows_of_windows_are_copied_to_their_parts():
    """Some of the rows of one part, into another slot from any row on; the rest stays."""
    layout = layout_with_windows()
    runs = SlotRuns.of_windows(layout)
    assert len(runs) == layout.window_slots
    slot = memoryview(bytearray(range(256)) * (layout.block_bytes // 256))
    rows = memoryview(b"".join(runs[1].read(slot, 3, 6)))
    other = memoryview(bytearray(layout.block_bytes))
    runs[1].write_rows(other, 10, rows, range(2, 6))
    assert list(map(bytes, runs[1].read(other, 10, 4))) == list(
        map(bytes, runs[1].read(slot, 5, 4))
    )
    assert not any(map(any, runs[1].read(other, 0, 10)))
    assert not any(map(any, runs[1].read(other, 14, 2)))
