"""Join of the sessions' entries with the blocks there are, as columns: millions per second.

Pure. Keys are found by their first 8 bytes and then compared by the others. Of two keys with equal
first bytes one is not found, which is a miss. (It never happens in practice: keys are keyed
hashes.)
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvd.core.eviction.session_order import Guard
from kvd.core.records.entries import (
    FULL,
    PLACE_BYTES,
    PLAIN,
    PLAIN_SPAN_BYTES,
    Pin,
    SessionColumns,
    SessionRecord,
    Span,
    is_plain,
    pack_spans,
    plain_span,
    unpack_spans,
)
from kvd.core.state.stored_parts import is_window
from shared.types.session_key import SessionKey

Ints = NDArray[np.int64]
EntryIndexes = NDArray[np.int32]  # numbers of blocks; there are never more than 2^31
Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]

PARTIAL = 1 << 31  # flag in a span's token count: it may use less than the whole block
JOINED_BYTES = PLAIN_SPAN_BYTES << 18  # packed spans joined at a time, which bounds the memory

_KEY = np.dtype([("first", ">u8"), ("last", ">u8")])
_SPAN = np.dtype([("key", _KEY), ("num_tokens", "<u4")])
_PLACE = np.dtype([("key", _KEY), ("num_tokens", "<u4"), ("extent", "<u8")])
assert (_SPAN.itemsize, _PLACE.itemsize) == (PLAIN_SPAN_BYTES, PLACE_BYTES)


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """Blocks as columns, to be found by key.

    Attributes:
        first: by block: the first 8 bytes of its key.
        last: by block: the other 8 bytes.
        num_tokens: by block: its tokens.
        order: blocks by ascending first half of their keys.
        same_as: by block: the first block of the same key, usually itself; -1: it cannot be found.
        in_order: `first` of the blocks of `order`.
    """

    first: Words
    last: Words
    num_tokens: EntryIndexes
    order: EntryIndexes
    same_as: EntryIndexes
    in_order: Words


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """The spans of many sessions, one session after the other.

    Attributes:
        starts: index of each session's first span; at the end the number of all spans.
        entries: the block of each span, valid for sound spans.
        lengths: how many spans of each session are sound: all before the first that is not.
    """

    starts: Ints
    entries: EntryIndexes
    lengths: Ints


def index_blocks(keys: bytes, num_tokens: EntryIndexes) -> BlockColumns:
    """Index blocks by key; of several blocks with one key the first one counts."""
    halves = np.frombuffer(keys, dtype=_KEY)
    first, last = halves["first"].astype(np.uint64), halves["last"].astype(np.uint64)
    is_sorted = bool(np.all(first[:-1] <= first[1:]))
    same_as = np.arange(len(first), dtype=np.int32)
    order = same_as.copy() if is_sorted else np.argsort(first, kind="stable").astype(np.int32)
    in_order = first if is_sorted else first[order]
    for place in (np.flatnonzero(in_order[1:] == in_order[:-1]) + 1).tolist():
        leader = int(np.searchsorted(in_order, in_order[place]))
        one, other = order[leader], order[place]
        same_as[other] = one if last[one] == last[other] else -1
    return BlockColumns(first, last, num_tokens, order, same_as, in_order)


class SpanJoin:
    """Finds the blocks of spans, batch by batch, and frees each batch's packed spans.

    Args:
        blocks: the index of blocks.
        is_sound: by block: whether it may be used.
    """

    def __init__(self, blocks: BlockColumns, is_sound: Flags) -> None:
        self._blocks = blocks
        self._is_sound = is_sound
        self._packed = bytearray()
        self._num_spans = array("q")
        self._entries: list[EntryIndexes] = []
        self._is_found: list[Flags] = []

    def add(self, packed: Sequence[bytes]) -> None:
        """Add sessions' spans, as kind 0 packs them.

        If a span may use only a part of its block it has the flag PARTIAL, and num_tokens is the
        end of the tokens that it uses.
        """
        self._packed += b"".join(packed)
        self._num_spans.extend(len(spans) // PLAIN_SPAN_BYTES for spans in packed)
        if len(self._packed) >= JOINED_BYTES:
            self._join()

    def has_parts(self, keys: Sequence[bytes]) -> list[bool]:
        """Return by key whether a sound block with it is a part of a state or window."""
        entries = _find(self._blocks, np.frombuffer(b"".join(keys), dtype=_KEY))
        if not len(self._blocks.first):
            return [False] * len(keys)
        is_part = (self._blocks.num_tokens[entries] == 0) & self._is_sound[entries]
        return list(is_part & (entries >= 0))

    def finish(self) -> SpanColumns:
        """Join the last batch and return the result for all sessions."""
        self._join()
        num_spans = np.frombuffer(self._num_spans, dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(num_spans, dtype=np.int64)))
        missing = np.flatnonzero(~np.concatenate(self._is_found))[::-1]
        lengths = np.diff(starts)
        sessions = np.searchsorted(starts, missing, side="right") - 1
        lengths[sessions] = missing - starts[sessions]  # a session's first miss is assigned last
        return SpanColumns(starts, np.concatenate(self._entries), lengths)

    def _join(self) -> None:
        """Find the blocks of the spans added since the last join."""
        spans = np.frombuffer(bytes(self._packed), dtype=_SPAN)
        entries = _find(self._blocks, spans["key"])
        is_found = entries >= 0
        entries[~is_found] = 0
        if len(self._blocks.first):
            coded = spans["num_tokens"].astype(np.int64)
            is_partial = coded >= PARTIAL
            num_tokens = self._blocks.num_tokens[entries]
            fits = np.where(is_partial, coded - PARTIAL <= num_tokens, coded == num_tokens)
            is_found &= fits & self._is_sound[entries]
        self._entries.append(entries)
        self._is_found.append(is_found)
        self._packed.clear()


def count_users(spans: SpanColumns, num_blocks: int) -> Ints:
    """Return how many spans use each block."""
    is_kept = _is_kept(spans)
    entries = spans.entries if is_kept.all() else spans.entries[is_kept]
    return np.bincount(entries, minlength=num_blocks)


def head_lengths(spans: SpanColumns, is_private: Flags) -> Ints:
    """Return how many of each session's spans come before its private tail.

    They end with the session's last span whose block is not private.
    """
    lengths = np.zeros(len(spans.lengths), dtype=np.int64)
    if not len(is_private):
        return lengths  # there is no block, so there is no sound span
    shared = np.flatnonzero(_is_kept(spans) & ~is_private[spans.entries])
    sessions = np.searchsorted(spans.starts, shared, side="right") - 1
    lengths[sessions] = shared - spans.starts[sessions] + 1  # the last one is assigned last
    return lengths


def expand_ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the numbers of all ranges [start, start + length), one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def pack_places_of(
    keys: bytes, num_tokens: EntryIndexes, extents: Ints, entries: EntryIndexes
) -> bytes:
    """Pack the places on SSD of some blocks (`entries`), all of which have one."""
    places = np.empty(len(entries), dtype=_PLACE)
    places["key"] = np.frombuffer(keys, dtype=_KEY)[entries]
    places["num_tokens"] = num_tokens[entries]
    places["extent"] = extents[entries]
    return places.tobytes()


def _is_kept(spans: SpanColumns) -> Flags:
    """Return which spans are sound, together with all before them in their session."""
    num_spans = np.diff(spans.starts)
    if np.array_equal(num_spans, spans.lengths):
        return np.ones(len(spans.entries), dtype=np.bool_)  # as after nearly every start
    index = np.arange(len(spans.entries)) - np.repeat(spans.starts[:-1], num_spans)
    return np.asarray(index < np.repeat(spans.lengths, num_spans))


def _find(blocks: BlockColumns, keys: NDArray[np.void]) -> EntryIndexes:
    """Return the block of each key, -1 if there is none."""
    if not len(blocks.first):
        return np.full(len(keys), -1, dtype=np.int32)
    first, last = keys["first"].astype(np.uint64), keys["last"].astype(np.uint64)
    by_key = np.argsort(first)  # look-ups in ascending order stay in the processor's cache
    places = np.empty(len(first), dtype=np.int64)
    places[by_key] = np.searchsorted(blocks.in_order, first[by_key])
    entries = blocks.order[np.minimum(places, len(blocks.order) - 1)]
    is_found = (blocks.first[entries] == first) & (blocks.last[entries] == last)
    return np.where(is_found, entries, np.int32(-1))


_PLAIN_KIND = bytes((PLAIN,))
_NEVER = max(Guard) + 1  # above all guards: a hard-pinned session is never evicted
_GUARDS = {Pin.NONE: Guard.NONE, Pin.SOFT: Guard.PINNED, Pin.HARD: _NEVER}


@dataclass(slots=True)
class SessionEntries:
    """The entries of sessions, as columns.

    Attributes:
        part_slots: number of parts of a state or window in the layout; 0: it has none.
        keys: the sessions' keys.
        last_access_ns: times of their last uses.
        full: by index: the spans of sessions that have others than plain ones.
        settings: by index: the entries of sessions with settings of their own.
        damaged: indexes of sessions whose entry could not be read to its end, or names states or
            windows that do not exist.
    """

    part_slots: int = 0
    keys: list[SessionKey] = field(default_factory=list)
    last_access_ns: "array[int]" = field(default_factory=lambda: array("q"))
    full: dict[int, list[Span]] = field(default_factory=dict)
    settings: dict[int, SessionRecord] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)

    def collect(self, sessions: Iterable[SessionColumns], spans: SpanJoin) -> None:
        """Add all entries, and pass their spans to the join, so that they are soon freed."""
        for some in sessions:
            first = len(self.keys)
            self.keys.extend(some.keys)
            self.last_access_ns.extend(some.last_access_ns)
            for index, settings in some.settings.items():
                self.settings[first + index] = settings
            spans.add(
                [
                    packed[1:]
                    if packed[:1] == _PLAIN_KIND and len(packed) % PLAIN_SPAN_BYTES == 1
                    else self._joinable_spans(index, packed, spans)
                    for index, packed in enumerate(some.spans, first)
                ]
            )

    def in_order(self) -> Ints:
        """Return the indexes of the sessions, least recently used first."""
        return np.argsort(np.frombuffer(self.last_access_ns, dtype=np.int64), kind="stable")

    def surplus(self, order: Ints, most: int, now_ns: int) -> Ints:
        """Return the indexes of sessions to be dropped so that at most `most` are left.

        They are those that eviction would take: hard-pinned ones stay, soft-pinned and retained
        ones go last, ended ones go first.

        Args:
            order: the indexes of all sessions, least recently used first.
            most: most sessions.
            now_ns: the time, at which retentions may be over.
        """
        ranks = np.zeros(len(self.keys), dtype=np.int64)
        for index, entry in self.settings.items():
            is_retained = entry.retain_ns is not None and (
                self.last_access_ns[index] + entry.retain_ns > now_ns
            )
            guard = _GUARDS[entry.pin] or (Guard.RETAINED if is_retained else Guard.NONE)
            ranks[index] = 2 * guard - entry.ended
        by_rank = order[np.argsort(ranks[order], kind="stable")]
        num_evictable = int(np.sum(ranks[order] < 2 * _NEVER - 1))
        return by_rank[: min(max(0, len(order) - most), num_evictable)]

    def are_plain(self) -> Flags:
        """Return which sessions have plain spans, a sound entry and the default settings."""
        are_plain = np.ones(len(self.keys), dtype=np.bool_)
        for others in (self.full, self.settings, self.damaged):
            are_plain[list(others)] = False
        return are_plain

    def _joinable_spans(self, index: int, packed: bytes, join: SpanJoin) -> bytes:
        """Return spans that are not all plain in the form of kind 0, and note what is special."""
        spans = unpack_spans(packed)
        if self.part_slots:
            spans = list(_whole_parts(spans, self.part_slots, join))
        if packed[:1] == bytes((FULL,)):
            self.full[index] = spans
        if pack_spans(spans) != packed:
            self.damaged.add(index)
        return pack_spans([plain_span(span.block_key, _coded(span)) for span in spans])[1:]


def _coded(span: Span) -> int:
    """Return a span's token count as SpanJoin reads it: with PARTIAL if it is not plain."""
    if not span.num_tokens:
        return 0
    end = span.start + span.num_tokens
    return end if is_plain(span) else end | PARTIAL


def _whole_parts(spans: Sequence[Span], num_parts: int, join: SpanJoin) -> Iterator[Span]:
    """Yield the spans without states and windows that lack a part or are misplaced.

    So a session does not lose tokens because of them.
    """
    part_keys = [span.block_key for span in spans if not span.num_tokens]
    is_there = dict(zip(part_keys, join.has_parts(part_keys), strict=True))
    seen: set[bytes] = set()  # states and windows
    blocks: set[bytes] = set()
    last_block = b""  # block of the last run, if that is the first run on it
    start = end = index = 0
    while index < len(spans):
        span = spans[index]
        parts = spans[index : index + (1 if span.num_tokens else num_parts)]
        index += 1
        if span.num_tokens:
            start, end = end, end + span.num_tokens
            last_block = b"" if span.block_key in blocks else span.block_key
            blocks.add(span.block_key)
        elif (
            len(parts) < num_parts
            or any(part[1:] != span[1:] or not is_there[part.block_key] for part in parts)
            or not (span.chain == last_block if is_window(span) else start < span.start <= end)
            or span.tokens_digest in seen
        ):
            continue
        else:
            seen.add(span.tokens_digest)
            index += num_parts - 1
        yield from parts
