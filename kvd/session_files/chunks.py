"""Chunks of a session file: runs of its frames, each for one object of a remote store. Pure.

Where a chunk ends depends only on the tokens of the frames, so two sessions with the same prefix
have the same first chunks. Behind the tokens it depends on the frames' size. A sealed chunk
(version 1):

    chunk   = magic "KVDCHUNK" | version u32 | bytes of the frames u32 | salt (32) | frames | tag

The frames are sealed (kvd/encryption/sealing.py, part 0), bound to the bytes before the salt and to
the tenant. The salt is the BLAKE3 of the frames, keyed with a key that BLAKE3 derives from the
tenant's key in the context "kvd chunk salt". So equal frames of one tenant make equal chunks, and
reveal nothing to other tenants. Though the salt is not random, no two plaintexts share one.

The tag of all chunks (SessionSeal.tag) is the BLAKE2b-256 of the header and the salts in order,
keyed with the tenant's key, person "kvd chunk list". Someone who can write to the store can
therefore neither leave out chunks nor combine them in another way.

The opener trusts nothing.
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
MAX_CHUNK_BYTES = 1 << 30  # a chunk is some MiB, or one block: a larger one is damaged

_START = struct.Struct("<8sII")
_END_BYTES = len(end_bytes(0))
_CONTEXT_SALT = "kvd chunk salt"
_PERSON_LIST = b"kvd chunk list"


class Chunker:
    """Decides which frames end a chunk.

    Args:
        step_tokens: a chunk ends with the first frame that reaches a multiple of this.
        chunk_bytes: where frames have no tokens, a chunk ends when it reaches this size.

    Attributes:
        num_tokens: tokens of all frames so far.
        num_bytes: bytes of the frames since the last chunk ended.
    """

    def __init__(self, step_tokens: int, chunk_bytes: int) -> None:
        self._step = step_tokens
        self._chunk_bytes = chunk_bytes
        self.num_tokens = 0
        self.num_bytes = 0

    def ends_with(self, num_tokens: int, num_bytes: int) -> bool:
        """Add the next frame; return whether a chunk ends with it."""
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
        key: the tenant's key.
        tenant: its name.
        header: the session file's header.
    """

    def __init__(self, key: bytes, tenant: str, header: bytes) -> None:
        self._key = key
        self._tenant = tenant
        self._list = _list_digest(key, header)

    def seal(self, frames: bytes | bytearray) -> bytes:
        """Return the sealed chunk of these frames."""
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
        """Return the tag of all chunks that were sealed."""
        return self._list.digest()


class ChunkOpener:
    """Opens a sealed session, piece by piece: yields the plain session file.

    Args:
        key: the tenant's key under which it was sealed.
        tenant: the tenant's name at that time.
        tag: the tag of all chunks.
    """

    def __init__(self, key: bytes, tenant: str, tag: bytes) -> None:
        self._key = key
        self._tenant = tenant
        self._tag = tag
        self._buffer = bytearray()
        self._list: hashlib.blake2b | None = None  # once the header is there

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Take the next bytes; yield those of the session file.

        The end of the file is yielded only if every chunk was there, in order.

        Raises:
            SessionFileError: a chunk was not sealed with this key for this tenant, or is damaged.
        """
        self._buffer += data
        if self._list is None:
            num_bytes = header_num_bytes(self._buffer)
            if num_bytes is None or len(self._buffer) < num_bytes:
                return
            header = self._take(num_bytes)
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
                raise _open_error("chunks are missing, or in the wrong order")
            return self._take(_END_BYTES) if len(buffer) >= _END_BYTES else None
        if magic != MAGIC or version != VERSION or num_bytes > MAX_CHUNK_BYTES:
            raise _open_error("a chunk has an unknown header")
        length = _START.size + SALT_BYTES + num_bytes + TAG_BYTES
        if len(buffer) < length:
            return None
        chunk = memoryview(self._take(length))
        salt, sealed = bytes(chunk[_START.size :][:SALT_BYTES]), chunk[_START.size + SALT_BYTES :]
        bound = bytes(chunk[: _START.size]) + self._tenant.encode()
        frames = Seal(self._key, salt).open(0, sealed, bound)
        if frames is None:
            raise _open_error("a chunk cannot be decrypted")
        chunks.update(salt)
        return frames

    def _take(self, num_bytes: int) -> bytes:
        data = bytes(memoryview(self._buffer)[:num_bytes])
        del self._buffer[:num_bytes]
        return data


def step_tokens(chunk_bytes: int, block_tokens: int, token_bytes: Sequence[int]) -> int:
    """Return the tokens after which a chunk ends, a multiple of `block_tokens`.

    Args:
        chunk_bytes: the wanted size of a chunk.
        block_tokens: tokens of a block.
        token_bytes: bytes of one token, of each component of each layer.
    """
    block_bytes = max(1, block_tokens * sum(token_bytes))
    return block_tokens * max(1, chunk_bytes // block_bytes)


def _salt_of(key: bytes, frames: bytes | bytearray) -> bytes:
    salt_key = blake3(key, derive_key_context=_CONTEXT_SALT).digest()
    return blake3(frames, key=salt_key).digest(SALT_BYTES)


def _list_digest(key: bytes, header: bytes) -> "hashlib.blake2b":
    return hashlib.blake2b(header, digest_size=KEY_BYTES, key=key, person=_PERSON_LIST)


def _open_error(what: str) -> SessionFileError:
    return SessionFileError(
        f"the sealed session cannot be opened: {what}",
        "push it again from the server that has the session",
    )
