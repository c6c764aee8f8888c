"""What bounds a cache engine, and each of its tenants. Pure, frozen; a reload brings others."""

from collections.abc import Callable
from dataclasses import dataclass

from kvd.core.records.records import Admission
from kvd.core.state.turn_log import MAX_TURNS
from shared.types.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What is configured for one tenant."""

    ttl_ns: int | None = None  # None: the default; TTL_NEVER_NS: never
    quota_bytes: int | None = None  # None: no bound
    max_retention_ns: int | None = None  # None: that of all


NO_LIMITS = TenantLimits()


def no_limits(tenant: str) -> TenantLimits:  # noqa: ARG001
    """Limit nobody."""
    return NO_LIMITS


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and policies of one cache engine."""

    num_slots: int  # 0: no arena (yet)
    num_extents: int  # 0: no SSD tier
    default_ttl_ns: int | None = None  # None: never expire
    max_retention_ns: int = 3600 * NS_PER_S  # of what clients wish; 0: no wish counts
    max_sessions: int = 1_000_000
    max_leases: int = 65_536
    max_turns: int = MAX_TURNS  # of the log of recent ones
    admission: Admission = Admission.WRITE_THROUGH
    write_back_delay_ns: int = 30 * NS_PER_S  # how long a session is left alone before its write
    max_write_bytes: int = 256 << 20  # of writes issued and not done
    verify_on_load: bool = False
    layered_read_bytes: int = 32 << 20  # a load that reads more than this goes layer by layer
    tenant_limits: Callable[[str], TenantLimits] = no_limits  # asked once per tenant and change
    packs_sessions: bool = True  # False: idle ones stay as they are, at a price in memory
    watermark: float = 0.0  # share of the slots that is kept free, for stores and loads only
    prefetch_bytes: int = 0  # of reads ahead of loads, issued and not done; 0: none
    reads_returning: bool = True  # also ahead of turns that are only likely
    max_waste: float = 1.0  # share of unused tokens from which on blocks are compacted; 1: never
    compact_min_bytes: int = 0  # of such blocks, below which a session is left as it is
    compact_rest_ns: int = 2 * NS_PER_S  # how long a session is left alone before
    wants_sessions: bool = False  # whether those that turns want and are not stored are asked for
    announces_evictions: bool = False  # whether somebody wants to know who is evicted next
