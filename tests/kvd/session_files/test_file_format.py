"""Session files: what is written is read, and nothing else is taken for one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.session_files.file_format import (
    MAX_BODY_BYTES,
    FileHeader,
    FileReader,
    SessionFileError,
    StatePart,
    end_bytes,
    frame_bytes,
    header_bytes,
    part_bytes,
    part_bytes_of,
    row_bytes,
)
from shared.types.lineage import WHOLE, Lineage
from tests.synthetic_engine import encode, key_of, layout_with_states, small_layout

LAYOUT = small_layout()
HEADER = FileHeader(key_of("a", "acme"), LAYOUT, Lineage(b"x" * 16, 7), "0.1.0", 1.5)
ROW = sum(row_bytes(LAYOUT))
FEW = settings(max_examples=40, deadline=None)


def _frame(offset: int, tokens: list[int]) -> bytes:
    rows = [
        bytes([index % 256]) * size * len(tokens) for index, size in enumerate(row_bytes(LAYOUT))
    ]
    return frame_bytes(offset, encode(tokens), [memoryview(run) for run in rows])


def _file(*lengths: int) -> bytes:
    frames, offset = [], 0
    for length in lengths:
        frames.append(_frame(offset, list(range(offset, offset + length))))
        offset += length
    return header_bytes(HEADER) + b"".join(frames) + end_bytes(offset)


def _read(pieces: list[bytes]) -> tuple[FileHeader, list[tuple[int, int, bytes]]]:
    reader = FileReader()
    frames = [
        (frame.token_offset, frame.num_tokens, frame.token_ids)
        for piece in pieces
        for frame in reader.feed(piece)
    ]
    return reader.close(), frames


@FEW
@given(st.lists(st.integers(1, 16), max_size=4), st.integers(1, 5000))
def test_what_is_written_is_read(lengths, step):
    """However the bytes are cut into pieces, and however long the frames are."""
    data = _file(*lengths)
    header, frames = _read([data[start : start + step] for start in range(0, len(data), step)])
    assert header == HEADER
    assert [length for _, length, _ in frames] == lengths
    assert b"".join(tokens for _, _, tokens in frames) == encode(list(range(sum(lengths))))


GOOD = _file(16, 3)


@FEW
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_byte_may_differ(position, change):
    """A flipped bit anywhere is found, before the end at the latest."""
    bad = bytearray(GOOD)
    bad[position] ^= change
    with pytest.raises(SessionFileError):
        _read([bytes(bad)])


@FEW
@given(st.integers(0, len(GOOD) - 1))
def test_no_byte_may_be_missing(length):
    """Wherever it is cut."""
    with pytest.raises(SessionFileError):
        _read([GOOD[:length]])


@FEW
@given(st.binary(max_size=200))
def test_anything_else_is_no_session_file(data):
    """Also with the right beginning: nothing is read beyond what a frame may have."""
    for text in (data, GOOD[:24] + data, header_bytes(HEADER) + data):
        with pytest.raises(SessionFileError):
            _read([text])


def test_frames_have_their_place():
    """Frames that are left out, doubled or exchanged do not fit; neither does another's end."""
    one, two = _frame(0, list(range(16))), _frame(16, [1, 2, 3])
    start = header_bytes(HEADER)
    for frames in ((two,), (one, one, two), (two, one), (one,)):
        with pytest.raises(SessionFileError):
            _read([start + b"".join(frames) + end_bytes(19)])
    with pytest.raises(SessionFileError, match="follows its end"):
        _read([GOOD + GOOD])


def test_bounds_come_before_memory():
    """A header or a frame that claims to be huge is refused at once, not waited for."""
    huge = b"KVDSESSN" + (1).to_bytes(4, "little") + (MAX_BODY_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(SessionFileError, match="header"):
        list(FileReader().feed(huge + bytes(8)))
    reader = FileReader()
    with pytest.raises(SessionFileError, match="behind 0 tokens"):
        list(reader.feed(header_bytes(HEADER) + (17).to_bytes(4, "little") + bytes(12)))


def test_a_lineage_without_discards_is_whole():
    """What says that nothing was discarded is read as just that."""
    plain = FileHeader(HEADER.key, LAYOUT, WHOLE, "0.1.0", 0.0)
    header, _ = _read([header_bytes(plain) + end_bytes(0)])
    assert header.lineage == WHOLE


WITH_STATES = layout_with_states()


def _part(index: int, position: int = 2) -> StatePart:
    data = bytes([index]) * part_bytes_of(WITH_STATES, index)
    return StatePart(position, index, memoryview(data))


def _file_with(*parts: StatePart, version: int = 2) -> bytes:
    """A file of three tokens and parts of a state."""
    header = FileHeader(key_of("a"), WITH_STATES, WHOLE, "0.1.0", 1.5, version)
    tokens = _frame(0, [1, 2, 3])
    return header_bytes(header) + tokens + b"".join(part_bytes(3, p) for p in parts) + end_bytes(3)


@FEW
@given(st.integers(1, 9000))
def test_a_state_comes_in_parts(step):
    """The last one is as long as what is left of it; there may be none."""
    parts = [_part(index) for index in range(3)]
    data = _file_with(*parts)
    reader = FileReader()
    pieces = (data[start : start + step] for start in range(0, len(data), step))
    found = [frame for piece in pieces for frame in reader.feed(piece)]
    assert reader.close().version == 2
    assert found[1:] == parts
    assert len(parts[-1].data) == WITH_STATES.state_bytes - 2 * WITH_STATES.block_bytes
    assert len(_read_parts(_file_with())) == 1


def _read_parts(data: bytes) -> list:
    reader = FileReader()
    found = list(reader.feed(data))
    reader.close()
    return found


@pytest.mark.parametrize(
    "parts",
    [
        (0,),
        (0, 1),
        (1, 2),
        (0, 2, 1),
        (0, 1, 2, 0),
        (0, 0, 1, 2),
    ],
)
def test_parts_have_their_order_and_none_is_missing(parts):
    with pytest.raises(SessionFileError, match="damaged"):
        _read_parts(_file_with(*(_part(index) for index in parts)))


def test_a_state_lies_behind_tokens_of_the_file():
    for positions in ([0, 0, 0], [4, 4, 4], [2, 2, 1]):
        parts = [_part(index, position) for index, position in enumerate(positions)]
        with pytest.raises(SessionFileError, match="the state behind 3 tokens"):
            _read_parts(_file_with(*parts))


def test_a_file_of_version_1_has_no_parts():
    data = _file_with(*map(_part, range(3)), version=1)
    with pytest.raises(SessionFileError, match="damaged"):
        _read_parts(data)
    assert header_bytes(HEADER)[8] == 1
    assert _file_with()[8] == 2
