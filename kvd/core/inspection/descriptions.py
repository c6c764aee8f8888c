"""Looking at the cache: sessions, blocks, fill. Pure; changes nothing, packed sessions stay packed.

Everything is O(what it returns). Which sessions there are, and in which order, is
session_filter.py's.
"""

from kvd.core.records.records import (
    BlockInfo,
    EngineStats,
    QueueStats,
    SessionDetail,
    SessionInfo,
    Tier,
    TierStats,
)
from kvd.core.records.rows import BlockRecord, Pin, Span
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session


def describe_info(state: CacheState, session: Session) -> SessionInfo:
    """Sum up a session."""
    blocks = [state.blocks[key] for key in session.block_keys()]
    block_bytes = state.layout.block_bytes
    num_blocks = len(blocks) + session.num_packed
    num_on_ssd = sum(block.extent is not None for block in blocks) + session.num_packed
    return SessionInfo(
        key=session.key,
        num_tokens=session.num_tokens,
        num_spans=session.num_spans,
        num_blocks=num_blocks,
        total_bytes=num_blocks * block_bytes,
        dram_bytes=sum(block.slot_id is not None for block in blocks) * block_bytes,
        ssd_bytes=num_on_ssd * block_bytes,
        dirty_bytes=sum(block.dirty for block in blocks) * block_bytes,
        waste_bytes=_waste_bytes(state, session),
        shared_blocks=sum(len(block.users) > 1 for block in blocks),
        pin=session.pin,
        ended=session.ended,
        leases=state.leases.num_of_session(session.key),
        last_access_ns=session.last_access_ns,
        ttl_ns=session.ttl_ns,
        ttl_source=_ttl_source(state, session),
        expires_at_ns=state.expires_at_ns(session),
    )


def _waste_bytes(state: CacheState, session: Session) -> int:
    """What rows take up that hold nothing of the session, in blocks that are its own."""
    step = state.layout.block_tokens
    num_rows = sum(1 for key in session.block_keys() if len(state.blocks[key].users) == 1) * step
    num_rows += session.num_packed * step
    for span in session.spans:
        num_rows -= span.num_tokens if len(state.blocks[span.block_key].users) == 1 else 0
    num_rows -= sum(span.num_tokens for span in session.tail_spans())
    return num_rows * state.layout.block_bytes // step


def _ttl_source(state: CacheState, session: Session) -> str:
    if session.ttl_ns is not None:
        return "session"
    is_tenants = state.tenants.limits(session.key.tenant).ttl_ns is not None
    return "tenant" if is_tenants else "default"


def describe_blocks(state: CacheState, session: Session) -> tuple[BlockInfo, ...]:
    """List a session's spans with their blocks."""
    infos = []
    offset = 0
    for span in session.spans:
        infos.append(_block_info(state.blocks[span.block_key], span, offset))
        offset += span.num_tokens
    for span, record in zip(session.tail_spans(), session.tail_blocks(), strict=True):
        infos.append(_packed_info(record, span, offset))
        offset += span.num_tokens
    return tuple(infos)


def _block_info(block: Block, span: Span, offset: int) -> BlockInfo:
    return BlockInfo(
        key=block.key,
        token_offset=offset,
        start=span.start,
        num_tokens=span.num_tokens,
        tiers=tuple(tier for tier in Tier if block.resides(tier)),
        slot_id=block.slot_id,
        extent=block.extent,
        num_sessions=len(block.users),
        dirty=block.dirty,
        is_hashed=bool(block.checksums) or block.extent is not None,
        is_unverified=block.is_unverified,
    )


def _packed_info(record: BlockRecord, span: Span, offset: int) -> BlockInfo:
    return BlockInfo(
        key=record.key,
        token_offset=offset,
        start=span.start,
        num_tokens=span.num_tokens,
        tiers=(Tier.SSD,),
        slot_id=None,
        extent=record.extent,
        num_sessions=1,
        dirty=False,
        is_hashed=True,
    )


def describe(state: CacheState, session: Session) -> SessionDetail:
    """Everything about one session."""
    return SessionDetail(describe_info(state, session), describe_blocks(state, session))


def queue_stats(state: CacheState) -> QueueStats:
    """What the queues say, and the paper's windows; O(1)."""
    placement, block_bytes = state.placement, state.layout.block_bytes
    dram_bytes = max(0, len(state.slots) - state.num_kept_free) * block_bytes
    both_bytes = (len(state.slots) + len(state.extents)) * block_bytes
    return QueueStats(
        waiting_jobs=len(placement.queue),
        running_sessions=placement.num_running,
        prefetch_window=placement.window(dram_bytes),
        eviction_window=placement.window(both_bytes),
        mean_session_bytes=placement.mean_bytes,
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
        num_blocks=state.blocks.num_ssd + state.tails.num_blocks,
        degraded_reason=state.ssd_degraded,
    )
    return EngineStats(
        num_sessions=len(state.sessions),
        tiers=(dram, ssd),
        dirty_bytes=state.blocks.num_dirty * block_bytes,
        num_leases=len(state.leases),
        num_orphan_leases=state.leases.num_orphans,
        num_quarantined_slots=state.leases.num_quarantined_slots,
        num_unverified=state.blocks.num_unverified,
        num_unhashed=state.blocks.num_unhashed,
        num_soft_pins=state.num_pins[Pin.SOFT],
        num_hard_pins=state.num_pins[Pin.HARD],
        counters=dict(state.outbox.counters),
    )
