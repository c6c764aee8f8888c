"""Chunks end where tokens say; sealed ones open completely, in order, for their tenant only."""

import secrets

import pytest

from kvd.session_files.chunks import Chunker, ChunkOpener, ChunkSealer, step_tokens
from kvd.session_files.file_format import FileHeader, SessionFileError, header_bytes
from kvd.session_files.frame_writer import end_bytes, frame_bytes
from shared.encryption.sealing import KEY_BYTES
from shared.types.lineage import WHOLE
from tests.synthetic_engine import encode, key_of, small_layout

KEY = secrets.token_bytes(KEY_BYTES)
HEADER = header_bytes(FileHeader(key_of("a", "acme"), small_layout(), WHOLE, "0", 0.0))
FRAMES = [frame_bytes(16 * n, encode(range(16)), [memoryview(bytes([n]) * 99)]) for n in range(3)]


def _seal(frames: list[bytes]) -> tuple[list[bytes], bytes]:
    sealer = ChunkSealer(KEY, "acme", HEADER)
    return [sealer.seal(frame) for frame in frames], sealer.tag()


def _open_pieces(pieces: list[bytes], tag: bytes, key: bytes = KEY, tenant: str = "acme") -> bytes:
    opener = ChunkOpener(key, tenant, tag)
    return b"".join(part for piece in pieces for part in opener.feed(piece))


def test_tokens_determine_where_chunks_end() -> None:
    """At the first frame that reaches a multiple, however the frames were cut."""
    chunker = Chunker(32, 4)
    ends = [chunker.ends_with(num_tokens, 1) for num_tokens in (16, 15, 16, 1, 40, 3)]
    assert ends == [False, False, True, False, True, False]
    assert (chunker.num_tokens, chunker.num_bytes) == (91, 1)


def test_frames_behind_the_tokens_are_chunked_by_size() -> None:
    """States and windows may be larger than all tokens."""
    chunker = Chunker(32, 4)
    ends = [chunker.ends_with(*frame) for frame in ((3, 1), (0, 2), (0, 2), (0, 5), (0, 1))]
    assert ends == [False, False, True, True, False]
    assert (chunker.num_tokens, chunker.num_bytes) == (3, 1)


def test_chunks_have_whole_blocks() -> None:
    """As many as fit; a larger block is a chunk of its own."""
    assert step_tokens(8 << 20, 16, [1000, 24]) == 16 * 512
    assert step_tokens(8 << 20, 16, [1 << 20]) == 16


def test_sealed_chunks_open() -> None:
    """Their contents are the session file; equal frames are sealed equally, and not in plain."""
    chunks, tag = _seal(FRAMES)
    file = HEADER + b"".join(chunks) + end_bytes(48)
    plain = HEADER + b"".join(FRAMES) + end_bytes(48)
    for size in (1, 7, 1000, len(file)):
        pieces = [file[start : start + size] for start in range(0, len(file), size)]
        assert _open_pieces(pieces, tag) == plain
    assert (chunks, tag) == _seal(FRAMES)
    assert bytes([2]) * 99 not in file


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda chunks: chunks[:2], "missing"),
        (lambda chunks: [chunks[0], chunks[2], chunks[1]], "in the wrong order"),
        (lambda chunks: [*chunks, chunks[0]], "missing"),
        (lambda chunks: [b"X" + chunks[0][1:], *chunks[1:]], "unknown header"),
        (lambda chunks: [*chunks[:2], chunks[2][:-1] + b"\0"], "cannot be decrypted"),
        (
            lambda chunks: [chunks[0][:20] + bytes(32) + chunks[0][52:], *chunks[1:]],
            "cannot be decrypted",
        ),
    ],
)
def test_changed_chunks_do_not_open(change, said: str) -> None:
    """Whoever can write to the store cannot forge a session."""
    chunks, tag = _seal(FRAMES)
    with pytest.raises(SessionFileError, match=said):
        _open_pieces([HEADER, *change(chunks), end_bytes(48)], tag)


@pytest.mark.parametrize(
    "other",
    [{"key": bytes(KEY_BYTES)}, {"tenant": "other"}, {"tag": bytes(32)}],
    ids=["key", "tenant", "tag"],
)
def test_other_keys_open_nothing(other: dict) -> None:
    """Another key, another tenant, or the tag of another session."""
    chunks, tag = _seal(FRAMES)
    with pytest.raises(SessionFileError, match="push it again"):
        _open_pieces([HEADER, *chunks, end_bytes(48)], **{"tag": tag, **other})


def test_the_header_is_authenticated() -> None:
    """Chunks under another session's header do not open."""
    chunks, tag = _seal(FRAMES)
    header = header_bytes(FileHeader(key_of("b", "acme"), small_layout(), WHOLE, "0", 0.0))
    with pytest.raises(SessionFileError, match="missing, or in the wrong order"):
        _open_pieces([header, *chunks, end_bytes(48)], tag)
