"""Recovery: from the rows of the index to the state they describe.

Pure. Reads no data: blocks are verified when they are used (D11). Rows that cannot be are removed,
not trusted: blocks outside the tier, two blocks on one place, sessions beyond the prefix whose
blocks exist. Blocks that adoption has found in DRAM are there already (kvd/core/adopting.py).

Sessions begin folded, as far as they may be, and rest until they are used. What is needed of a
million of them at once is columns; `kvd bench --only control` shows what they take.
"""

from collections import Counter

import numpy as np

from kvd.core.actions import RESTORED
from kvd.core.block_rows import BlockRows
from kvd.core.block_users import NOWHERE
from kvd.core.packing import PLACE_BYTES, plain_span
from kvd.core.records import IndexRows, Pin, SessionRecord
from kvd.core.row_join import (
    Ints,
    SpanColumns,
    count_users,
    gathered,
    head_lengths,
    pack_places_of,
)
from kvd.core.session import Session
from kvd.core.session_rows import SessionRows
from kvd.core.state import CacheState
from shared.session_key import SessionKey

MADE_AT_ONCE = 1 << 14  # sessions whose places are packed together


def restore(state: CacheState, rows: IndexRows) -> None:
    """See CacheEngine.restore; adopted blocks are in the index of blocks, and nothing else is."""
    assert not state.sessions, "a cache is restored before it is used"
    sessions = SessionRows()
    with_blocks, num_spans, num_dropped = _make_all(state, sessions, rows)
    rows.forget_blocks()  # what follows takes as much memory again
    _rank_all(state, sessions, with_blocks)
    _schedule(state)
    _count(state, num_spans)
    if state.limits.folds_sessions:
        for key in (sessions.keys[index] for index in sessions.full):
            if key in state.sessions:
                state.tails.fold(state.sessions[key])
    fields = {
        "num_sessions": len(state.sessions),
        "num_blocks": len(state.blocks) + state.tails.num_blocks,
        "num_dropped_blocks": num_dropped,
    }
    state.outbox.emit(RESTORED, None, fields)


def _make_all(
    state: CacheState, sessions: SessionRows, rows: IndexRows
) -> tuple[list[Session], int, int]:
    """Make all sessions; returns those that are not wholly folded, and counts spans and drops."""
    blocks = BlockRows(state, rows)
    join = blocks.join()
    sessions.collect(rows.sessions, join)
    restoration = _Restoration(state, sessions, blocks, join.finish())
    del join
    num_spans = restoration.run()
    return restoration.with_blocks, num_spans, blocks.drop_unused()


class _Restoration:
    """Makes the sessions of rows.

    Attributes:
        with_blocks: those that have blocks in the index of blocks.
    """

    def __init__(
        self, state: CacheState, sessions: SessionRows, blocks: BlockRows, spans: SpanColumns
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._blocks = blocks
        self._spans = spans
        self.with_blocks: list[Session] = []

    def run(self) -> int:
        """Make all sessions, coldest first; returns how many spans they have."""
        state, sessions, blocks, spans = self._state, self._sessions, self._blocks, self._spans
        order = sessions.in_order()
        num_over = max(0, len(order) - state.limits.max_sessions)
        spans.lengths[order[:num_over]] = 0
        num_users = count_users(spans, len(blocks.is_sound))
        blocks.use(num_users)
        is_foldable = (num_users == 1) & ~blocks.is_object
        heads = head_lengths(spans, is_foldable & state.limits.folds_sessions)
        del num_users, is_foldable
        heads[list(sessions.full)] = spans.lengths[list(sessions.full)]
        for first in range(0, len(order), MADE_AT_ONCE):
            self._make(order[first : first + MADE_AT_ONCE], heads)
        return int(spans.lengths.sum())

    def _make(self, some: Ints, heads: Ints) -> None:
        """Make the sessions of some rows, in their order."""
        spans, rows, blocks = self._spans, self._sessions, self._blocks
        lengths, num_stored = spans.lengths[some], np.diff(spans.starts)[some]
        num_folded = lengths - heads[some]
        folded = gathered(spans.starts[some] + heads[some], num_folded)
        places = pack_places_of(blocks.keys, blocks.num_tokens, blocks.extents, spans.rows[folded])
        ends = (np.cumsum(num_folded) * PLACE_BYTES).tolist()
        start = 0
        columns = (some.tolist(), ends, lengths.tolist(), num_stored.tolist(), heads[some].tolist())
        for index, end, length, stored, head in zip(*columns, strict=True):
            key = rows.keys[index]
            if length:
                self._add(index, key, places[start:end], head)
                if length < stored:
                    self._state.sessions[key].lost = "evicted"
                if length < stored or index in rows.damaged:
                    self._state.outbox.index.session_changed(key)
            else:
                self._state.outbox.index.session_gone(key, is_indexed=True)
            start = end

    def _add(self, index: int, key: SessionKey, folded: bytes, head: int) -> None:
        """Make a session of a row: its first `head` blocks are no folded ones."""
        state, rows = self._state, self._sessions
        session = Session(key, min(rows.last_access_ns[index], state.now_ns), folded=folded)
        session.is_indexed = True
        state.sessions[key] = session
        if folded:
            state.tails.restored(session)
        if head:
            self._use_blocks(session, index, head)
        if index in rows.settings:
            self._set(session, rows.settings[index])

    def _use_blocks(self, session: Session, index: int, head: int) -> None:
        """Give a session the spans whose blocks are not folded."""
        start = int(self._spans.starts[index])
        rows = self._spans.rows[start : start + head].tolist()
        blocks = [self._blocks.block(row) for row in rows]
        full = self._sessions.full.get(index)
        if full is None:
            session.spans = [plain_span(block.key, block.num_tokens) for block in blocks]
        else:
            session.spans = full[:head]
        tenant = session.key.tenant
        for block in blocks:
            if not block.tenant:
                block.tenant = tenant
                self._state.tenants.charge(tenant, 1)
        self._state.users.add(session, blocks)
        self.with_blocks.append(session)

    def _set(self, session: Session, settings: SessionRecord) -> None:
        """Give a session its settings."""
        session.ttl_ns, session.pin, session.ended = settings.ttl_ns, settings.pin, settings.ended
        self._state.count_pin(session, 1)


def _rank_all(state: CacheState, sessions: SessionRows, with_blocks: list[Session]) -> None:
    """Give sessions their places in the orders."""
    ranked = [key for key, session in state.sessions.items() if session.pin is not Pin.HARD]
    state.policy.restored(ranked)
    for session in with_blocks:
        state.users.recount(session, NOWHERE)
    tenants = {key.tenant for key in state.sessions}
    with_quota = {name for name in tenants if state.tenants.order_of(name) is not None}
    for key in ranked if with_quota else ():
        state.tenants.entered(key)
    for index, settings in sessions.settings.items():
        if sessions.keys[index] in state.sessions:
            _rank(state, settings)


def _rank(state: CacheState, settings: SessionRecord) -> None:
    """Give a session the place in the orders that its settings ask for."""
    key = settings.key
    if settings.pin is Pin.HARD:
        return
    if settings.pin is Pin.SOFT:
        state.policy.guarded(key, is_guarded=True)
        state.tenants.guarded(key, is_guarded=True)
    if settings.ended:
        state.policy.ended(key)
        state.tenants.ended(key)


def _schedule(state: CacheState) -> None:
    """Have sessions expire in time."""
    inherited: dict[str, int | None] = {}
    deadlines = []
    for key, session in state.sessions.items():
        if key.tenant not in inherited:
            inherited[key.tenant] = state.inherited_ttl_ns(session)
        deadline_ns = session.expires_at_ns(inherited[key.tenant])
        if deadline_ns is not None:
            deadlines.append((deadline_ns, key))
    state.ttl.restore(deadlines)


def _count(state: CacheState, num_spans: int) -> None:
    """Count sessions, and what is folded of them, by tenant."""
    num_folded_bytes: Counter[str] = Counter()
    for key, session in state.sessions.items():
        num_folded_bytes[key.tenant] += len(session.folded)
    for tenant, num_bytes in num_folded_bytes.items():
        state.tenants.charge(tenant, num_bytes // PLACE_BYTES)
    for tenant, num_sessions in Counter(key.tenant for key in state.sessions).items():
        state.tenants.count_session(tenant, num_sessions)
    if num_spans:  # about one block each
        state.placement.sized(num_spans * state.layout.block_bytes // len(state.sessions))
