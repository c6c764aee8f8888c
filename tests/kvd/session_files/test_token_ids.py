"""The token ids of a pushed session: of every frame, or none."""

from hypothesis import given
from hypothesis import strategies as st

from kvd.session_files.chunks import ChunkSealer
from kvd.session_files.file_format import FileHeader, header_bytes, row_bytes
from kvd.session_files.frame_writer import frame_bytes
from kvd.session_files.token_ids import TokenIds
from shared.types.lineage import WHOLE
from tests.fuzz.amounts import few
from tests.synthetic_engine import (
    encode,
    key_of,
    layout_with_states,
    layout_with_windows,
    small_layout,
)

LAYOUT = small_layout()
HEADER = header_bytes(FileHeader(key_of("a"), LAYOUT, WHOLE, "0", 0.0))


def frame(offset, num_tokens):
    """Make a frame of so many tokens, with misleading bytes in its rows."""
    tokens = range(offset, offset + num_tokens)
    return frame_bytes(
        offset, encode(tokens), [b"\1\0\0\0" * (num_tokens * n // 4) for n in row_bytes(LAYOUT)]
    )


@few(50)
@given(st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=4), max_size=4))
def test_token_ids_of_all_chunks_are_found(chunks):
    """However these are cut; a chunk may come in any kind of memory."""
    found, offset = TokenIds(HEADER), 0
    for number, lengths in enumerate(chunks):
        chunk = bytearray()
        for length in lengths:
            chunk += frame(offset, length)
            offset += length
        found.add(memoryview(chunk) if number % 2 else chunk)
    assert found.found == encode(range(offset))


def test_sealed_sessions_give_no_token_ids():
    """Nor do files with more than tokens, even before that part arrives."""
    found = TokenIds(HEADER)
    found.add(ChunkSealer(bytes(32), "default", HEADER).seal(frame(0, 4)))
    assert found.found == b""
    for layout in (layout_with_states(), layout_with_windows()):
        found = TokenIds(header_bytes(FileHeader(key_of("a"), layout, WHOLE, "0", 0.0)))
        found.add(frame(0, 4))
        assert found.found == b""
