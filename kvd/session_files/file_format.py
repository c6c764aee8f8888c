"""A session file (version 1): one session's tokens and KV rows, for another kvd.

    file    = header | frame … | end
    header  = magic "KVDSESSN" | version u32 | bytes of the body u32 | xxh3_64 | body
    frame   = num_tokens u32 | 0 u32 | xxh3_64 | token ids u32 … | rows
    end     = a frame of 0 tokens; nothing follows it

The body is a kvd.v1.SessionFileHeader. A frame has 1 … `block_tokens` tokens, the session's next
ones, and of each layer, of each of its components, that many rows, without padding. The header's
checksum is of all that comes before it and of the body; a frame's is of what follows it, seeded
with the number of tokens before the frame: frames that are left out, doubled or exchanged do not
fit. All integers are little-endian.

Pure. Whoever reads trusts nothing: not the lengths, not the order, not the end.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from shared.kvd_client.messages import layout_message, layout_of
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import InvalidInputError, ReportedError
from shared.types.kv_layout import KVLayout
from shared.types.lineage import LINEAGE_BYTES, Lineage
from shared.types.session_key import SessionKey, session_key

MAGIC = b"KVDSESSN"
VERSION = 1
MAX_BODY_BYTES = 1 << 20  # a layout of thousands of layers has less

_START = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<IIQ")


class SessionFileError(InvalidInputError):
    """A file that is no session file, or is damaged or cut short."""

    reason = "bad_session_file"


@dataclass(frozen=True)
class FileHeader:
    """What a session file says of itself."""

    key: SessionKey
    layout: KVLayout
    lineage: Lineage
    kvd_version: str
    unix_s: float


@dataclass(frozen=True, slots=True)
class Frame:
    """Some tokens and their rows: one run of bytes for each component of each layer, in order."""

    token_offset: int
    num_tokens: int
    token_ids: bytes
    rows: memoryview


def row_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Return the bytes of one token, of each component of each layer, in the order of a frame."""
    return tuple(c.token_bytes for layer in layout.layers for c in layer.components)


# --------------------------------------------------------------------------------------- writing


def header_bytes(header: FileHeader) -> bytes:
    """Return the beginning of a file."""
    key = header.key
    body = kvd_pb2.SessionFileHeader(
        session=kvd_pb2.SessionKey(tenant=key.tenant, model=key.model, session_id=key.session_id),
        layout=layout_message(header.layout),
        lineage=kvd_pb2.Lineage(
            digest=header.lineage.digest, clean_tokens=header.lineage.clean_tokens
        ),
        kvd_version=header.kvd_version,
        unix_s=header.unix_s,
    ).SerializeToString()
    start = _START.pack(MAGIC, VERSION, len(body))
    return start + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + body)) + body


def header_num_bytes(beginning: bytes | bytearray) -> int | None:
    """Return how long the header of a file is that begins so; None if that is not there yet."""
    if len(beginning) < _START.size:
        return None
    _, _, num_bytes = _START.unpack_from(beginning)
    return _START.size + _CHECKSUM.size + min(int(num_bytes), MAX_BODY_BYTES)


def frame_bytes(token_offset: int, token_ids: bytes, runs: Sequence[memoryview]) -> bytes:
    """Return one frame; `runs` as in Frame.rows."""
    payload = b"".join((token_ids, *runs))
    checksum = xxhash.xxh3_64_intdigest(payload, seed=token_offset)
    return _FRAME.pack(len(token_ids) // TOKEN_BYTES, 0, checksum) + payload


def end_bytes(num_tokens: int) -> bytes:
    """Return the end of a file of so many tokens."""
    return frame_bytes(num_tokens, b"", ())


# --------------------------------------------------------------------------------------- reading


class FileReader:
    """Reads a session file piece by piece, as it comes.

    Attributes:
        header: once it has come whole.
        num_tokens: tokens in the frames so far.
    """

    def __init__(self) -> None:
        self.header: FileHeader | None = None
        self.num_tokens = 0
        self._buffer = bytearray()
        self._is_over = False

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take the next bytes; yields the frames that are whole, to be used up at once.

        No more is kept than one frame and `data`.

        Raises:
            SessionFileError: they cannot be what comes next.
        """
        self._buffer += data
        if self.header is None:
            self._read_header()
        while self.header is not None and (frame := self._next_frame(self.header)) is not None:
            yield frame
        if self._is_over and self._buffer:
            raise _damaged("something follows its end")

    def close(self) -> FileHeader:
        """Make sure that the file has ended.

        Raises:
            SessionFileError: it is cut short.
        """
        if self.header is None or not self._is_over:
            raise SessionFileError(
                f"the session file is cut short, after {self.num_tokens} tokens",
                "copy it again, or export the session again",
            )
        return self.header

    def _read_header(self) -> None:
        buffer = self._buffer
        known = min(len(buffer), len(MAGIC))
        if buffer[:known] != MAGIC[:known]:
            raise SessionFileError("this is no session file", "name one that kvd export wrote")
        if len(buffer) < _START.size + _CHECKSUM.size:
            return
        _, version, num_bytes = _START.unpack_from(buffer)
        if version != VERSION:
            raise SessionFileError(
                f"the session file has version {version}, this release knows {VERSION}",
                "import it with the release that wrote it",
            )
        if num_bytes > MAX_BODY_BYTES:
            raise _damaged("its header")
        start = _START.size + _CHECKSUM.size
        if len(buffer) < start + num_bytes:
            return
        body = bytes(buffer[start : start + num_bytes])
        (checksum,) = _CHECKSUM.unpack_from(buffer, _START.size)
        if xxhash.xxh3_64_intdigest(bytes(buffer[: _START.size]) + body) != checksum:
            raise _damaged("its header")
        del buffer[: start + num_bytes]
        self.header = _header_of(body)

    def _next_frame(self, header: FileHeader) -> Frame | None:
        buffer = self._buffer
        if self._is_over or len(buffer) < _FRAME.size:
            return None
        num_tokens, zero, checksum = _FRAME.unpack_from(buffer)
        if zero or num_tokens > header.layout.block_tokens:
            raise _damaged(f"the frame behind {self.num_tokens} tokens")
        num_bytes = num_tokens * (TOKEN_BYTES + sum(row_bytes(header.layout)))
        if len(buffer) < _FRAME.size + num_bytes:
            return None
        payload = memoryview(bytes(memoryview(buffer)[_FRAME.size : _FRAME.size + num_bytes]))
        del buffer[: _FRAME.size + num_bytes]
        if xxhash.xxh3_64_intdigest(payload, seed=self.num_tokens) != checksum:
            raise _damaged(f"the frame behind {self.num_tokens} tokens")
        if not num_tokens:
            self._is_over = True
            return None
        tokens_end = num_tokens * TOKEN_BYTES
        frame = Frame(
            self.num_tokens, num_tokens, bytes(payload[:tokens_end]), payload[tokens_end:]
        )
        self.num_tokens += num_tokens
        return frame


def _header_of(body: bytes) -> FileHeader:
    """Decode and check the body, whose checksum fits: even so it may be made by hand."""
    try:
        message = kvd_pb2.SessionFileHeader.FromString(body)
        layout = layout_of(message.layout)
        key = session_key(message.session.tenant, layout.model, message.session.session_id)
    except (DecodeError, ReportedError) as error:
        raise SessionFileError(
            f"the session file's header makes no sense ({error})", "export the session again"
        ) from error
    digest = message.lineage.digest
    if len(digest) not in (0, LINEAGE_BYTES):
        raise _damaged("its lineage")
    lineage = Lineage(digest, message.lineage.clean_tokens if digest else 0)
    return FileHeader(key, layout, lineage, message.kvd_version, message.unix_s)


def _damaged(what: str) -> SessionFileError:
    return SessionFileError(
        f"the session file is damaged: {what}", "copy it again, or export the session again"
    )
