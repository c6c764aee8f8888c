"""The format of session files: one session's tokens and KV, for another kvd. Pure.

    file    = header | held … | frame … | part … | window … | end
    header  = magic "KVDSESSN" | version u32 | bytes of the body u32 | xxh3_64 | body
    held    = num_tokens u32 | 3 u32 | xxh3_64 | token ids u32 …
    frame   = num_tokens u32 | 0 u32 | xxh3_64 | token ids u32 … | rows
    part    = 0 u32 | 1 u32 | xxh3_64 | position u64 | index u32 | bytes
    window  = num_tokens u32 | 2 u32 | xxh3_64 | position u64 | token_offset u64 | index u32 | rows
    end     = a frame of 0 tokens; nothing follows it

All integers are little-endian. The body is a kvd.v1.SessionFileHeader. A frame holds the session's
next 1 … `block_tokens` tokens: their ids, then for each component of each layer the rows of these
tokens, without padding. The header's checksum is of all bytes before it and of the body. A frame's
checksum is of the bytes behind it, seeded with the number of tokens before the frame, so that a
frame that is missing, doubled or out of order is detected.

Version 1 has only frames of tokens. Version 2 adds the parts of a state of the model, in order, if
the session has one: each of a slot's size, except the last. Version 3 adds the windows that a load
needs that ends behind `position` tokens: for consecutive tokens up to there, the rows of the layers
in each part of a window, as in a frame. Frames then have no rows of these layers. Parts and windows
come behind all tokens; their checksums are seeded like that of a frame there.

A *tail* begins with held frames, which have no rows (version 1): the importing kvd has to have the
KV of these tokens. No export writes tails. A release that does not know them refuses them as
damaged.
"""

import struct
from dataclasses import dataclass

import xxhash

from shared.kvd_client.messages import layout_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import InvalidInputError
from shared.types.kv_layout import KVLayout
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

MAGIC = b"KVDSESSN"
VERSION = 1
VERSION_WITH_STATE = 2
VERSION_WITH_WINDOWS = 3
TOKENS = 0  # kind of a frame: tokens; none: the end
PART = 1  # a part of a state
WINDOW = 2  # a part of a window
HELD = 3  # tokens without rows
MAX_HELD_TOKENS = 1 << 20  # in one held frame; a tail may begin with several
MAX_BODY_BYTES = 1 << 20  # enough for a layout of thousands of layers

START = struct.Struct("<8sII")
CHECKSUM = struct.Struct("<Q")
FRAME = struct.Struct("<IIQ")
PART_START = struct.Struct("<QI")
WINDOW_START = struct.Struct("<QQI")


class SessionFileError(InvalidInputError):
    """The bytes are no session file, or a damaged or incomplete one."""

    reason = "bad_session_file"


@dataclass(frozen=True)
class FileHeader:
    """The header of a session file; its version says what may follow the tokens."""

    key: SessionKey
    layout: KVLayout
    lineage: Lineage
    kvd_version: str
    unix_s: float
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of tokens: their ids, and a run of rows for each component of each layer."""

    token_offset: int
    num_tokens: int
    token_ids: bytes
    rows: memoryview


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """A held frame: the next of a tail's first tokens, whose KV the importing kvd has to have."""

    num_tokens: int
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of the state behind `position` tokens: the bytes of its slot, without padding."""

    position: int
    index: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows of consecutive tokens in one part of a window, for a load that ends at a position.

    Attributes:
        position: tokens behind which the load ends.
        token_offset, num_tokens: the tokens.
        index: the part of the window.
        rows: one run of bytes for each component of each layer of the part, in order.
    """

    position: int
    token_offset: int
    num_tokens: int
    index: int
    rows: memoryview


def part_bytes_of(layout: KVLayout, index: int) -> int:
    """Return the bytes of the part `index` of a state."""
    start = index * layout.block_bytes
    return min(layout.block_bytes, layout.state_bytes - start)


def row_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Return the bytes of a row, for each component of each layer, in the order of a frame."""
    return tuple(c.token_bytes for layer in layout.token_layers for c in layer.components)


def window_row_bytes(layout: KVLayout, index: int) -> tuple[int, ...]:
    """Return the bytes of a row, for each component of each layer in a part of a window."""
    layers = (layout.layers[layer_index] for layer_index in layout.window_parts[index])
    return tuple(c.token_bytes for layer in layers for c in layer.components)


def header_bytes(header: FileHeader) -> bytes:
    """Encode a header."""
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
    start = START.pack(MAGIC, header.version, len(body))
    return start + CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + body)) + body


def header_num_bytes(beginning: bytes | bytearray) -> int | None:
    """Return the length of the header that begins so; None: more bytes are needed to know."""
    if len(beginning) < START.size:
        return None
    _, _, num_bytes = START.unpack_from(beginning)
    return START.size + CHECKSUM.size + min(int(num_bytes), MAX_BODY_BYTES)


def damaged(what: str) -> SessionFileError:
    """Return the error that some part of a file is damaged."""
    return SessionFileError(
        f"the session file is damaged: {what}", "copy it again, or export the session again"
    )
