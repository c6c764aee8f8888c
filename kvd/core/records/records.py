"""The answers of the cache engine, and the records that operators see.

Pure, frozen. Token ids are little-endian uint32 bytes; positions and lengths count tokens; times
are `now_ns` of kvd's own clock (D17).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvd.core.records.entries import Pin
from kvd.core.records.tier import Tier
from shared.types.granted_slots import (
    GrantedState,
    GrantedWindow,
    LoadSpan,
    Lookup,
    StoreBlock,
)
from shared.types.session_key import SessionKey


class LeaseState(Enum):
    """The state of a load lease."""

    READY = "ready"
    PENDING = "pending"
    LOST = "lost"  # its engine is gone, or there never was such a lease


# ---------------------------------------------------------------------------------- load and store


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """Answer of `loads.prepare` and `loads.settle`.

    Unless it is a MISS, the caller has to call `loads.complete`. On PENDING the spans must not be
    read before `loads.settle` has returned them.

    Attributes:
        miss_reason: why no more is granted; "" if all is stored, if `more` is, or if the answer
            was settled. "unknown_session", "tokens_differ", "not_stored", "evicted", "expired",
            "flushed", "discarded", "corrupt", "not_fetched": no more is stored. Only on MISS:
            "read_error"; "deadline" (settled before a read was complete); "busy" (no slot to read
            into now; may be asked again on SpaceFreed); "on_ssd" (the first block is stored, but
            not in DRAM, and the caller asked for DRAM only). With states: "no_state" (the tokens
            are stored, but no state after them). With windows: "no_window" (the tokens are stored,
            but nowhere all the windows with which a load can end).
    """

    lookup: Lookup
    lease_id: int = 0
    spans: tuple[LoadSpan, ...] = ()
    end_token: int = 0  # the spans cover [from_token, end_token)
    more: bool = False  # whether more is stored beyond end_token
    miss_reason: str = ""
    state: GrantedState | None = None  # at end_token; None: the layout has none, or see `more`
    windows: tuple[GrantedWindow, ...] = ()  # of the last tokens before end_token; as `state`


@dataclass(frozen=True, slots=True)
class ExportedRows:
    """Tokens [start, start + num_tokens) of a slot, and their ids."""

    slot_id: int
    start: int
    num_tokens: int
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """Answer of `stores.prepare`. With a lease_id the caller has to call `stores.complete`.

    Attributes:
        refused: "" (granted, or all is stored already), "gap" (from_token lies beyond what is
            stored, up to `end_token`), "wait" (slots may become free: ask again on SpaceFreed),
            "no_space", "quota" (the tenant's quota is used up, and nothing of it can go).
    """

    lease_id: int = 0
    blocks: tuple[StoreBlock, ...] = ()
    end_token: int = 0  # after completion [0, end_token) is stored
    more: bool = False  # whether to ask again, from end_token
    refused: str = ""
    states: tuple[GrantedState, ...] = ()
    windows: tuple[GrantedWindow, ...] = ()


# --------------------------------------------------------------------------------------- operators


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as operators see it. Bytes are of whole blocks, except for `waste_bytes`.

    Attributes:
        total_bytes: size of all its blocks, shared ones included.
        dirty_bytes: size of its blocks in DRAM that are not on SSD.
        waste_bytes: size of the unused tokens in blocks that only it uses: discarded tokens, and
            those that were never filled.
        ttl_ns: TTL set on the session itself; None: it has none of its own.
        ttl_source: whose TTL holds: "session", "tenant" or "default".
        expires_at_ns: when it expires; None: never.
        retain_ns: how long after each use it is retained; None: it is not.
        retained_until_ns: when its retention ends unless it is used; None: it is not retained.
        awaited_tools: names of the tools that its last answer calls.
        superseded: another session continues in its place.
        near_eviction: its coming eviction was announced since its last use.
        lost: why its end is no longer stored; "": nothing was lost since it was stored.
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
    is_hashed: bool = False  # its checksums are known, or it is on SSD with them
    is_unverified: bool = False  # adopted from an earlier kvd, and not verified yet


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One recurrent state of a session.

    Attributes:
        position: after how many tokens it is.
        num_bytes: size of its blocks.
        tiers: the tiers that hold all of it.
        num_sessions: how many sessions have it.
        dirty: a part of it is in DRAM only.
        is_hashed: all of its blocks are hashed, as in BlockInfo.
    """

    position: int
    num_bytes: int
    tiers: tuple[Tier, ...]
    num_sessions: int
    dirty: bool
    is_hashed: bool


@dataclass(frozen=True, slots=True)
class WindowInfo:
    """The windows of neighbouring blocks of a session.

    Attributes:
        token_offset: position of their first token.
        num_tokens: number of their tokens.
        num_bytes: size of the windows' blocks. The other attributes are as in StateInfo.
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
    """Answer of `describe`. The blocks are those with tokens."""

    info: SessionInfo
    blocks: tuple[BlockInfo, ...]
    states: tuple[StateInfo, ...] = ()
    windows: tuple[WindowInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Answer of `queue_stats`: the queues of all engines, and the look-ahead windows over them.

    Attributes:
        prefetch_window: L_pw in requests: sessions of mean size that fit in DRAM; 0: none stored.
        eviction_window: L_ew: sessions of mean size that fit in both tiers together.
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
    """How full one tier is."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    degraded_reason: str = ""  # "": writes to the tier work
    surplus_bytes: int = 0  # behind its end, after it was made smaller: to be given back


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as operators see it.

    Attributes:
        kind: "load" or "store".
        key: the session; None if an earlier kvd granted the lease.
        is_pending: a load whose blocks are not all in DRAM yet.
        is_orphan: a store whose engine has no connection but lives. Its slots are quarantined.
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
    quota_bytes: int | None  # None: unlimited
    num_sessions: int


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What a scrub has found so far. Bytes are those compared, as they lie in the tier."""

    dram_blocks: int = 0
    dram_bytes: int = 0
    dram_corrupt: int = 0
    ssd_blocks: int = 0
    ssd_bytes: int = 0
    ssd_corrupt: int = 0
    repaired: int = 0  # SSD copies that are written again
    lost: int = 0  # blocks without a good copy: their sessions are cut
    errors: int = 0  # checks that failed to run


@dataclass(frozen=True, slots=True)
class ScrubStep:
    """Answer of a scrub's `step`."""

    done: bool  # whether everything is checked, with no check under way
    issued_bytes: int  # size of the checks that this step has begun
    report: ScrubReport


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Answer of `stats`. It costs O(1)."""

    num_sessions: int
    tiers: tuple[TierStats, ...]
    dirty_bytes: int
    num_leases: int
    num_orphan_leases: int
    num_quarantined_slots: int  # held by orphan leases
    num_unverified: int  # adopted blocks that are not verified yet
    num_unhashed: int  # stored blocks that a restart would lose even from DRAM
    num_soft_pins: int  # sessions
    num_hard_pins: int
    num_retained: int  # sessions
    counters: Mapping[str, int]  # monotonic since the start; names in COUNTERS
