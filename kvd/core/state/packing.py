"""How spans and folded blocks are packed into bytes: in the rows of sessions, and in memory.

    spans     = kind (u8) | record per span
    kind 0    = key (16) | num_tokens (u32)                          every span is plain
    kind 1    = key (16) | start (u32) | num_tokens (u32) | tokens digest (16) | chain (16)

Little-endian, unpadded. A plain span's digest is zeros in a record of kind 1; its chain is its key.
What cannot be unpacked ends the list: a damaged row gives the spans before the damage, which
recovery then compares with the blocks there are.

    places    = key (16) | num_tokens (u32) | extent (u64)           a folded block, 28 bytes

Pure.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence

from kvd.core.records.records import BlockRecord, Span
from shared.types.block_key import KEY_BYTES

PLAIN = 0
FULL = 1

_PLAIN_SPAN = struct.Struct(f"<{KEY_BYTES}sI")
_FULL_SPAN = struct.Struct(f"<{KEY_BYTES}sII{KEY_BYTES}s{KEY_BYTES}s")
_PLACE = struct.Struct(f"<{KEY_BYTES}sIQ")
_NO_DIGEST = bytes(KEY_BYTES)

PLAIN_SPAN_BYTES = _PLAIN_SPAN.size
FULL_SPAN_BYTES = _FULL_SPAN.size
PLACE_BYTES = _PLACE.size


def is_plain(span: Span) -> bool:
    """Whether the span is a whole block that no discard touched: its key proves its tokens."""
    return not span.tokens_digest


def plain_span(key: bytes, num_tokens: int) -> Span:
    """Make the span of a whole block that no discard touched."""
    return Span(key, 0, num_tokens, b"", key)


def pack_spans(spans: Sequence[Span]) -> bytes:
    """Pack the spans of a session for its row."""
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
    """Unpack the spans of a row, as far as they are sound."""
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
    """Count the tokens of folded blocks, without unpacking more of them."""
    return sum(num_tokens for _, num_tokens, _ in _PLACE.iter_unpack(places))


def _sound_prefix(spans: Iterable[Span]) -> Iterator[Span]:
    """Stop at a span that no store and no discard can have made."""
    for span in spans:
        is_whole = span.start == 0 and span.chain == span.block_key
        if not span.num_tokens or (is_plain(span) and not is_whole):
            return
        yield span
