"""Looking at the cache: sessions, blocks, fill. Pure; changes nothing.

Everything is O(what it returns), except `list_sessions`, which looks at every session once.
"""

from heapq import nsmallest

from kvd.core.errors import InvalidRequestError
from kvd.core.records import (
    BlockInfo,
    EngineStats,
    SessionDetail,
    SessionInfo,
    SessionPage,
    Tier,
    TierStats,
)
from kvd.core.session import Session
from kvd.core.state import CacheState
from shared.session_key import SessionKey


def describe_info(state: CacheState, session: Session) -> SessionInfo:
    """Sum up a session."""
    blocks = [state.blocks[key] for key in session.block_keys()]
    block_bytes = state.layout.block_bytes
    return SessionInfo(
        key=session.key,
        num_tokens=session.num_tokens,
        num_blocks=len(blocks),
        total_bytes=len(blocks) * block_bytes,
        dram_bytes=sum(block.slot_id is not None for block in blocks) * block_bytes,
        ssd_bytes=sum(block.extent is not None for block in blocks) * block_bytes,
        dirty_bytes=sum(block.dirty for block in blocks) * block_bytes,
        shared_blocks=sum(len(block.users) > 1 for block in blocks),
        pinned=session.pinned,
        ended=session.ended,
        leases=state.leases.num_of_session(session.key),
        last_access_ns=session.last_access_ns,
        ttl_ns=session.ttl_ns,
        expires_at_ns=session.expires_at_ns(state.limits.default_ttl_ns),
    )


def describe_blocks(state: CacheState, session: Session) -> tuple[BlockInfo, ...]:
    """List a session's spans with their blocks."""
    infos = []
    offset = 0
    for span in session.spans:
        block = state.blocks[span.block_key]
        infos.append(
            BlockInfo(
                key=block.key,
                token_offset=offset,
                start=span.start,
                num_tokens=span.num_tokens,
                tiers=tuple(tier for tier in Tier if block.resides(tier)),
                slot_id=block.slot_id,
                extent=block.extent,
                num_sessions=len(block.users),
                dirty=block.dirty,
            )
        )
        offset += span.num_tokens
    return tuple(infos)


def describe(state: CacheState, session: Session) -> SessionDetail:
    """Everything about one session."""
    return SessionDetail(describe_info(state, session), describe_blocks(state, session))


def list_sessions(state: CacheState, tenant: str, after: str, limit: int) -> SessionPage:
    """One page, least recently used first; a session used between two pages appears again."""
    of_tenant = [s for s in state.sessions.values() if tenant in ("", s.key.tenant)]
    following = of_tenant
    if after:
        last = _parse_page_token(after)
        following = [s for s in of_tenant if _rank(s) > last]
    page = nsmallest(max(1, limit), following, key=_rank)
    is_last = len(page) == len(following)
    return SessionPage(
        sessions=tuple(describe_info(state, session) for session in page),
        next_page="" if is_last else _page_token(page[-1]),
        total=len(of_tenant),
    )


def stats(state: CacheState) -> EngineStats:
    """Fill and counters; O(1)."""
    block_bytes = state.layout.block_bytes
    slots, extents = state.slots, state.extents
    dram = TierStats(
        tier=Tier.DRAM,
        capacity_bytes=len(slots) * block_bytes,
        used_bytes=(len(slots) - slots.num_free) * block_bytes,
        num_blocks=state.blocks.num_dram,
    )
    ssd = TierStats(
        tier=Tier.SSD,
        capacity_bytes=len(extents) * block_bytes,
        used_bytes=extents.num_used * block_bytes,
        num_blocks=state.blocks.num_ssd,
        degraded_reason=state.ssd_degraded,
    )
    return EngineStats(
        num_sessions=len(state.sessions),
        tiers=(dram, ssd),
        dirty_bytes=state.blocks.num_dirty * block_bytes,
        num_leases=len(state.leases),
        counters=dict(state.outbox.counters),
    )


def _rank(session: Session) -> tuple[int, SessionKey]:
    return session.last_access_ns, session.key


def _page_token(session: Session) -> str:
    return "/".join((str(session.last_access_ns), *session.key))


def _parse_page_token(token: str) -> tuple[int, SessionKey]:
    parts = token.split("/")
    if (
        len(parts) != 1 + len(SessionKey._fields)
        or not parts[0].isascii()
        or not parts[0].isdigit()
    ):
        raise InvalidRequestError(
            f"page token {token[:40]!r} is not one of ours", "start from the first page"
        )
    return int(parts[0]), SessionKey(*parts[1:])
