"""Recovery: from the rows of the index to the state they describe.

Pure. Reads no data: blocks are verified when they are used (D11). Rows that cannot be are removed,
not trusted: blocks outside the tier, two blocks on one place, sessions beyond the prefix whose
blocks exist. Blocks that adoption has found in DRAM are there already (kvd/core/adopting.py).

Sessions begin folded, as far as they may be: 200 000 sessions of 8 blocks take about 2 s, and about
1.1 KB each.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvd.core.actions import RESTORED
from kvd.core.block_rows import BlockRows
from kvd.core.block_users import NOWHERE
from kvd.core.packing import PLACE_BYTES, plain_span
from kvd.core.records import IndexRows, Pin, SessionRecord, Span, Tier
from kvd.core.row_join import Ints, count_users, head_lengths, join_spans, pack_all_places
from kvd.core.session import Session
from kvd.core.session_rows import SessionRows
from kvd.core.state import CacheState


def restore(state: CacheState, rows: IndexRows) -> None:
    """See CacheEngine.restore; adopted blocks are in the index of blocks, and nothing else is."""
    assert not state.sessions, "a cache is restored before it is used"
    sessions = SessionRows()
    sessions.collect(rows.sessions)
    blocks = BlockRows(state, rows)
    restoration = _Restoration(state, sessions, blocks)
    restoration.run()
    restoration.finish()
    num_dropped = blocks.drop_unused()
    fields = {
        "num_sessions": len(state.sessions),
        "num_blocks": len(state.blocks) + state.tails.num_blocks,
        "num_dropped_blocks": num_dropped,
    }
    state.outbox.emit(RESTORED, None, fields)


@dataclass(slots=True)
class _Restoration:
    """Makes the sessions."""

    state: CacheState
    sessions: SessionRows
    blocks: BlockRows

    def run(self) -> None:
        """Restore all sessions, coldest first."""
        state, sessions = self.state, self.sessions
        order = sessions.in_order()
        num_over = max(0, len(order) - state.limits.max_sessions)
        spans = join_spans(
            self.blocks.columns, self.blocks.is_sound, sessions.spans, sessions.num_spans
        )
        spans.lengths[order[:num_over]] = 0
        num_users = count_users(spans, len(self.blocks.is_sound))
        self.blocks.use(num_users)
        is_foldable = (num_users == 1) & ~self.blocks.is_object
        heads = head_lengths(spans, is_foldable & state.limits.folds_sessions)
        places = pack_all_places(spans, self.blocks.extents)
        starts, lengths, lengths_of_heads = map(_ints, (spans.starts, spans.lengths, heads))
        for index in _ints(order):
            start, length = starts[index], lengths[index]
            key, num_stored = sessions.keys[index], sessions.num_spans[index]
            if not length:
                state.outbox.index.session_gone(key, is_indexed=True)
                continue
            if length < num_stored or index in sessions.damaged:
                state.outbox.index.session_changed(key)
            full = sessions.full.get(index)
            head = lengths_of_heads[index] if full is None else length
            session = Session(key, min(sessions.last_access_ns[index], state.now_ns))
            session.is_indexed = True
            session.folded = places[(start + head) * PLACE_BYTES : (start + length) * PLACE_BYTES]
            if length < num_stored:
                session.lost = "evicted"
            if head:
                self._use_blocks(session, spans.rows[start : start + head].tolist(), full)
            self._add(session, sessions.settings.get(index))

    def finish(self) -> None:
        """Count what there is, have it expire in time, and fold what could not be before."""
        state = self.state
        num_folded: Counter[str] = Counter()
        num_spans = 0
        deadlines = []
        for key, session in state.sessions.items():
            num_folded[key.tenant] += len(session.folded) // PLACE_BYTES
            num_spans += session.num_spans
            deadline_ns = state.expires_at_ns(session)
            if deadline_ns is not None:
                deadlines.append((deadline_ns, key))
        state.ttl.restore(deadlines)
        if num_spans:  # about one block each
            state.placement.sized(num_spans * state.layout.block_bytes // len(state.sessions))
        for tenant, num_blocks in num_folded.items():
            state.tenants.charge(tenant, num_blocks)
        for tenant, num_sessions in Counter(key.tenant for key in state.sessions).items():
            state.tenants.count_session(tenant, num_sessions)
        if state.limits.folds_sessions:
            for index in self.sessions.full:
                key = self.sessions.keys[index]
                if key in state.sessions:
                    state.tails.fold(state.sessions[key])

    def _use_blocks(self, session: Session, rows: list[int], full: list[Span] | None) -> None:
        """Give a session the spans whose blocks are not folded."""
        blocks = [self.blocks.block(row) for row in rows]
        if full is None:
            session.spans = [plain_span(block.key, block.num_tokens) for block in blocks]
        else:
            session.spans = full[: len(rows)]
        tenant = session.key.tenant
        for block in blocks:
            if not block.tenant:
                block.tenant = tenant
                self.state.tenants.charge(tenant, 1)
        self.state.users.add(session, blocks)

    def _add(self, session: Session, settings: SessionRecord | None) -> None:
        """Register a session, and give it its place in the orders."""
        state, key = self.state, session.key
        state.sessions[key] = session
        if session.folded:
            state.tails.restored(session)
        if settings is None:
            state.users.entered(session, Tier.SSD)
            state.tenants.entered(key)
        else:
            self._set(session, settings)

    def _set(self, session: Session, settings: SessionRecord) -> None:
        """Give a session its settings, and the place in the orders that these ask for."""
        state, key = self.state, session.key
        session.ttl_ns, session.pin, session.ended = settings.ttl_ns, settings.pin, settings.ended
        state.count_pin(session, 1)
        if session.pin is Pin.HARD:
            state.users.recount(session, NOWHERE)
            return
        if session.pin is Pin.SOFT:
            state.policy.guarded(key, is_guarded=True)
            state.tenants.guarded(key, is_guarded=True)
        state.users.entered(session, Tier.SSD)
        state.tenants.entered(key)
        if session.ended:
            state.policy.ended(key)
            state.tenants.ended(key)


def _ints(column: Ints) -> Sequence[int]:
    """Read a column number by number, without a list of number objects."""
    return array("q", column.astype("<i8").tobytes())
