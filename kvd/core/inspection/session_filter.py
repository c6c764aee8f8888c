"""Filters and orders of sessions, for listings and flushes. Pure."""

from dataclasses import dataclass, replace
from enum import Enum

from kvd.core.records.entries import Pin
from kvd.core.records.errors import UnknownSessionError
from kvd.core.records.tier import Tier
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey

_NEVER_NS = 2**62  # expires after everything that expires at all


class SessionOrder(Enum):
    """Orders of listings; a value is its name in page tokens and on command lines."""

    IDLE = "idle"  # least recently used first
    BYTES = "bytes"  # largest first
    TOKENS = "tokens"  # most tokens first
    TTL = "ttl"  # next to expire first


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """Conditions that a session must all meet; a field's default is no condition.

    Attributes:
        tenants: its tenant is one of these; None: any tenant.
        tier: at least one of its blocks is in this tier.
        idle_ns: it has not been used for at least so long.
        larger_than_bytes: its blocks, shared ones included, take more than this.
        pinned: it is pinned, softly or hard.
        ended: its engine has reported that it will not return.
        id_prefix: its id starts with this.
    """

    tenants: frozenset[str] | None = None
    tier: Tier | None = None
    idle_ns: int = 0
    larger_than_bytes: int = 0
    pinned: bool = False
    ended: bool = False
    id_prefix: str = ""

    def within(self, tenants: frozenset[str] | None) -> "SessionFilter":
        """Return the filter narrowed to the tenants that a caller may see; None: all."""
        if tenants is None:
            return self
        wanted = tenants if self.tenants is None else self.tenants & tenants
        return replace(self, tenants=wanted)


EVERYTHING = SessionFilter()


def find_session(state: CacheState, key: SessionKey) -> Session:
    """Return the session that an operator names.

    Raises:
        UnknownSessionError: it is not stored.
    """
    session = state.sessions.get(key)
    if session is None:
        raise UnknownSessionError(
            f"session {key} is not stored", "list the stored sessions with: kvd ls"
        )
    return session


def selects(state: CacheState, wanted: SessionFilter, session: Session) -> bool:
    """Whether a session meets every condition of a filter; at most O(its blocks)."""
    is_meant = wanted.tenants is None or session.key.tenant in wanted.tenants
    if not session.key.session_id.startswith(wanted.id_prefix):
        return False
    if not is_meant or state.now_ns - session.last_access_ns < wanted.idle_ns:
        return False
    if wanted.pinned and session.pin is Pin.NONE:
        return False
    if wanted.ended and not session.ended:
        return False
    if wanted.larger_than_bytes and num_bytes(state, session) <= wanted.larger_than_bytes:
        return False
    return wanted.tier is None or _is_in(state, session, wanted.tier)


def num_bytes(state: CacheState, session: Session) -> int:
    """Return the bytes of a session's blocks, shared ones included."""
    num_blocks = len(session.block_keys()) + session.num_packed
    return num_blocks * state.layout.block_bytes


def rank_of(state: CacheState, session: Session, order: SessionOrder) -> int:
    """Return a session's rank in an order; lower ranks come first."""
    match order:
        case SessionOrder.IDLE:
            return session.last_access_ns
        case SessionOrder.BYTES:
            return -num_bytes(state, session)
        case SessionOrder.TOKENS:
            return -session.num_tokens
        case SessionOrder.TTL:
            expires_at_ns = state.expires_at_ns(session)
            return _NEVER_NS if expires_at_ns is None else expires_at_ns


def _is_in(state: CacheState, session: Session, tier: Tier) -> bool:
    if tier is Tier.SSD and session.packed:
        return True
    return any(state.blocks[key].resides(tier) for key in session.block_keys())
