"""Everything that is persisted: entries of the index, records of the journal, packed spans.

Pure, frozen. Token ids are little-endian uint32 bytes; positions and lengths count tokens.

The spans of a session are packed in its entry; the blocks of an idle session, in memory as well:

    spans     = kind (u8) | record per span
    kind 0    = key (16) | num_tokens (u32)                          every span is plain
    kind 1    = key (16) | start (u32) | num_tokens (u32) | tokens digest (16) | chain (16)
    places    = key (16) | num_tokens (u32) | extent (u64)           a packed block, 28 bytes

Little-endian, unpadded. In a record of kind 1, the digest of a plain span is zeros, and its chain
is its key. A part of a state or a window is a record of kind 1 without tokens, which an older kvd
takes for the end.

A record that cannot be unpacked ends the list: a damaged entry gives the spans before the damage,
which recovery then compares with the blocks that exist.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from shared.types.block_key import KEY_BYTES
from shared.types.session_key import SessionKey

PLAIN = 0
FULL = 1

_PLAIN_SPAN = struct.Struct(f"<{KEY_BYTES}sI")
_FULL_SPAN = struct.Struct(f"<{KEY_BYTES}sII{KEY_BYTES}s{KEY_BYTES}s")
_PLACE = struct.Struct(f"<{KEY_BYTES}sIQ")
_NO_DIGEST = bytes(KEY_BYTES)

PLAIN_SPAN_BYTES = _PLAIN_SPAN.size
FULL_SPAN_BYTES = _FULL_SPAN.size
PLACE_BYTES = _PLACE.size
TTL_NEVER_NS = -1  # a session's own TTL: never expire; None is the default TTL


class Pin(Enum):
    """An operator's protection of a session."""

    NONE = 0
    SOFT = 1  # does not expire; evicted only when nothing else is left
    HARD = 2  # does not expire, is never evicted


class Span(NamedTuple):
    """A run of tokens of one block that a session uses. Its position follows from those before it.

    Attributes:
        block_key: content key of the block.
        start: first token, counted from the block's first.
        num_tokens: number of tokens, at least 1; 0: the block is a part of a state or a window.
        tokens_digest: digest of the ids of these tokens; proves that a request asks for the
            same tokens.
        chain: parent key for everything that is computed after this span. It is `block_key` unless
            a discard has happened at or before the span (D5).

    A *plain* span (a whole block, no discard at or before it) has an empty digest: computing the
    block key from the requested tokens proves that they are the same.

    The parts of a *state* follow each other, after the run with the last token that the state
    covers: `start` is its position, `tokens_digest` its key, and `chain` the parent key in it. The
    parts of a *window* follow the first run on its block: `tokens_digest` and `chain` are both the
    block's key, and `start` is 0.
    """

    block_key: bytes
    start: int
    num_tokens: int
    tokens_digest: bytes
    chain: bytes


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's entry in the index."""

    key: SessionKey
    spans: bytes  # as packed here
    last_access_ns: int
    ttl_ns: int | None = None  # None: the default; TTL_NEVER_NS: never
    pin: Pin = Pin.NONE
    ended: bool = False
    retain_ns: int | None = None  # how long it is retained after each use; None: it is not

    @property
    def has_settings(self) -> bool:
        """Whether it has more than spans and a last use: a TTL, a retention, a pin or an end."""
        is_timed = self.ttl_ns is not None or self.retain_ns is not None
        return is_timed or self.pin is not Pin.NONE or self.ended


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block's entry in the index: its place on SSD. The extent's header has what verifies it."""

    key: bytes
    extent: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SessionColumns:
    """The entries of some sessions by columns, because an object for each is too expensive.

    Attributes:
        spans: the spans of each session, packed as described above.
        settings: the entry, without spans, of each session that `has_settings`, by its index.
    """

    keys: Sequence[SessionKey]
    spans: Sequence[bytes]
    last_access_ns: Sequence[int]
    settings: Mapping[int, SessionRecord]


def columns_of(records: Iterable[SessionRecord]) -> SessionColumns:
    """Return the entries of sessions as columns."""
    entries = list(records)
    return SessionColumns(
        [entry.key for entry in entries],
        [entry.spans for entry in entries],
        [entry.last_access_ns for entry in entries],
        {
            index: replace(entry, spans=b"")
            for index, entry in enumerate(entries)
            if entry.has_settings
        },
    )


@dataclass(slots=True)
class IndexEntries:
    """All entries of one layout by columns, because there may be millions.

    Restoring them consumes them: the sessions are read as they come, the blocks by `take_blocks`.
    """

    sessions: Iterable[SessionColumns]
    block_keys: bytes  # KEY_BYTES each, joined
    extents: Sequence[int]
    block_tokens: Sequence[int]

    def take_blocks(self) -> tuple[bytes, Sequence[int], Sequence[int]]:
        """Return the columns of blocks, and drop them here, because they are large."""
        taken = (self.block_keys, self.extents, self.block_tokens)
        self.block_keys, self.extents, self.block_tokens = b"", (), ()
        return taken


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The contents of an extent's header.

    Attributes:
        checksums: xxh3_64 of each layer slice's used bytes (of every component, in order, the
            first num_tokens tokens), little-endian, 8 bytes a layer.
    """

    token_ids: bytes
    checksums: bytes


# ------------------------------------------------------------------------------------ the journal


class WritingSlot(NamedTuple):
    """An engine writes to the slot under a lease."""

    generation: int
    lease_id: int
    engine_id: int


class CommittedSlot(NamedTuple):
    """The slot holds a block whose bytes never change. Checksums are as in StoredBlock."""

    generation: int
    key: bytes
    num_tokens: int
    token_ids: bytes
    checksums: bytes


SlotRecord = WritingSlot | CommittedSlot


@dataclass(frozen=True, slots=True)
class AdoptedSlot:
    """A slot that an earlier kvd had committed. It is verified before its first use."""

    slot_id: int
    block: CommittedSlot


@dataclass(frozen=True, slots=True)
class OrphanSlot:
    """A slot that an engine may still be writing to, granted by an earlier kvd."""

    slot_id: int
    writing: WritingSlot  # its engine_id is the id that the shell has given to the process


# ---------------------------------------------------------------------------------------- packing


def is_plain(span: Span) -> bool:
    """Whether the span is a whole block without a discard before: its key proves its tokens."""
    return not span.tokens_digest


def plain_span(key: bytes, num_tokens: int) -> Span:
    """Return the span of a whole block without a discard at or before it."""
    return Span(key, 0, num_tokens, b"", key)


def part_spans(part_keys: Sequence[bytes], position: int, key: bytes, parent: bytes) -> list[Span]:
    """Return the spans of the parts of a state or a window; see Span."""
    return [Span(part_key, position, 0, key, parent) for part_key in part_keys]


def pack_spans(spans: Sequence[Span]) -> bytes:
    """Pack the spans of a session for its entry."""
    if all(map(is_plain, spans)):
        pack = _PLAIN_SPAN.pack
        records = [pack(span.block_key, span.num_tokens) for span in spans]
        return bytes((PLAIN,)) + b"".join(records)
    return bytes((FULL,)) + pack_full(spans)


def pack_full(spans: Iterable[Span]) -> bytes:
    """Pack spans of any kind, without the kind byte."""
    return b"".join(
        _FULL_SPAN.pack(
            span.block_key,
            span.start,
            span.num_tokens,
            span.tokens_digest or _NO_DIGEST,
            span.chain,
        )
        for span in spans
    )


def unpack_spans(packed: bytes) -> list[Span]:
    """Unpack the spans of an entry, up to the first one that is damaged."""
    kind = packed[0] if packed else None
    if kind == PLAIN:
        length = len(packed) - (len(packed) - 1) % PLAIN_SPAN_BYTES
        records = _PLAIN_SPAN.iter_unpack(memoryview(packed)[1:length])
        return list(_sound_prefix(plain_span(key, num_tokens) for key, num_tokens in records))
    if kind == FULL:
        return list(_sound_prefix(unpack_full(memoryview(packed)[1:])))
    return []


def unpack_full(packed: bytes | memoryview) -> Iterator[Span]:
    """Unpack spans that `pack_full` has packed. An incomplete record at the end is ignored."""
    length = len(packed) - len(packed) % _FULL_SPAN.size
    for key, start, num_tokens, digest, chain in _FULL_SPAN.iter_unpack(packed[:length]):
        yield Span(key, start, num_tokens, b"" if digest == _NO_DIGEST else digest, chain)


def pack_places(records: Iterable[BlockRecord]) -> bytes:
    """Pack the places of blocks on SSD."""
    return b"".join(_PLACE.pack(record.key, record.num_tokens, record.extent) for record in records)


def unpack_places(places: bytes) -> Iterator[BlockRecord]:
    """Unpack the places of blocks on SSD."""
    for key, num_tokens, extent in _PLACE.iter_unpack(places):
        yield BlockRecord(key, extent, num_tokens)


def highest_extent(places: bytes) -> int:
    """Return the highest extent of packed blocks; -1 without any."""
    return max((extent for _, _, extent in _PLACE.iter_unpack(places)), default=-1)


def num_tokens_of_places(places: bytes) -> int:
    """Return the number of tokens of packed blocks, without unpacking anything else."""
    return sum(num_tokens for _, num_tokens, _ in _PLACE.iter_unpack(places))


def _sound_prefix(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans before the first one that no store and no discard can have made."""
    for span in spans:
        is_whole = span.start == 0 and span.chain == span.block_key and span.num_tokens > 0
        if is_plain(span) and not is_whole:
            return
        yield span
