"""One session: its spans, in token order, and what operators have set for it. Pure.

An idle session is *packed*: its last blocks, as far as they are on SSD only and no other session
uses them, are bytes instead of Block objects (kvd/core/state/packed_tails.py). `spans` then holds
the spans before them.

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

LOST_SPAN = plain_span(bytes(KEY_BYTES), 1)  # names a block that no session ever has


@dataclass(slots=True, eq=False)
class Session:
    """One conversation's stored KV.

    Attributes:
        spans: spans whose blocks are in the index.
        packed: places of the packed blocks that follow, one span each; b"" if there are none.
        packed_spans: the spans on the packed blocks; b"" if all of them are plain.
        retain_ns: how long its client wants it kept from eviction after each use; None: it is not
            retained. Ends when that time passes (kvd/core/operations/retaining.py).
        lost: why it holds less than was stored: "", "evicted", "corrupt" or "not_fetched". Its
            entry then names one more block, which does not exist, so that this is known after a
            restart.
        num_read_ahead: number of blocks read ahead for it since its last use.
        num_discards: number of discards and grafts since this kvd knows it.
        lineage: lineage of what it holds; None: no caller has named it yet. Not kept across
            restarts.
        awaited_tools: names of the tools that its last answer calls: it returns when they answer.
            Cleared when a turn of it arrives or it is used. Not kept across restarts.
        came_back: it awaited tools and was used, but the queue has not reported its turn yet.
        superseded: another session continues in its place, so it is evicted before others. Cleared
            and lost like `awaited_tools`.
        near_eviction: its coming eviction was announced since its last use. Cleared and lost in the
            same way.
        load_ends: after how many tokens loads have to be able to end, where that takes windows; as
            far as it was reported and still matters. Not kept across restarts.
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
        """Number of stored tokens; O(spans)."""
        num_tokens = sum(span.num_tokens for span in self.spans)
        if self.packed_spans:
            return num_tokens + sum(span.num_tokens for span in self.tail_spans())
        return num_tokens + num_tokens_of_places(self.packed)

    @property
    def num_spans(self) -> int:
        """Number of spans; about the number of blocks."""
        return len(self.spans) + self.num_packed

    @property
    def num_packed(self) -> int:
        """Number of packed blocks."""
        return len(self.packed) // PLACE_BYTES

    def block_keys(self) -> dict[bytes, None]:
        """Return the keys of its blocks that are not packed, each once, in token order."""
        return dict.fromkeys(span.block_key for span in self.spans)

    def index_of(self, block_key: bytes) -> int:
        """Return the index of the first span on a block that it uses and that is not packed."""
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
        """What protects it from eviction while there are others. A hard pin always protects."""
        if self.pin is Pin.SOFT:
            return Guard.PINNED
        return Guard.NONE if self.retain_ns is None else Guard.RETAINED

    @property
    def retained_until_ns(self) -> int | None:
        """When its retention ends unless it is used; None: it is not retained."""
        return None if self.retain_ns is None else self.last_access_ns + self.retain_ns

    def expires_at_ns(self, inherited_ttl_ns: int | None) -> int | None:
        """Return when its TTL passes; None: never. Pinned sessions do not expire.

        Args:
            inherited_ttl_ns: the TTL that holds if the session has none of its own.
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
