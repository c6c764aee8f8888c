"""Session files: they round-trip, and nothing else is taken for one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.session_files.file_format import (
    MAX_BODY_BYTES,
    MAX_HELD_TOKENS,
    FileHeader,
    HeldTokens,
    SessionFileError,
    StatePart,
    WindowRows,
    header_bytes,
    part_bytes_of,
    row_bytes,
    window_row_bytes,
)
from kvd.session_files.file_reader import FileReader
from kvd.session_files.frame_writer import FrameWriter, end_bytes, frame_bytes, held_bytes
from shared.types.kv_layout import KVLayout
from shared.types.lineage import WHOLE, Lineage
from tests.sampled import examples
from tests.synthetic_engine import (
    encode,
    key_of,
    layout_with_states,
    layout_with_windows,
    small_layout,
)

LAYOUT = small_layout()
HEADER = FileHeader(key_of("a", "acme"), LAYOUT, Lineage(b"x" * 16, 7), "0.1.0", 1.5)
ROW = sum(row_bytes(LAYOUT))
FEW = settings(max_examples=examples(40), deadline=None)


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
def test_a_file_round_trips(lengths, step):
    """However the bytes are cut into pieces, and however long the frames are."""
    data = _file(*lengths)
    header, frames = _read([data[start : start + step] for start in range(0, len(data), step)])
    assert header == HEADER
    assert [length for _, length, _ in frames] == lengths
    assert b"".join(tokens for _, _, tokens in frames) == encode(list(range(sum(lengths))))


GOOD = _file(16, 3)


@FEW
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_every_changed_byte_is_detected(position, change):
    """A flipped bit anywhere is found, before the end at the latest."""
    bad = bytearray(GOOD)
    bad[position] ^= change
    with pytest.raises(SessionFileError):
        _read([bytes(bad)])


@FEW
@given(st.integers(0, len(GOOD) - 1))
def test_every_missing_byte_is_detected(length):
    """Wherever the file is cut."""
    with pytest.raises(SessionFileError):
        _read([GOOD[:length]])


@FEW
@given(st.binary(max_size=200))
def test_other_files_are_refused(data):
    """Also with the right beginning: nothing is read beyond the size of a frame."""
    for text in (data, GOOD[:24] + data, header_bytes(HEADER) + data):
        with pytest.raises(SessionFileError):
            _read([text])


def test_the_order_of_frames_is_checked():
    """Omitted, doubled or exchanged frames do not fit; neither does another file's end."""
    one, two = _frame(0, list(range(16))), _frame(16, [1, 2, 3])
    start = header_bytes(HEADER)
    for frames in ((two,), (one, one, two), (two, one), (one,)):
        with pytest.raises(SessionFileError):
            _read([start + b"".join(frames) + end_bytes(19)])
    with pytest.raises(SessionFileError, match="after its end"):
        _read([GOOD + GOOD])


def test_bounds_are_checked_before_memory_is_allocated():
    """A header or a frame that claims to be huge is refused at once."""
    huge = b"KVDSESSN" + (1).to_bytes(4, "little") + (MAX_BODY_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(SessionFileError, match="header"):
        list(FileReader().feed(huge + bytes(8)))
    reader = FileReader()
    with pytest.raises(SessionFileError, match="after 0 tokens"):
        list(reader.feed(header_bytes(HEADER) + (17).to_bytes(4, "little") + bytes(12)))


def test_an_empty_lineage_is_whole():
    """One that says that no token was discarded is read as WHOLE."""
    plain = FileHeader(HEADER.key, LAYOUT, WHOLE, "0.1.0", 0.0)
    header, _ = _read([header_bytes(plain) + end_bytes(0)])
    assert header.lineage == WHOLE


WITH_STATES = layout_with_states()


def _part(index: int, position: int = 2) -> StatePart:
    data = bytes([index]) * part_bytes_of(WITH_STATES, index)
    return StatePart(position, index, memoryview(data))


def _file_with(*parts: StatePart, version: int = 2) -> bytes:
    """Return a file of three tokens and parts of a state."""
    header = FileHeader(key_of("a"), WITH_STATES, WHOLE, "0.1.0", 1.5, version)
    tokens = _frame(0, [1, 2, 3])
    writer = FrameWriter()
    for part in parts:
        writer.add_part(3, part)
    return header_bytes(header) + tokens + writer.take().data + end_bytes(3)


@FEW
@given(st.integers(1, 9000))
def test_a_state_comes_in_parts(step):
    """The last one has the remaining bytes; there may be none."""
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
def test_the_order_and_number_of_parts_is_checked(parts):
    with pytest.raises(SessionFileError, match="damaged"):
        _read_parts(_file_with(*(_part(index) for index in parts)))


def test_a_state_lies_behind_tokens_of_the_file():
    for positions in ([0, 0, 0], [4, 4, 4], [2, 2, 1]):
        parts = [_part(index, position) for index, position in enumerate(positions)]
        with pytest.raises(SessionFileError, match="the state after 3 tokens"):
            _read_parts(_file_with(*parts))


def test_a_file_of_version_1_has_no_parts():
    data = _file_with(*map(_part, range(3)), version=1)
    with pytest.raises(SessionFileError, match="damaged"):
        _read_parts(data)
    assert header_bytes(HEADER)[8] == 1
    assert _file_with()[8] == 2


WITH_WINDOWS = layout_with_windows()
NUM_PARTS = WITH_WINDOWS.window_slots


def _window(token_offset: int, num_tokens: int, index: int, position: int = 3) -> WindowRows:
    num_bytes = num_tokens * sum(window_row_bytes(WITH_WINDOWS, index))
    data = memoryview(bytes([token_offset + index]) * num_bytes)
    return WindowRows(position, token_offset, num_tokens, index, data)


def _windows(*tokens: tuple[int, int], position: int = 3) -> list[WindowRows]:
    """Return all parts of the windows of some tokens."""
    return [_window(*run, index, position) for run in tokens for index in range(NUM_PARTS)]


def _file_of(windows: list[WindowRows], version: int = 3, layout: KVLayout = WITH_WINDOWS) -> bytes:
    """Return a file of three tokens and their windows."""
    header = FileHeader(key_of("a"), layout, WHOLE, "0.1.0", 1.5, version)
    rows = memoryview(bytes(3 * sum(row_bytes(layout))))
    frame = frame_bytes(0, encode([1, 2, 3]), [rows])
    writer = FrameWriter()
    for window in windows:
        writer.add_window(3, window, [window.rows])
    return header_bytes(header) + frame + writer.take().data + end_bytes(3)


@FEW
@given(st.integers(1, 9000))
def test_windows_come_in_parts(step):
    """Of consecutive tokens up to a position; frames have no rows of their layers."""
    windows = _windows((1, 1), (2, 1))
    data = _file_of(windows)
    reader = FileReader()
    pieces = (data[start : start + step] for start in range(0, len(data), step))
    found = [frame for piece in pieces for frame in reader.feed(piece)]
    assert reader.close().version == 3
    assert found[1:] == windows
    assert len(found[0].rows) == 3 * 128, "one layer of four"
    assert len(_read_parts(_file_of([]))) == 1, "there may be none"
    (_, *earlier) = _read_parts(_file_of(_windows((0, 2), position=2)))
    assert [window.position for window in earlier] == [2] * NUM_PARTS


@pytest.mark.parametrize(
    "windows",
    [
        _windows((0, 3))[:2],  # a part is missing
        _windows((0, 3))[1:],
        [*_windows((0, 3))[:1], _window(0, 2, 1), _window(0, 3, 2)],
        _windows((0, 2)),  # they do not reach the position
        [*_windows((0, 1)), *_windows((2, 1))],  # tokens between them are missing
        [*_windows((2, 1)), *_windows((0, 2))],
        _windows((0, 4), position=4),  # beyond the tokens
        _windows((0, 3), position=2),
        [*_windows((0, 2)), *_windows((2, 1), position=4)],
        [*_windows((0, 3)), *_windows((3, 1), position=4)],
        _windows((0, 17), position=17),  # more than a block
    ],
)
def test_the_order_and_number_of_windows_is_checked(windows):
    with pytest.raises(SessionFileError, match="damaged"):
        _read_parts(_file_of(windows))


def test_only_a_file_of_version_3_has_windows():
    for version in (1, 2):
        with pytest.raises(SessionFileError, match="damaged"):
            _read_parts(_file_of(_windows((0, 3)), version))
    with pytest.raises(SessionFileError, match="it contains windows, but its layout has none"):
        _read_parts(_file_of([], 3, LAYOUT))
    with pytest.raises(
        SessionFileError, match="version 4, but this release knows versions up to 3"
    ):
        _read_parts(_file_of([], 4))


def _num_held_bytes(num_tokens: int) -> bytes:
    return held_bytes(encode(range(num_tokens)))


def _read_tail(data: bytes) -> list[tuple[bool, int, bytes]]:
    """Return for each frame whether it has no rows, how many tokens, and which."""
    reader = FileReader()
    found = [
        (isinstance(one, HeldTokens), one.num_tokens, one.token_ids) for one in reader.feed(data)
    ]
    reader.close()
    return found


@pytest.mark.parametrize("most", [MAX_HELD_TOKENS, 20, 7])
def test_a_tail_begins_with_tokens_without_rows(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any number of frames; later frames are read as if the first had rows."""
    monkeypatch.setattr("kvd.session_files.frame_writer.MAX_HELD_TOKENS", most)
    tail = _num_held_bytes(40) + _frame(40, [40, 41]) + _frame(42, [42]) + end_bytes(43)
    *held, first, second = _read_tail(header_bytes(HEADER) + tail)
    assert b"".join(tokens for _, _, tokens in held) == encode(range(40))
    assert all(is_held and num_tokens <= most for is_held, num_tokens, _ in held)
    assert (first, second) == ((False, 2, encode([40, 41])), (False, 1, encode([42])))
    assert _read_tail(header_bytes(HEADER) + _num_held_bytes(40) + end_bytes(40))


@pytest.mark.parametrize(
    "frames",
    [
        _frame(0, [0]) + held_bytes(encode([1])) + end_bytes(2),  # behind tokens
        _num_held_bytes(2)[:-1] + b"\1" + end_bytes(2),  # others than were written
        _num_held_bytes(2) + _frame(0, [2]) + end_bytes(3),  # at another place
        _num_held_bytes(2) + end_bytes(3),
        held_bytes(b"") + _num_held_bytes(0) + end_bytes(0)[:4] + b"\3" + end_bytes(0)[5:],  # none
    ],
)
def test_a_tail_keeps_its_order_and_checksums(frames: bytes) -> None:
    """In its order, with its checksums."""
    with pytest.raises(SessionFileError):
        _read_tail(header_bytes(HEADER) + frames)


def test_only_what_is_of_tokens_alone_has_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another version has none; nor is memory allocated for more tokens than allowed."""
    for version, layout in ((2, layout_with_states()), (3, layout_with_windows())):
        header = FileHeader(key_of("a"), layout, WHOLE, "0", 0.0, version)
        with pytest.raises(SessionFileError):
            list(FileReader().feed(header_bytes(header) + _num_held_bytes(2)))
    monkeypatch.setattr("kvd.session_files.file_reader.MAX_HELD_TOKENS", 4)
    with pytest.raises(SessionFileError):
        list(FileReader().feed(header_bytes(HEADER) + _num_held_bytes(5)[:16]))
