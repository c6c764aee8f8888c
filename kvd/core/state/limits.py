"""Limits of a cache engine and of each of its tenants. Pure, frozen; a reload replaces them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvd.core.records.tier import Admission
from kvd.core.state.turn_log import MAX_TURNS
from shared.types.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The settings of one tenant."""

    ttl_ns: int | None = None  # None: the default; TTL_NEVER_NS: never expire
    quota_bytes: int | None = None  # None: unlimited
    max_retention_ns: int | None = None  # None: that of the cache engine


NO_LIMITS = TenantLimits()


def no_limits(tenant: str) -> TenantLimits:  # noqa: ARG001
    """Return no limits, for any tenant."""
    return NO_LIMITS


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and policies of one cache engine."""

    num_slots: int  # 0: no arena, or none yet
    num_extents: int  # 0: no SSD tier
    default_ttl_ns: int | None = None  # None: never expire
    max_retention_ns: int = 3600 * NS_PER_S  # longest retention for a client; 0: none is granted
    max_sessions: int = 1_000_000
    max_leases: int = 65_536
    max_turns: int = MAX_TURNS  # kept in the log of recent turns
    admission: Admission = Admission.WRITE_THROUGH
    write_back_delay_ns: int = 30 * NS_PER_S  # from a session's last use to the write of its blocks
    max_write_bytes: int = 256 << 20  # of writes under way
    verify_on_load: bool = False
    layered_read_bytes: int = 32 << 20  # a load that reads more than this reads layer by layer
    tenant_limits: Callable[[str], TenantLimits] = no_limits  # called once per tenant and change
    packs_sessions: bool = True  # False: idle sessions are not packed, and take more memory
    watermark: float = 0.0  # share of the slots that is kept free for stores and loads
    prefetch_bytes: int = 0  # of reads ahead of loads that are under way; 0: no prefetching
    reads_returning: bool = True  # whether to prefetch also for turns that are only forecast
    max_waste: float = 1.0  # share of unused tokens above which blocks are compacted; 1: never
    compact_min_bytes: int = 0  # a session with fewer bytes of such blocks is not compacted
    compact_rest_ns: int = 2 * NS_PER_S  # from a session's last use to its compaction
    wants_sessions: bool = False  # whether to ask for sessions that a turn needs and kvd lacks
    announces_evictions: bool = False  # whether to announce which sessions are evicted next
