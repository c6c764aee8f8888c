"""A session file: one session's tokens and KV rows, for another kvd.

    file    = header | frame … | part … | window … | end
    header  = magic "KVDSESSN" | version u32 | bytes of the body u32 | xxh3_64 | body
    frame   = num_tokens u32 | 0 u32 | xxh3_64 | token ids u32 … | rows
    part    = 0 u32 | 1 u32 | xxh3_64 | position u64 | index u32 | bytes
    window  = num_tokens u32 | 2 u32 | xxh3_64 | position u64 | token_offset u64 | index u32 | rows
    end     = a frame of 0 tokens; nothing follows it

The body is a kvd.v1.SessionFileHeader. A frame has 1 … `block_tokens` tokens, the session's next
ones, and of each layer, of each of its components, that many rows, without padding. The header's
checksum is of all that comes before it and of the body; a frame's is of what follows it, seeded
with the number of tokens before the frame: frames that are left out, doubled or exchanged do not
fit. All integers are little-endian.

Version 1 has frames of tokens alone. Version 2 has the parts of a state of the model, in order, if
the session has one: all of a slot's size but the last. Version 3 has the windows that a load needs
which ends behind `position` tokens: of tokens that follow each other up to there, the rows of the
layers in each part of a window, as in a frame; frames have no rows of these layers. Both are behind
the tokens, and their checksums are seeded like that of a frame there.

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
VERSION_WITH_STATE = 2
VERSION_WITH_WINDOWS = 3
PART = 1  # kind of a frame: a part of a state
WINDOW = 2  # and of a window; 0: tokens, or the end
MAX_BODY_BYTES = 1 << 20  # a layout of thousands of layers has less

_START = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<Q")
_FRAME = struct.Struct("<IIQ")
_PART = struct.Struct("<QI")
_WINDOW = struct.Struct("<QQI")


class SessionFileError(InvalidInputError):
    """A file that is no session file, or is damaged or cut short."""

    reason = "bad_session_file"


@dataclass(frozen=True)
class FileHeader:
    """What a session file says of itself; its version says what may follow the tokens."""

    key: SessionKey
    layout: KVLayout
    lineage: Lineage
    kvd_version: str
    unix_s: float
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Frame:
    """Some tokens and their rows: one run of bytes for each component of each layer, in order."""

    token_offset: int
    num_tokens: int
    token_ids: bytes
    rows: memoryview


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of the state behind so many tokens: what is in its slot, without zeros at the end."""

    position: int
    index: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows of some tokens in one part of their window, which a load needs that ends at a position.

    Attributes:
        rows: one run of bytes for each component of each layer of the part, in order.
    """

    position: int
    token_offset: int
    num_tokens: int
    index: int
    rows: memoryview


def part_bytes_of(layout: KVLayout, index: int) -> int:
    """Return how many bytes of a state its part of this index has."""
    start = index * layout.block_bytes
    return min(layout.block_bytes, layout.state_bytes - start)


def row_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Return the bytes of one token, of each component of each layer, in the order of a frame."""
    return tuple(c.token_bytes for layer in layout.token_layers for c in layer.components)


def window_row_bytes(layout: KVLayout, index: int) -> tuple[int, ...]:
    """Return the same of the layers in a part of a window."""
    layers = (layout.layers[layer_index] for layer_index in layout.window_parts[index])
    return tuple(c.token_bytes for layer in layers for c in layer.components)


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
    start = _START.pack(MAGIC, header.version, len(body))
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


def part_bytes(num_tokens: int, part: StatePart) -> bytes:
    """Return a part of a state, behind so many tokens of the file."""
    payload = b"".join((_PART.pack(part.position, part.index), part.data))
    checksum = xxhash.xxh3_64_intdigest(payload, seed=num_tokens)
    return _FRAME.pack(0, PART, checksum) + payload


def window_bytes(num_tokens: int, window: WindowRows, runs: Sequence[bytes | memoryview]) -> bytes:
    """Return a part of a window, behind so many tokens of the file; `runs` as in its rows."""
    start = _WINDOW.pack(window.position, window.token_offset, window.index)
    payload = b"".join((start, *runs))
    checksum = xxhash.xxh3_64_intdigest(payload, seed=num_tokens)
    return _FRAME.pack(window.num_tokens, WINDOW, checksum) + payload


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
        self._next_part = 0
        self._position = 0  # of the state, or of the windows, whose parts come
        self._window_start = 0  # of the window whose parts come
        self._window_tokens = 0
        self._is_over = False

    def feed(self, data: bytes) -> Iterator[Frame | StatePart | WindowRows]:
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
        if version not in (VERSION, VERSION_WITH_STATE, VERSION_WITH_WINDOWS):
            raise SessionFileError(
                f"the session file has version {version}, this release knows up to "
                f"{VERSION_WITH_WINDOWS}",
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
        self.header = _header_of(body, version)

    def _next_frame(self, header: FileHeader) -> Frame | StatePart | WindowRows | None:
        buffer = self._buffer
        if self._is_over or len(buffer) < _FRAME.size:
            return None
        num_tokens, kind, checksum = _FRAME.unpack_from(buffer)
        if not self._may_come(header, num_tokens, kind):
            raise _damaged(f"the frame behind {self.num_tokens} tokens")
        num_bytes = self._payload_bytes(header.layout, num_tokens, kind)
        if len(buffer) < _FRAME.size + num_bytes:
            return None
        payload = memoryview(bytes(memoryview(buffer)[_FRAME.size : _FRAME.size + num_bytes]))
        del buffer[: _FRAME.size + num_bytes]
        if xxhash.xxh3_64_intdigest(payload, seed=self.num_tokens) != checksum:
            raise _damaged(f"the frame behind {self.num_tokens} tokens")
        if kind == PART:
            return self._part(payload)
        if kind == WINDOW:
            return self._window(payload, num_tokens, header.layout.window_slots)
        if not num_tokens:
            self._is_over = True
            return None
        tokens_end = num_tokens * TOKEN_BYTES
        frame = Frame(
            self.num_tokens, num_tokens, bytes(payload[:tokens_end]), payload[tokens_end:]
        )
        self.num_tokens += num_tokens
        return frame

    def _may_come(self, header: FileHeader, num_tokens: int, kind: int) -> bool:
        """Whether a frame may be the next: behind the first part of something come the others."""
        layout = header.layout
        if kind == WINDOW:
            may_have = header.version == VERSION_WITH_WINDOWS
            return may_have and 0 < num_tokens <= layout.block_tokens
        num_parts = layout.state_slots if header.version == VERSION_WITH_STATE else 0
        if kind == PART:
            return not num_tokens and self._next_part < num_parts
        is_between = 0 < self._next_part < num_parts or self._window_start < self._position
        is_behind = self._position and num_tokens
        return not (kind or is_between or is_behind) and num_tokens <= layout.block_tokens

    def _part(self, payload: memoryview) -> StatePart:
        position, index = _PART.unpack_from(payload)
        is_first = not self._next_part
        is_its_turn = index == self._next_part and (is_first or position == self._position)
        if not is_its_turn or not 0 < position <= self.num_tokens:
            raise _damaged(f"the state behind {self.num_tokens} tokens")
        self._position = self._window_start = position
        self._next_part = index + 1
        return StatePart(position, index, payload[_PART.size :])

    def _window(self, payload: memoryview, num_tokens: int, num_parts: int) -> WindowRows:
        position, token_offset, index = _WINDOW.unpack_from(payload)
        if not self._position:  # the first one says where they begin
            self._position, self._window_start = position, token_offset
        if not self._next_part:
            self._window_tokens = num_tokens
        expected = (self._position, self._window_start, self._window_tokens, self._next_part)
        end = token_offset + num_tokens
        is_next = (position, token_offset, num_tokens, index) == expected
        if not is_next or not end <= position <= self.num_tokens:
            raise _damaged(f"the windows behind {self.num_tokens} tokens")
        self._next_part = (index + 1) % num_parts
        if not self._next_part:
            self._window_start = end
        return WindowRows(position, token_offset, num_tokens, index, payload[_WINDOW.size :])

    def _payload_bytes(self, layout: KVLayout, num_tokens: int, kind: int) -> int:
        """Return how many bytes the payload of the next frame has."""
        if kind == PART:
            return _PART.size + part_bytes_of(layout, self._next_part)
        if kind == WINDOW:
            return _WINDOW.size + num_tokens * sum(window_row_bytes(layout, self._next_part))
        return num_tokens * (TOKEN_BYTES + sum(row_bytes(layout)))


def _header_of(body: bytes, version: int) -> FileHeader:
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
    if version == VERSION_WITH_WINDOWS and not layout.window:
        raise _damaged("windows of a layout without")
    return FileHeader(key, layout, lineage, message.kvd_version, message.unix_s, version)


def _damaged(what: str) -> SessionFileError:
    return SessionFileError(
        f"the session file is damaged: {what}", "copy it again, or export the session again"
    )
