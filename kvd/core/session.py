"""A session: its spans, in token order, and what operators set on it. Pure.

Invariant: spans are contiguous from the session's first kept token; only a prefix ever remains.
"""

from dataclasses import dataclass, field

from kvd.core.records import TTL_NEVER_NS, SessionRecord, Span
from shared.session_key import SessionKey


@dataclass(slots=True)
class Session:
    """One conversation's stored KV.

    Attributes:
        lost: why it holds less than was stored: "", "evicted", "corrupt".
    """

    key: SessionKey
    last_access_ns: int
    spans: list[Span] = field(default_factory=list)
    ttl_ns: int | None = None
    pinned: bool = False
    ended: bool = False
    lost: str = ""

    @property
    def num_tokens(self) -> int:
        """Stored tokens; costs O(spans)."""
        return sum(span.num_tokens for span in self.spans)

    def block_keys(self) -> dict[bytes, None]:
        """Keys of its blocks, each once, in token order."""
        return dict.fromkeys(span.block_key for span in self.spans)

    def index_of(self, block_key: bytes) -> int:
        """Index of the first span on the block; the number of spans if there is none."""
        for index, span in enumerate(self.spans):
            if span.block_key == block_key:
                return index
        return len(self.spans)

    def expires_at_ns(self, default_ttl_ns: int | None) -> int | None:
        """When its TTL passes; None for never. Pinned sessions do not expire."""
        ttl_ns = default_ttl_ns if self.ttl_ns is None else self.ttl_ns
        if self.pinned or ttl_ns is None or ttl_ns == TTL_NEVER_NS:
            return None
        return self.last_access_ns + ttl_ns

    def record(self) -> SessionRecord:
        """Its row."""
        return SessionRecord(
            key=self.key,
            spans=tuple(self.spans),
            last_access_ns=self.last_access_ns,
            ttl_ns=self.ttl_ns,
            pinned=self.pinned,
            ended=self.ended,
        )
