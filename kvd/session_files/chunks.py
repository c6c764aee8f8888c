"""A session file in chunks: runs of its frames, each for one object of a remote store.

Where chunks end depends on nothing but the tokens that frames have, so that two sessions with one
prefix have the same first chunks; behind the tokens, on their size. A sealed chunk (version 1):

    chunk   = magic "KVDCHUNK" | version u32 | bytes of the frames u32 | salt (32) | frames | tag

The frames are sealed (kvd/encryption/sealing.py, part 0) and bound to what stands before the salt
and to the tenant. The salt is BLAKE3 of the frames, keyed with what BLAKE3 derives from the
tenant's key in the context "kvd chunk salt": equal frames of a tenant make equal chunks, and say
nothing to others. So no two plaintexts meet under one salt, though it is not drawn. The tag of all
(SessionSeal.tag) is BLAKE2b-256 of the header and of the salts, in order, keyed with the tenant's
key, person "kvd chunk list": who can write to the store can neither leave chunks out nor put them
together anew.

Pure. Whoever opens trusts nothing.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence

from blake3 import blake3

from kvd.session_files.file_format import SessionFileError, header_num_bytes
from kvd.session_files.frame_writer import end_bytes
from shared.encryption.sealing import KEY_BYTES, SALT_BYTES, TAG_BYTES, Seal

MAGIC = b"KVDCHUNK"
VERSION = 1
MAX_CHUNK_BYTES = 1 << 30  # more is damage: a chunk is some MiB, or one block

_START = struct.Struct("<8sII")
_END_BYTES = len(end_bytes(0))
_CONTEXT_SALT = "kvd chunk salt"
_PERSON_LIST = b"kvd chunk list"


class Chunker:
    """Says which frames end a chunk.

    Args:
        step_tokens: a chunk ends with the first frame that reaches a multiple of it.
        chunk_bytes: or, where frames have no tokens of their own, that makes it so large.

    Attributes:
        num_tokens: of all frames so far.
        num_bytes: of the frames since the last chunk's end.
    """

    def __init__(self, step_tokens: int, chunk_bytes: int) -> None:
        self._step = step_tokens
        self._chunk_bytes = chunk_bytes
        self.num_tokens = 0
        self.num_bytes = 0

    def ends_with(self, num_tokens: int, num_bytes: int) -> bool:
        """Take the next frame; returns whether a chunk ends with it."""
        before = self.num_tokens
        self.num_tokens += num_tokens
        self.num_bytes += num_bytes
        is_full = before // self._step < self.num_tokens // self._step
        if not num_tokens:
            is_full = self.num_bytes >= self._chunk_bytes
        if is_full:
            self.num_bytes = 0
        return is_full


class ChunkSealer:
    """Seals the chunks of one session, in order.

    Args:
        key: the tenant's.
        tenant: its name.
        header: of the session file.
    """

    def __init__(self, key: bytes, tenant: str, header: bytes) -> None:
        self._key = key
        self._tenant = tenant
        self._list = _list_digest(key, header)

    def seal(self, frames: bytes | bytearray) -> bytes:
        """Return a chunk of frames."""
        start = _START.pack(MAGIC, VERSION, len(frames))
        salt = _salt_of(self._key, frames)
        self._list.update(salt)
        chunk = bytearray(_START.size + SALT_BYTES + len(frames) + TAG_BYTES)
        sealed_at = _START.size + SALT_BYTES
        chunk[:sealed_at] = start + salt
        bound = start + self._tenant.encode()
        Seal(self._key, salt).seal_into(0, memoryview(frames), memoryview(chunk)[sealed_at:], bound)
        return bytes(chunk)

    def tag(self) -> bytes:
        """Return the tag of all chunks."""
        return self._list.digest()


class ChunkOpener:
    """Makes a session file of one whose frames are sealed, piece by piece.

    Args:
        key: the tenant's that sealed it.
        tenant: its name, as it was sealed for.
        tag: of all chunks.
    """

    def __init__(self, key: bytes, tenant: str, tag: bytes) -> None:
        self._key = key
        self._tenant = tenant
        self._tag = tag
        self._buffer = bytearray()
        self._list: hashlib.blake2b | None = None  # once the header is there

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Take the next bytes; yields those of the session file.

        The end of the file is among them only if every chunk was there, in its place.

        Raises:
            SessionFileError: it was not sealed by this key for this tenant, or is damaged.
        """
        self._buffer += data
        if self._list is None:
            num_bytes = header_num_bytes(self._buffer)
            if num_bytes is None or len(self._buffer) < num_bytes:
                return
            header = self._taken(num_bytes)
            self._list = _list_digest(self._key, header)
            yield header
        while (piece := self._next(self._list)) is not None:
            yield piece

    def _next(self, chunks: "hashlib.blake2b") -> bytes | None:
        buffer = self._buffer
        if len(buffer) < _START.size:
            return None
        magic, version, num_bytes = _START.unpack_from(buffer)
        if magic[:4] == bytes(4):  # the end, a frame of no tokens
            if not hmac.compare_digest(chunks.digest(), self._tag):
                raise _not_ours("chunks are missing, or not in their order")
            return self._taken(_END_BYTES) if len(buffer) >= _END_BYTES else None
        if magic != MAGIC or version != VERSION or num_bytes > MAX_CHUNK_BYTES:
            raise _not_ours("a chunk has a header of another kind")
        length = _START.size + SALT_BYTES + num_bytes + TAG_BYTES
        if len(buffer) < length:
            return None
        chunk = memoryview(self._taken(length))
        salt, sealed = bytes(chunk[_START.size :][:SALT_BYTES]), chunk[_START.size + SALT_BYTES :]
        bound = bytes(chunk[: _START.size]) + self._tenant.encode()
        frames = Seal(self._key, salt).open(0, sealed, bound)
        if frames is None:
            raise _not_ours("a chunk does not open")
        chunks.update(salt)
        return frames

    def _taken(self, num_bytes: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:num_bytes])
        del self._buffer[:num_bytes]
        return taken


def step_tokens(chunk_bytes: int, block_tokens: int, token_bytes: Sequence[int]) -> int:
    """Return after how many tokens chunks of about so many bytes end: some whole blocks.

    Args:
        chunk_bytes: wanted.
        block_tokens: of the layout.
        token_bytes: of one token, of each component of each layer.
    """
    block_bytes = max(1, block_tokens * sum(token_bytes))
    return block_tokens * max(1, chunk_bytes // block_bytes)


def _salt_of(key: bytes, frames: bytes | bytearray) -> bytes:
    salt_key = blake3(key, derive_key_context=_CONTEXT_SALT).digest()
    return blake3(frames, key=salt_key).digest(SALT_BYTES)


def _list_digest(key: bytes, header: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(header, digest_size=KEY_BYTES, key=key, person=_PERSON_LIST)


def _not_ours(what: str) -> SessionFileError:
    return SessionFileError(
        f"the sealed session cannot be opened: {what}", "push it again from the server that has it"
    )
