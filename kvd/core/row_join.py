"""Joins the spans of all sessions with the blocks there are, by columns: millions in a second.

Pure. Keys are compared by their first 8 bytes and then verified by the others. Of two keys with
equal first bytes (never, in practice: keys are keyed hashes) one is not found, which is a miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvd.core.packing import PLACE_BYTES, PLAIN_SPAN_BYTES

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

PARTIAL = 1 << 31  # flag in a span's row count: it may use less than the whole block

_KEY = np.dtype([("first", ">u8"), ("last", ">u8")])
_SPAN = np.dtype([("key", _KEY), ("num_tokens", "<u4")])
_PLACE = np.dtype([("key", _KEY), ("num_tokens", "<u4"), ("extent", "<u8")])
assert (_SPAN.itemsize, _PLACE.itemsize) == (PLAIN_SPAN_BYTES, PLACE_BYTES)


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """Blocks, found by key.

    Attributes:
        order: blocks by ascending first half of their keys.
        same_as: by block: the first one of the same key; itself, usually. -1: it cannot be found.
    """

    first: Words
    last: Words
    num_tokens: Ints
    order: Ints
    same_as: Ints


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """The spans of many sessions, one session after the other.

    Attributes:
        starts: index of each session's first span, and the number of spans.
        rows: the block of each span, as far as the session is sound.
        lengths: how many spans of each session are sound: all before the first that is not.
    """

    packed: NDArray[np.void]
    starts: Ints
    rows: Ints
    lengths: Ints


def index_blocks(keys: bytes, num_tokens: Ints) -> BlockColumns:
    """Make blocks findable; of several with one key the first one counts."""
    halves = np.frombuffer(keys, dtype=_KEY)
    first, last = halves["first"].astype(np.uint64), halves["last"].astype(np.uint64)
    is_sorted = bool(np.all(first[:-1] <= first[1:]))
    order = np.arange(len(first)) if is_sorted else np.argsort(first, kind="stable")
    same_as = np.arange(len(first))
    in_order = first[order]
    for place in (np.flatnonzero(in_order[1:] == in_order[:-1]) + 1).tolist():
        leader = int(np.searchsorted(in_order, in_order[place]))
        one, other = order[leader], order[place]
        same_as[other] = one if last[one] == last[other] else -1
    return BlockColumns(first, last, num_tokens, order, same_as)


def join_spans(
    blocks: BlockColumns, is_sound: Flags, packed: bytes | bytearray, num_spans: Sequence[int]
) -> SpanColumns:
    """Find the blocks of all spans.

    Args:
        blocks: where to find them.
        is_sound: which of the blocks may be used.
        packed: all spans as kind 0 packs them, with PARTIAL where a span may use part of a block;
            num_tokens is then the end of its rows.
        num_spans: of each session.
    """
    spans = np.frombuffer(packed, dtype=_SPAN)
    starts = np.concatenate(([0], np.cumsum(num_spans, dtype=np.int64)))
    rows = _find(blocks, spans["key"])
    is_found = rows >= 0
    rows[~is_found] = 0
    if len(blocks.first):
        num_rows = spans["num_tokens"].astype(np.int64)
        is_partial = num_rows >= PARTIAL
        num_tokens = blocks.num_tokens[rows]
        fits = np.where(is_partial, num_rows - PARTIAL <= num_tokens, num_rows == num_tokens)
        is_found &= fits & is_sound[rows]
    lengths = np.diff(starts)
    missing = np.flatnonzero(~is_found)[::-1]  # the first one of a session is assigned last
    sessions = np.searchsorted(starts, missing, side="right") - 1
    lengths[sessions] = missing - starts[sessions]
    return SpanColumns(spans, starts, rows, lengths)


def count_users(spans: SpanColumns, num_blocks: int) -> Ints:
    """How many spans use each block."""
    return np.bincount(spans.rows[_is_kept(spans)], minlength=num_blocks)


def head_lengths(spans: SpanColumns, is_private: Flags) -> Ints:
    """How many spans of each session come up to its last one whose block is not private."""
    lengths = np.zeros(len(spans.lengths), dtype=np.int64)
    if not len(is_private):
        return lengths  # there is no block, so there is no sound span
    shared = np.flatnonzero(_is_kept(spans) & ~is_private[spans.rows])
    sessions = np.searchsorted(spans.starts, shared, side="right") - 1
    lengths[sessions] = shared - spans.starts[sessions] + 1  # the last one is assigned last
    return lengths


def pack_all_places(spans: SpanColumns, extents: Ints) -> bytes:
    """Pack the place of every span's block; those of spans that are not sound mean nothing."""
    places = np.empty(len(spans.packed), dtype=_PLACE)
    places["key"], places["num_tokens"] = spans.packed["key"], spans.packed["num_tokens"]
    places["extent"] = extents[spans.rows] if len(extents) else 0
    return places.tobytes()


def _is_kept(spans: SpanColumns) -> Flags:
    """Which spans are sound, as are all before them in their session."""
    num_spans = np.diff(spans.starts)
    index = np.arange(len(spans.rows)) - np.repeat(spans.starts[:-1], num_spans)
    return np.asarray(index < np.repeat(spans.lengths, num_spans))


def _find(blocks: BlockColumns, keys: NDArray[np.void]) -> Ints:
    """Index of each key's block, -1 if there is none."""
    if not len(blocks.first):
        return np.full(len(keys), -1)
    first, last = keys["first"].astype(np.uint64), keys["last"].astype(np.uint64)
    by_key = np.argsort(first)  # look-ups in ascending order stay in the processor's cache
    places = np.empty(len(first), dtype=np.int64)
    places[by_key] = np.searchsorted(blocks.first[blocks.order], first[by_key])
    rows = blocks.order[np.minimum(places, len(blocks.order) - 1)]
    is_found = (blocks.first[rows] == first) & (blocks.last[rows] == last)
    return np.where(is_found, rows, -1)
