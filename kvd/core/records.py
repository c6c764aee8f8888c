"""Values that cross the border of the cache engine: what is persisted, what is answered.

Pure, frozen. Token ids are little-endian uint32 bytes; positions and lengths count tokens; times
are `now_ns` of kvd's own clock (D17).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shared.session_key import SessionKey

TTL_NEVER_NS = -1  # a session's own TTL: never expire; None is the default TTL


class Tier(Enum):
    """Where KV bytes may be."""

    DRAM = "dram"
    SSD = "ssd"


class Lookup(Enum):
    """Answer of a load; never an exception."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class LeaseState(Enum):
    """What became of a load lease."""

    READY = "ready"
    PENDING = "pending"
    LOST = "lost"  # its owner is gone, or it never was


# --------------------------------------------------------------------------------------- persisted


@dataclass(frozen=True, slots=True)
class Span:
    """A run of rows of one block that a session uses; its position is the sum of those before.

    Attributes:
        block_key: content key of the block.
        start: first row.
        num_tokens: number of rows.
        tokens_digest: digest of the token ids of these rows; proves that a request asks for the
            same tokens.
        chain: parent key of whatever is computed after this span. It is `block_key` unless a
            discard has happened at or before it (D5).
    """

    block_key: bytes
    start: int
    num_tokens: int
    tokens_digest: bytes
    chain: bytes


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's row."""

    key: SessionKey
    spans: tuple[Span, ...]
    last_access_ns: int
    ttl_ns: int | None = None  # None: the default; TTL_NEVER_NS: never
    pinned: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block's row: where it lies on SSD and how to verify it."""

    key: bytes
    token_ids: bytes
    num_tokens: int
    extent: int
    checksums: tuple[int, ...]  # xxh3_64 of each layer slice


# ---------------------------------------------------------------------------------- load and store


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """Rows [start, start + num_tokens) of a slot are tokens [token_offset, …) of the request."""

    slot_id: int
    start: int
    num_tokens: int
    token_offset: int
    tier: Tier  # where the block was found
    generation: int


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """Answer of `prepare_load` and `settle_load`.

    Unless it is a MISS the caller owes `complete_load(lease_id)`. On PENDING the spans may not be
    read before `settle_load` has returned them.

    Attributes:
        miss_reason: "" unless MISS; then one of "unknown_session", "tokens_differ", "not_stored",
            "evicted", "corrupt", "read_error", "deadline" (settled before a read came back), "busy"
            (no slot to read into just now; may be asked
            again on SpaceFreed).
    """

    lookup: Lookup
    lease_id: int = 0
    spans: tuple[LoadSpan, ...] = ()
    end_token: int = 0  # the spans cover [from_token, end_token)
    more: bool = False  # more is stored beyond end_token
    miss_reason: str = ""


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """The caller writes tokens [token_offset, …) to rows [0, num_tokens) of the slot."""

    slot_id: int
    token_offset: int
    num_tokens: int
    generation: int


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """Answer of `prepare_store`; with a lease_id the caller owes `complete_store(lease_id)`.

    Attributes:
        refused: "" (granted, or all stored already), "gap" (from_token lies beyond what is stored:
            `end_token` says how much that is), "wait" (slots may come free: ask again on
            SpaceFreed), "no_space".
    """

    lease_id: int = 0
    blocks: tuple[StoreBlock, ...] = ()
    end_token: int = 0  # after completion [0, end_token) is stored
    more: bool = False  # ask again from end_token
    refused: str = ""


# --------------------------------------------------------------------------------------- operators


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """One job of a scheduler's waiting queue, in queue order."""

    key: SessionKey
    history_tokens: int = 0
    starts_in_ns: int = 0  # from the moment of sending


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as operators see it. Bytes are whole blocks."""

    key: SessionKey
    num_tokens: int
    num_blocks: int
    total_bytes: int  # of all its blocks, shared ones included
    dram_bytes: int
    ssd_bytes: int
    dirty_bytes: int  # in DRAM, not on SSD
    shared_blocks: int
    pinned: bool
    ended: bool
    leases: int
    last_access_ns: int
    ttl_ns: int | None  # as set on the session
    expires_at_ns: int | None  # None: never


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One span of a session, with its block."""

    key: bytes
    token_offset: int
    start: int
    num_tokens: int
    tiers: tuple[Tier, ...]
    slot_id: int | None
    extent: int | None
    num_sessions: int
    dirty: bool


@dataclass(frozen=True, slots=True)
class SessionDetail:
    """Answer of `describe`."""

    info: SessionInfo
    blocks: tuple[BlockInfo, ...]


@dataclass(frozen=True, slots=True)
class SessionPage:
    """Answer of `sessions`: least recently used first."""

    sessions: tuple[SessionInfo, ...]
    next_page: str  # "" on the last page; otherwise the next call's `after`
    total: int  # sessions of the tenant asked for


@dataclass(frozen=True, slots=True)
class FlushAnswer:
    """What a flush freed, or would free."""

    num_sessions: int
    freed_bytes: int  # in DRAM and on SSD together
    skipped_leased: tuple[SessionKey, ...]


@dataclass(frozen=True, slots=True)
class TierStats:
    """Fill of one tier."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    degraded_reason: str = ""  # "": writes to it work


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Answer of `stats`: O(1)."""

    num_sessions: int
    tiers: tuple[TierStats, ...]
    dirty_bytes: int
    num_leases: int
    counters: Mapping[str, int]  # monotonic since start; names in COUNTERS
