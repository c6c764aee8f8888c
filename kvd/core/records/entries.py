"""What is persisted: entries of the index, records of the journal, and how spans become bytes.

Pure, frozen. Token ids are little-endian uint32 bytes; positions and lengths count tokens.

The spans of a session are packed in its entry, and so are, in memory, the blocks of an idle one:

    spans     = kind (u8) | record per span
    kind 0    = key (16) | num_tokens (u32)                          every span is plain
    kind 1    = key (16) | start (u32) | num_tokens (u32) | tokens digest (16) | chain (16)
    places    = key (16) | num_tokens (u32) | extent (u64)           a packed block, 28 bytes

Little-endian, unpadded. A plain span's digest is zeros in a record of kind 1; its chain is its key.
A part of a state or a window is a record of kind 1 without tokens; an older kvd takes it for the
end.
What cannot be unpacked ends the list: a damaged entry gives the spans before the damage, which
recovery then compares with the blocks there are.
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
    """A run of tokens of one block that a session uses; its position is the sum of those before.

    Attributes:
        block_key: content key of the block.
        start: first token, counted from the block's.
        num_tokens: how many, at least 1; 0: the block is a part of a state or a window.
        tokens_digest: digest of the ids of these tokens; proves that a request asks for the
            same tokens.
        chain: parent key of whatever is computed after this span. It is `block_key` unless a
            discard has happened at or before it (D5).

    A *plain* span (a whole block, no discard at or before it) has an empty digest: that its tokens
    are the ones asked for shows when the block key is computed from them.

    The parts of a *state* follow each other, behind the run that has the last token the state knows
    of: `start` is its position, `tokens_digest` its key, and `chain` the parent key in it. Those of
    a *window* are behind the first run on its block: the block's key is in both, and `start` is 0.
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
    retain_ns: int | None = None  # how long it is retained after a use; None: it is not

    @property
    def has_settings(self) -> bool:
        """Whether anything of it beyond spans and last use is not as usual."""
        is_timed = self.ttl_ns is not None or self.retain_ns is not None
        return is_timed or self.pin is not Pin.NONE or self.ended


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block's entry in the index: its place on SSD. The extent's header says how to verify it."""

    key: bytes
    extent: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SessionColumns:
    """The entries of some sessions by columns: a record for each would cost more than all the rest.

    Attributes:
        spans: each session's, packed as described above.
        settings: by index: a session's entry, if its settings are not the defaults; spans apart.
    """

    keys: Sequence[SessionKey]
    spans: Sequence[bytes]
    last_access_ns: Sequence[int]
    settings: Mapping[int, SessionRecord]


def columns_of(records: Iterable[SessionRecord]) -> SessionColumns:
    """Put the entries of sessions into columns."""
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

    Who restores them takes them: the sessions are read as they come, the blocks by `take_blocks`.
    """

    sessions: Iterable[SessionColumns]
    block_keys: bytes  # KEY_BYTES each, joined
    extents: Sequence[int]
    block_tokens: Sequence[int]

    def take_blocks(self) -> tuple[bytes, Sequence[int], Sequence[int]]:
        """Return the columns of blocks, and forget them: they are large."""
        taken = (self.block_keys, self.extents, self.block_tokens)
        self.block_keys, self.extents, self.block_tokens = b"", (), ()
        return taken


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """What an extent's header says of its block.

    Attributes:
        checksums: xxh3_64 of each layer slice's used bytes (of every component, in order, the
            first num_tokens tokens), little-endian, 8 bytes a layer.
    """

    token_ids: bytes
    checksums: bytes


# ------------------------------------------------------------------------------------ the journal


class WritingSlot(NamedTuple):
    """An engine writes to the slot."""

    generation: int
    lease_id: int
    engine_id: int


@dataclass(frozen=True, slots=True)
class CommittedSlot:
    """The slot holds a block whose bytes never change; checksums as in StoredBlock."""

    generation: int
    key: bytes
    num_tokens: int
    token_ids: bytes
    checksums: bytes


SlotRecord = WritingSlot | CommittedSlot


@dataclass(frozen=True, slots=True)
class AdoptedSlot:
    """A slot that an earlier kvd had committed; to be verified before its first use."""

    slot_id: int
    block: CommittedSlot


@dataclass(frozen=True, slots=True)
class OrphanSlot:
    """A slot that an engine may still be writing to, granted by an earlier kvd."""

    slot_id: int
    writing: WritingSlot  # its engine_id is one that the shell gave to the process


# ---------------------------------------------------------------------------------------- packing


def is_plain(span: Span) -> bool:
    """Whether the span is a whole block that no discard touched: its key proves its tokens."""
    return not span.tokens_digest


def plain_span(key: bytes, num_tokens: int) -> Span:
    """Make the span of a whole block that no discard touched."""
    return Span(key, 0, num_tokens, b"", key)


def part_spans(part_keys: Sequence[bytes], position: int, key: bytes, parent: bytes) -> list[Span]:
    """Make the spans of the parts of a state, or a window: see Span."""
    return [Span(part_key, position, 0, key, parent) for part_key in part_keys]


def pack_spans(spans: Sequence[Span]) -> bytes:
    """Pack the spans of a session for its entry."""
    if all(map(is_plain, spans)):
        pack = _PLAIN_SPAN.pack
        records = [pack(span.block_key, span.num_tokens) for span in spans]
        return bytes((PLAIN,)) + b"".join(records)
    return bytes((FULL,)) + pack_full(spans)


def pack_full(spans: Iterable[Span]) -> bytes:
    """Pack spans of any sort, without the kind."""
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
    """Unpack the spans of an entry, as far as they are sound."""
    kind = packed[0] if packed else None
    if kind == PLAIN:
        length = len(packed) - (len(packed) - 1) % PLAIN_SPAN_BYTES
        records = _PLAIN_SPAN.iter_unpack(memoryview(packed)[1:length])
        return list(_sound_prefix(plain_span(key, num_tokens) for key, num_tokens in records))
    if kind == FULL:
        return list(_sound_prefix(unpack_full(memoryview(packed)[1:])))
    return []


def unpack_full(packed: bytes | memoryview) -> Iterator[Span]:
    """Unpack what pack_full has packed; a trailing part of a record is ignored."""
    length = len(packed) - len(packed) % _FULL_SPAN.size
    for key, start, num_tokens, digest, chain in _FULL_SPAN.iter_unpack(packed[:length]):
        yield Span(key, start, num_tokens, b"" if digest == _NO_DIGEST else digest, chain)


def pack_places(records: Iterable[BlockRecord]) -> bytes:
    """Pack where blocks lie on SSD."""
    return b"".join(_PLACE.pack(record.key, record.num_tokens, record.extent) for record in records)


def unpack_places(places: bytes) -> Iterator[BlockRecord]:
    """Unpack where blocks lie on SSD."""
    for key, num_tokens, extent in _PLACE.iter_unpack(places):
        yield BlockRecord(key, extent, num_tokens)


def num_tokens_of_places(places: bytes) -> int:
    """Count the tokens of packed blocks, without unpacking more of them."""
    return sum(num_tokens for _, num_tokens, _ in _PLACE.iter_unpack(places))


def _sound_prefix(spans: Iterable[Span]) -> Iterator[Span]:
    """Stop at a span that no store and no discard can have made."""
    for span in spans:
        is_whole = span.start == 0 and span.chain == span.block_key and span.num_tokens > 0
        if is_plain(span) and not is_whole:
            return
        yield span
