"""Inspector: describe sessions, blocks, leases, queues and fill for operators.

Pure; changes nothing, packed sessions stay packed. Every call costs O(what it returns).
session_filter.py selects and orders sessions.
"""

from collections.abc import Sequence

from kvd.core.inspection.session_filter import (
    EVERYTHING,
    SessionFilter,
    SessionOrder,
    find_session,
    rank_of,
    selects,
)
from kvd.core.records.entries import BlockRecord, Pin, Span
from kvd.core.records.records import (
    BlockInfo,
    EngineStats,
    LeaseInfo,
    QueueStats,
    SessionDetail,
    SessionInfo,
    StateInfo,
    TierStats,
    WindowInfo,
)
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey


class Inspector:
    """Describes one cache state.

    Attributes:
        history: recent events of each session, stored or not.
        histograms: durations of operations, and times that sessions rested.
        tenants: usage and limits of each tenant that stores something.
        turns: recent turns, oldest first.
    """

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self.history = state.history
        self.histograms = state.histograms
        self.tenants = state.tenants
        self.turns = state.turns

    # ------------------------------------------------------------------------------------ sessions

    def keys(self) -> list[SessionKey]:
        """Return the keys of all sessions; O(sessions). `ranked` then looks at a few at a time."""
        return list(self._state.sessions)

    def ranked(
        self, keys: Sequence[SessionKey], wanted: SessionFilter, order: SessionOrder
    ) -> list[tuple[int, SessionKey]]:
        """Return those of the sessions that match the filter, each with its rank in the order."""
        state = self._state
        sessions = self._stored(keys)
        if wanted != EVERYTHING:  # mostly everything is listed, of very many sessions
            sessions = [session for session in sessions if selects(state, wanted, session)]
        if order is SessionOrder.IDLE:
            return [(session.last_access_ns, session.key) for session in sessions]
        return [(rank_of(state, session, order), session.key) for session in sessions]

    def infos(self, keys: Sequence[SessionKey], wanted: SessionFilter) -> list[SessionInfo]:
        """Summarize those of the sessions that are (still) stored and match, in this order."""
        return [
            self.summarize(session)
            for session in self._stored(keys)
            if selects(self._state, wanted, session)
        ]

    def info(self, key: SessionKey) -> SessionInfo | None:
        """Summarize a session; None if it is not stored."""
        session = self._state.sessions.get(key)
        return self.summarize(session) if session else None

    def describe(self, key: SessionKey) -> SessionDetail:
        """Return everything about one session.

        Raises:
            UnknownSessionError: the session is not stored.
        """
        session = find_session(self._state, key)
        parts = self._blocks(session)
        blocks = tuple(block for block in parts if block.num_tokens)
        if self._state.layout.window:
            return SessionDetail(self.summarize(session), blocks, windows=self._windows(parts))
        return SessionDetail(self.summarize(session), blocks, self._states(parts))

    def summarize(self, session: Session) -> SessionInfo:
        """Summarize a session; O(its blocks)."""
        state = self._state
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
            waste_bytes=self._waste_bytes(session),
            shared_blocks=sum(len(block.users) > 1 for block in blocks),
            pin=session.pin,
            ended=session.ended,
            leases=state.leases.num_of_session(session.key),
            last_access_ns=session.last_access_ns,
            ttl_ns=session.ttl_ns,
            ttl_source=self._ttl_source(session),
            expires_at_ns=state.expires_at_ns(session),
            retain_ns=session.retain_ns,
            retained_until_ns=session.retained_until_ns,
            awaited_tools=session.awaited_tools,
            superseded=session.superseded,
            near_eviction=session.near_eviction,
            lost=session.lost,
        )

    def _stored(self, keys: Sequence[SessionKey]) -> list[Session]:
        found = map(self._state.sessions.get, keys)
        return [session for session in found if session is not None]

    def _waste_bytes(self, session: Session) -> int:
        """Return the unused bytes in blocks that only this session uses."""
        state = self._state
        step = state.layout.block_tokens
        blocks = [state.blocks[key] for key in session.block_keys()]
        num_tokens = sum(len(block.users) == 1 for block in blocks if block.num_tokens) * step
        num_tokens += session.num_packed * step
        if state.stored_parts is not None:  # parts are used whole
            num_tokens -= sum(not span.num_tokens for span in session.tail_spans()) * step
        for span in session.spans:
            num_tokens -= span.num_tokens if len(state.blocks[span.block_key].users) == 1 else 0
        num_tokens -= sum(span.num_tokens for span in session.tail_spans())
        return num_tokens * state.layout.block_bytes // step

    def _ttl_source(self, session: Session) -> str:
        if session.ttl_ns is not None:
            return "session"
        is_tenants = self._state.tenants.limits(session.key.tenant).ttl_ns is not None
        return "tenant" if is_tenants else "default"

    def _blocks(self, session: Session) -> tuple[BlockInfo, ...]:
        """List a session's spans with their blocks."""
        infos = []
        offset = 0
        for span in session.spans:
            infos.append(_block_info(self._state.blocks[span.block_key], span, offset))
            offset += span.num_tokens
        for span, record in zip(session.tail_spans(), session.tail_blocks(), strict=True):
            infos.append(_packed_info(record, span, offset))
            offset += span.num_tokens
        return tuple(infos)

    def _states(self, parts: Sequence[BlockInfo]) -> tuple[StateInfo, ...]:
        """Summarize a session's states, by position: the `start` of each of their parts."""
        states: dict[int, list[BlockInfo]] = {}
        for part in parts:
            if not part.num_tokens:
                states.setdefault(part.start, []).append(part)
        return tuple(
            StateInfo(position, *self._total_of(of_state))
            for position, of_state in sorted(states.items())
        )

    def _windows(self, parts: Sequence[BlockInfo]) -> tuple[WindowInfo, ...]:
        """Summarize a session's windows: their parts follow the span on their block."""
        found: list[tuple[int, int, list[BlockInfo]]] = []  # first token, end, parts
        for part in parts:
            if part.num_tokens:
                run = part
            elif found and found[-1][1] == run.token_offset + run.num_tokens:
                found[-1][2].append(part)
            elif found and found[-1][1] == run.token_offset:
                start, _, joined = found.pop()
                found.append((start, run.token_offset + run.num_tokens, [*joined, part]))
            else:
                found.append((run.token_offset, run.token_offset + run.num_tokens, [part]))
        return tuple(
            WindowInfo(start, end - start, *self._total_of(joined)) for start, end, joined in found
        )

    def _total_of(
        self, parts: Sequence[BlockInfo]
    ) -> tuple[int, tuple[Tier, ...], int, bool, bool]:
        """Return bytes, tiers, number of sessions, dirty and hashed, over several parts."""
        return (
            len(parts) * self._state.layout.block_bytes,
            tuple(tier for tier in Tier if all(tier in part.tiers for part in parts)),
            min(part.num_sessions for part in parts),
            any(part.dirty for part in parts),
            all(part.is_hashed for part in parts),
        )

    # ------------------------------------------------------------------------------- leases, totals

    def leases(self) -> tuple[LeaseInfo, ...]:
        """List all leases, oldest first; O(leases)."""
        infos = (lease.info() for lease in self._state.leases)
        return tuple(sorted(infos, key=lambda info: info.lease_id))

    def queue_stats(self) -> QueueStats:
        """Return the totals of all engines' queues, and the paper's look-ahead windows; O(1)."""
        state = self._state
        placement = state.placement
        return QueueStats(
            waiting_jobs=len(placement.queue),
            running_sessions=placement.queue.num_sessions_running,
            prefetch_window=state.prefetch_window,
            eviction_window=placement.eviction_window(),
            mean_session_bytes=placement.mean_bytes,
        )

    def stats(self) -> EngineStats:
        """Return the fill of the tiers, and the counters; O(1)."""
        state = self._state
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
            surplus_bytes=extents.num_surplus * block_bytes,
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
            num_retained=state.num_retained,
            counters=dict(state.outbox.counters),
        )


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
