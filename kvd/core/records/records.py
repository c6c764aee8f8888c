"""Values that cross the border of the cache engine: what it answers, and what operators see.

Pure, frozen. Token ids are little-endian uint32 bytes; positions and lengths count tokens; times
are `now_ns` of kvd's own clock (D17).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvd.core.records.entries import Pin
from shared.types.granted_slots import (
    GrantedState,
    GrantedWindow,
    LoadSpan,
    Lookup,
    StoreBlock,
)
from shared.types.session_key import SessionKey


class Tier(Enum):
    """Where KV bytes may be."""

    DRAM = "dram"
    SSD = "ssd"


class Admission(Enum):
    """When a stored block is written to SSD."""

    WRITE_THROUGH = "write_through"  # at once
    WRITE_BACK = "write_back"  # when it has been left alone for a while, or room is short
    ON_EVICT = "on_evict"  # when its room in DRAM is wanted


class LeaseState(Enum):
    """What became of a load lease."""

    READY = "ready"
    PENDING = "pending"
    LOST = "lost"  # its engine is gone, or it never was


# ---------------------------------------------------------------------------------- load and store


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """Answer of `loads.prepare` and `loads.settle`.

    Unless it is a MISS the caller owes `loads.complete`. On PENDING the spans may not be
    read before `loads.settle` has returned them.

    Attributes:
        miss_reason: why no more is stored: "unknown_session", "tokens_differ", "not_stored",
            "evicted", "expired", "flushed", "discarded", "corrupt", "not_fetched". Only on MISS
            also "read_error", "deadline" (settled before a read came back), "busy" (no slot to read
            into just now; may be asked again on SpaceFreed), "on_ssd" (stored, but the first block
            is not in DRAM, and only that was asked for). With states also "no_state": it is stored,
            and no state behind it is; with windows "no_window": it is stored, and nowhere in it all
            windows for a load to end. "": all is stored, or `more` is; or it was settled.
    """

    lookup: Lookup
    lease_id: int = 0
    spans: tuple[LoadSpan, ...] = ()
    end_token: int = 0  # the spans cover [from_token, end_token)
    more: bool = False  # more is stored beyond end_token
    miss_reason: str = ""
    state: GrantedState | None = None  # at end_token; None: the layout has none, or see `more`
    windows: tuple[GrantedWindow, ...] = ()  # of the last tokens before end_token; the same


@dataclass(frozen=True, slots=True)
class ExportedRows:
    """Tokens [start, start + num_tokens) of a slot, and their ids."""

    slot_id: int
    start: int
    num_tokens: int
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """Answer of `stores.prepare`; with a lease_id the caller owes `stores.complete`.

    Attributes:
        refused: "" (granted, or all stored already), "gap" (from_token lies beyond what is stored:
            `end_token` says how much that is), "wait" (slots may come free: ask again on
            SpaceFreed), "no_space", "quota" (the tenant has no bytes left that may go).
    """

    lease_id: int = 0
    blocks: tuple[StoreBlock, ...] = ()
    end_token: int = 0  # after completion [0, end_token) is stored
    more: bool = False  # ask again from end_token
    refused: str = ""
    states: tuple[GrantedState, ...] = ()
    windows: tuple[GrantedWindow, ...] = ()


# --------------------------------------------------------------------------------------- operators


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as operators see it. Bytes are whole blocks, but for `waste_bytes`.

    Attributes:
        total_bytes: of all its blocks, shared ones included.
        dirty_bytes: in DRAM, not on SSD.
        waste_bytes: of tokens that blocks of its own have and that hold nothing of it: discarded
            ones, and those that were never filled.
        ttl_ns: set on the session itself; None: it has none of its own.
        ttl_source: whose TTL holds: "session", "tenant", "default".
        expires_at_ns: None: never.
        retain_ns: how long after each use it is retained; None: it is not.
        retained_until_ns: when that is over unless it is used; None: it is not retained.
        awaited_tools: names of tools that its last answer calls.
        superseded: another session goes on in its place.
        near_eviction: that it may be evicted soon was announced since it was used last.
        lost: why its end is not stored any more; "": nothing was lost since it was stored.
    """

    key: SessionKey
    num_tokens: int
    num_spans: int
    num_blocks: int
    total_bytes: int
    dram_bytes: int
    ssd_bytes: int
    dirty_bytes: int
    waste_bytes: int
    shared_blocks: int
    pin: Pin
    ended: bool
    leases: int
    last_access_ns: int
    ttl_ns: int | None
    ttl_source: str
    expires_at_ns: int | None
    retain_ns: int | None = None
    retained_until_ns: int | None = None
    awaited_tools: tuple[str, ...] = ()
    superseded: bool = False
    near_eviction: bool = False
    lost: str = ""


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
    is_hashed: bool = False  # its checksums are known, or it is on SSD, where they are
    is_unverified: bool = False  # adopted from an earlier kvd, and not checked yet


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One state of a session's model.

    Attributes:
        position: behind so many tokens.
        num_bytes: of its blocks.
        tiers: in which all of it is.
        dirty: something of it is in DRAM only.
        is_hashed: as of a block, of all of them.
    """

    position: int
    num_bytes: int
    tiers: tuple[Tier, ...]
    num_sessions: int
    dirty: bool
    is_hashed: bool


@dataclass(frozen=True, slots=True)
class WindowInfo:
    """Windows of blocks that are side by side in a session.

    Attributes:
        token_offset: position of the first of their tokens.
        num_tokens: number of these.
        num_bytes: of the windows' blocks; the others as of a state.
    """

    token_offset: int
    num_tokens: int
    num_bytes: int
    tiers: tuple[Tier, ...]
    num_sessions: int
    dirty: bool
    is_hashed: bool


@dataclass(frozen=True, slots=True)
class SessionDetail:
    """Answer of `describe`: the blocks are those of tokens."""

    info: SessionInfo
    blocks: tuple[BlockInfo, ...]
    states: tuple[StateInfo, ...] = ()
    windows: tuple[WindowInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Answer of `queue_stats`: what the queues of all engines say, and how far is looked into them.

    Attributes:
        prefetch_window: L_pw in requests: sessions of mean size that fit in DRAM; 0: none stored.
        eviction_window: those that fit in both tiers together.
        mean_session_bytes: S_kv.
    """

    waiting_jobs: int
    running_sessions: int
    prefetch_window: int
    eviction_window: int
    mean_session_bytes: int


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
class LeaseInfo:
    """A lease as operators see it.

    Attributes:
        kind: "load" or "store".
        key: None if an earlier kvd granted it.
        is_pending: a load whose blocks are not all there.
        is_orphan: a store whose engine has no connection, but lives: its slots are quarantined.
    """

    lease_id: int
    kind: str
    engine_id: int
    key: SessionKey | None
    num_slots: int
    since_ns: int  # when it was granted, or found
    is_pending: bool = False
    is_orphan: bool = False


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Answer of `tenants`, for each tenant that stores something."""

    tenant: str
    used_bytes: int  # as its quota counts them
    quota_bytes: int | None  # None: no bound
    num_sessions: int


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub has found so far. Bytes are what was compared, as they lie in the tier."""

    dram_blocks: int = 0
    dram_bytes: int = 0
    dram_corrupt: int = 0
    ssd_blocks: int = 0
    ssd_bytes: int = 0
    ssd_corrupt: int = 0
    repaired: int = 0  # SSD copies that are written again
    lost: int = 0  # blocks without a good copy: their sessions are cut
    errors: int = 0  # checks that could not be made


@dataclass(frozen=True, slots=True)
class ScrubStep:
    """Answer of a scrub's `step`."""

    done: bool  # everything is checked, and nothing under way
    issued_bytes: int  # what this step has asked for
    report: ScrubReport


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Answer of `stats`: O(1)."""

    num_sessions: int
    tiers: tuple[TierStats, ...]
    dirty_bytes: int
    num_leases: int
    num_orphan_leases: int
    num_quarantined_slots: int  # held by orphan leases
    num_unverified: int  # adopted blocks that are not verified yet
    num_unhashed: int  # stored blocks that a restart would lose, even in DRAM
    num_soft_pins: int  # sessions
    num_hard_pins: int
    num_retained: int  # sessions
    counters: Mapping[str, int]  # monotonic since start; names in COUNTERS
