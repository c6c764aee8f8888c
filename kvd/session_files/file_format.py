"""A session file: one session's tokens and KV rows, for another kvd.

    file    = header | held … | frame … | part … | window … | end
    header  = magic "KVDSESSN" | version u32 | bytes of the body u32 | xxh3_64 | body
    held    = num_tokens u32 | 3 u32 | xxh3_64 | token ids u32 …
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

A *tail* begins with frames without rows (version 1): tokens of which whoever imports it has to have
the KV. No export writes it; a release that knows none refuses it as damaged.

Pure.
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
TOKENS = 0  # kind of a frame: tokens, or the end
PART = 1  # a part of a state
WINDOW = 2  # a part of a window
HELD = 3  # tokens without their rows
MAX_HELD_TOKENS = 1 << 20  # of one frame; there may be several
MAX_BODY_BYTES = 1 << 20  # a layout of thousands of layers has less

START = struct.Struct("<8sII")
CHECKSUM = struct.Struct("<Q")
FRAME = struct.Struct("<IIQ")
PART_START = struct.Struct("<QI")
WINDOW_START = struct.Struct("<QQI")


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
class HeldTokens:
    """The first tokens of a tail, or more of them: their rows are elsewhere."""

    num_tokens: int
    token_ids: bytes


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
    start = START.pack(MAGIC, header.version, len(body))
    return start + CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + body)) + body


def header_num_bytes(beginning: bytes | bytearray) -> int | None:
    """Return how long the header of a file is that begins so; None if that is not there yet."""
    if len(beginning) < START.size:
        return None
    _, _, num_bytes = START.unpack_from(beginning)
    return START.size + CHECKSUM.size + min(int(num_bytes), MAX_BODY_BYTES)


def damaged(what: str) -> SessionFileError:
    """Say what of a file is not what was written."""
    return SessionFileError(
        f"the session file is damaged: {what}", "copy it again, or export the session again"
    )
