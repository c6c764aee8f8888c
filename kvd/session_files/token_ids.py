"""Collects the token ids of a session as its chunks pass, without reading its KV. Pure.

It trusts the chunks, so it is for exports of this kvd only. Bytes from elsewhere are read by
FileReader, which trusts nothing.
"""

from collections.abc import Iterator

from kvd.session_files.chunks import MAGIC
from kvd.session_files.file_format import FRAME, VERSION, row_bytes
from kvd.session_files.file_reader import FileReader
from shared.types.block_key import TOKEN_BYTES

Data = bytes | bytearray | memoryview


class TokenIds:
    """Collects the token ids of one session, chunk by chunk.

    Attributes:
        found: the ids, little-endian uint32; b"": unknown, because chunks are sealed, or the
            session may have a state or windows.
    """

    def __init__(self, header: bytes) -> None:
        """Begin with the session file's header."""
        self.found = bytearray()
        self._token_bytes = _token_bytes_of(header)

    def add(self, chunk: Data) -> None:
        """Read the next chunk."""
        if chunk[: len(MAGIC)] == MAGIC:
            self._token_bytes = None
        if self._token_bytes is not None:
            self.found += b"".join(_token_ids_in(chunk, self._token_bytes))


def _token_ids_in(frames: Data, token_bytes: int) -> Iterator[bytes]:
    """Yield the token ids of whole frames; `token_bytes`: bytes of all rows of a token."""
    at = 0
    while at < len(frames):
        num_tokens, _, _ = FRAME.unpack_from(frames, at)
        at += FRAME.size
        yield bytes(frames[at : at + num_tokens * TOKEN_BYTES])
        at += num_tokens * (TOKEN_BYTES + token_bytes)


def _token_bytes_of(header: bytes) -> int | None:
    """Return the bytes of all rows of a token; None: not all frames are of tokens."""
    reader = FileReader()
    list(reader.feed(header))
    found = reader.header
    if found is None or found.version != VERSION or found.layout.part_slots:
        return None
    return sum(row_bytes(found.layout))
