"""A session: its spans, in token order, and what operators set on it. Pure.

An idle session is *packed*: its last blocks, those that only it uses and that are on SSD only, are
no Block objects but bytes (kvd/core/state/packed_tails.py). `spans` are then those before them.

Invariant: spans are contiguous from the session's first kept token; only a prefix ever remains.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.core.eviction.session_order import Guard
from kvd.core.records.entries import (
    PLACE_BYTES,
    TTL_NEVER_NS,
    BlockRecord,
    Pin,
    SessionRecord,
    Span,
    num_tokens_of_places,
    pack_spans,
    plain_span,
    unpack_full,
    unpack_places,
)
from shared.types.block_key import KEY_BYTES
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

LOST_SPAN = plain_span(bytes(KEY_BYTES), 1)  # on a block that no session ever has


@dataclass(slots=True, eq=False)
class Session:
    """One conversation's stored KV.

    Attributes:
        spans: those whose blocks are in the index.
        packed: the places of the packed blocks that follow, one span each; b"" if there are none.
        packed_spans: the spans on them, unless they are all plain.
        retain_ns: how long after each use it is kept from eviction as its client asked; None: it
            is not. Over when that passes (kvd/core/operations/retaining.py).
        lost: why it holds less than was stored: "", "evicted", "corrupt", "not_fetched". Its entry
            names a block more then, which does not exist: it is known of it after a restart, too.
        num_read_ahead: blocks read ahead for it since it was last used.
        num_discards: since this kvd knows it, and grafts.
        lineage: of what it holds; None: no caller has named it yet. Not kept across restarts.
        awaited_tools: names of tools that its last answer calls: it is back when they answer.
            Over when a turn of it arrives, or it is used; not kept across restarts.
        came_back: it awaited tools and was used; the queue has not said yet that its turn arrived.
        superseded: another session goes on in its place, so it goes before others. The same.
        near_eviction: that it may be evicted soon was announced since it was used last. The same.
        load_ends: behind how many tokens loads are to be able to end, where that takes windows; as
            far as it is said and still matters. Not kept across restarts.
        is_indexed: an entry of it was sent to the index, or came from there.
    """

    key: SessionKey
    last_access_ns: int
    spans: Sequence[Span] = ()
    packed: bytes = b""
    packed_spans: bytes = b""
    ttl_ns: int | None = None
    retain_ns: int | None = None
    pin: Pin = Pin.NONE
    ended: bool = False
    lost: str = ""
    num_read_ahead: int = 0
    num_discards: int = 0
    lineage: Lineage | None = None
    awaited_tools: tuple[str, ...] = ()
    came_back: bool = False
    superseded: bool = False
    near_eviction: bool = False
    load_ends: tuple[int, ...] = ()
    is_indexed: bool = False

    @property
    def num_tokens(self) -> int:
        """Stored tokens; costs O(spans)."""
        num_tokens = sum(span.num_tokens for span in self.spans)
        if self.packed_spans:
            return num_tokens + sum(span.num_tokens for span in self.tail_spans())
        return num_tokens + num_tokens_of_places(self.packed)

    @property
    def num_spans(self) -> int:
        """How many spans it has; about as many blocks."""
        return len(self.spans) + self.num_packed

    @property
    def num_packed(self) -> int:
        """How many blocks are packed."""
        return len(self.packed) // PLACE_BYTES

    def block_keys(self) -> dict[bytes, None]:
        """Keys of its blocks that are not packed, each once, in token order."""
        return dict.fromkeys(span.block_key for span in self.spans)

    def index_of(self, block_key: bytes) -> int:
        """Index of the first span on a block that it uses, which is not packed."""
        return next(i for i, span in enumerate(self.spans) if span.block_key == block_key)

    def tail_blocks(self) -> Iterator[BlockRecord]:
        """Return its packed blocks, in token order."""
        return unpack_places(self.packed)

    def tail_spans(self) -> Iterator[Span]:
        """Return the spans on its packed blocks; the first one costs O(1)."""
        if self.packed_spans:
            return unpack_full(self.packed_spans)
        return (plain_span(block.key, block.num_tokens) for block in self.tail_blocks())

    @property
    def guard(self) -> Guard:
        """What keeps it from eviction while there are others; a hard pin does in any case."""
        if self.pin is Pin.SOFT:
            return Guard.PINNED
        return Guard.NONE if self.retain_ns is None else Guard.RETAINED

    @property
    def retained_until_ns(self) -> int | None:
        """When its retention ends unless it is used; None: it has none."""
        return None if self.retain_ns is None else self.last_access_ns + self.retain_ns

    def expires_at_ns(self, inherited_ttl_ns: int | None) -> int | None:
        """Return when its TTL passes; None for never. Pinned sessions do not expire.

        Args:
            inherited_ttl_ns: what holds if it has none of its own.
        """
        ttl_ns = inherited_ttl_ns if self.ttl_ns is None else self.ttl_ns
        if self.pin is not Pin.NONE or ttl_ns is None or ttl_ns == TTL_NEVER_NS:
            return None
        return self.last_access_ns + ttl_ns

    def record(self) -> SessionRecord:
        """Return the session's entry for the index."""
        more = (LOST_SPAN,) if self.lost else ()
        return SessionRecord(
            key=self.key,
            spans=pack_spans([*self.spans, *self.tail_spans(), *more]),
            last_access_ns=self.last_access_ns,
            ttl_ns=self.ttl_ns,
            retain_ns=self.retain_ns,
            pin=self.pin,
            ended=self.ended,
        )
