"""Recovery: rebuild the cache's state from the entries of the index.

Pure. It reads no KV: blocks are verified when they are used (D11). Impossible entries are removed:
blocks outside of the tier, two blocks in one place, sessions beyond the prefix whose blocks exist.
Blocks that adoption has found in DRAM are in the state already (kvd/core/recovery/adopting.py).

Restored sessions are packed as far as possible, until they are used. A million of them is handled
as columns (entry_join.py); `kvd bench --only control` shows the cost.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

from kvd.core.records.actions import RESTORED
from kvd.core.records.entries import (
    PLACE_BYTES,
    TTL_NEVER_NS,
    BlockRecord,
    IndexEntries,
    Pin,
    SessionRecord,
    plain_span,
)
from kvd.core.recovery.block_entries import BlockEntries
from kvd.core.recovery.entry_join import (
    Flags,
    Ints,
    SessionEntries,
    SpanColumns,
    count_users,
    expand_ranges,
    head_lengths,
)
from kvd.core.state.block import Block
from kvd.core.state.block_users import NOWHERE
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey

Settings: TypeAlias = dict[SessionKey, SessionRecord]  # of sessions with settings of their own

MADE_AT_ONCE = 1 << 14  # sessions made per batch, whose places are packed together


def restore(state: CacheState, entries: IndexEntries) -> None:
    """Restore sessions and blocks; see CacheEngine.restore.

    Before it the index of blocks has the adopted blocks and no others.
    """
    assert not state.sessions, "a cache is restored before it is used"
    sessions = SessionEntries(state.layout.part_slots)
    joined = _join(state, sessions, entries)
    with_blocks = _SessionMaker(state, sessions, joined.of_heads).make(joined.batches)
    for record in joined.unneeded:
        extent = record.extent if record.extent >= 0 else None
        state.drop_entry(record.key, extent, record.num_tokens)
    settings = {
        entry.key: entry for entry in sessions.settings.values() if entry.key in state.sessions
    }
    tenants = Counter(key.tenant for key in state.sessions)
    _rank_all(state, settings, tenants, with_blocks)
    _schedule(state, settings, tenants)
    _count(state, tenants, joined.num_spans)
    if state.limits.packs_sessions:
        for key in (sessions.keys[index] for index in sessions.full):
            if key in state.sessions:
                state.tails.pack(state.sessions[key])
    fields = {
        "num_sessions": len(state.sessions),
        "num_blocks": len(state.blocks) + state.tails.num_blocks,
        "num_dropped_blocks": len(joined.unneeded),
    }
    state.outbox.emit(RESTORED, None, fields)


class _Batch(NamedTuple):
    """Some of the sessions to be made, as columns.

    Attributes:
        indexes: their indexes among all entries.
        num_spans: how many spans each one has left.
        num_packed: how many of these are packed, the last ones.
        is_cut: whether it has lost spans.
        places: the packed places of all of them, joined.
    """

    indexes: Ints
    num_spans: Ints
    num_packed: Ints
    is_cut: Flags
    places: bytes


class _Joined(NamedTuple):
    """All entries of sessions, joined with the blocks there are.

    Attributes:
        batches: the sessions, least recently used first.
        of_heads: by index of a session: its first blocks, which are not packed.
        unneeded: entries of blocks to be removed from the index.
        num_spans: number of spans of all sessions.
    """

    batches: deque[_Batch]
    of_heads: dict[int, list[Block]]
    unneeded: list[BlockRecord]
    num_spans: int


def _join(state: CacheState, sessions: SessionEntries, entries: IndexEntries) -> _Joined:
    """Join all entries with the blocks, and find out what is left of each session.

    The columns of blocks are freed when this returns, before any session is made: sessions hold
    copies of all that they need, and both at once would double the memory.
    """
    blocks = BlockEntries(state, entries)
    join = blocks.join()
    sessions.collect(entries.sessions, join)
    spans = join.finish()
    del join
    order = sessions.in_order()
    left = order[spans.lengths[order] > 0]
    spans.lengths[sessions.surplus(left, state.limits.max_sessions, state.now_ns)] = 0
    num_users = count_users(spans, len(blocks.is_sound))
    blocks.use(num_users)
    is_packable = (num_users == 1) & ~blocks.is_object
    heads = head_lengths(spans, is_packable & state.limits.packs_sessions)
    del num_users, is_packable
    heads[list(sessions.full)] = spans.lengths[list(sessions.full)]
    batches = deque(
        _batch(order[first : first + MADE_AT_ONCE], heads, spans, blocks)
        for first in range(0, len(order), MADE_AT_ONCE)
    )
    of_heads = {}
    for index in order[heads[order] > 0].tolist():
        start = spans.starts[index]
        head = spans.entries[start : start + heads[index]]
        of_heads[index] = [blocks.block(entry) for entry in head.tolist()]
    return _Joined(batches, of_heads, blocks.unneeded(), int(spans.lengths.sum()))


def _batch(some: Ints, heads: Ints, spans: SpanColumns, blocks: BlockEntries) -> _Batch:
    """Return the batch of some sessions, with their places packed at once."""
    lengths, num_stored = spans.lengths[some], np.diff(spans.starts)[some]
    num_packed = lengths - heads[some]
    packed = spans.entries[expand_ranges(spans.starts[some] + heads[some], num_packed)]
    return _Batch(some, lengths, num_packed, lengths < num_stored, blocks.pack_places(packed))


class _SessionMaker:
    """Makes sessions from their entries.

    Args:
        state: the cache's tables.
        sessions: the entries.
        of_heads: see _Joined.
    """

    def __init__(
        self, state: CacheState, sessions: SessionEntries, of_heads: dict[int, list[Block]]
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._of_heads = of_heads
        self._last_access_ns = np.frombuffer(sessions.last_access_ns, dtype=np.int64)
        self._are_plain = sessions.are_plain()
        self._with_blocks: list[Session] = []

    def make(self, batches: deque[_Batch]) -> list[Session]:
        """Make all sessions, freeing the batches; returns sessions that have unpacked blocks."""
        while batches:
            self._make(batches.popleft())
        return self._with_blocks

    def _make(self, batch: _Batch) -> None:
        """Make the sessions of a batch in order, those with nothing special all at once."""
        keys, places = self._sessions.keys, batch.places
        ends = np.cumsum(batch.num_packed) * PLACE_BYTES
        starts = ends - batch.num_packed * PLACE_BYTES
        last_access_ns = np.minimum(self._last_access_ns[batch.indexes], self._state.now_ns)
        columns = (batch.indexes.tolist(), last_access_ns.tolist(), starts.tolist(), ends.tolist())
        made = [
            Session(keys[index], last_ns, (), places[start:end], is_indexed=True)
            for index, last_ns, start, end in zip(*columns, strict=True)
        ]
        self._state.tails.restore([made[i] for i in np.flatnonzero(batch.num_packed).tolist()])
        is_left = zip(made, batch.num_spans.tolist(), strict=True)
        self._state.sessions.update((session.key, session) for session, left in is_left if left)
        is_packed = (batch.num_packed > 0) & (batch.num_packed == batch.num_spans)
        is_alike = self._are_plain[batch.indexes] & is_packed & ~batch.is_cut
        for place in np.flatnonzero(~is_alike).tolist():
            if batch.num_spans[place]:
                index, is_cut = int(batch.indexes[place]), bool(batch.is_cut[place])
                self._complete(made[place], index, is_cut=is_cut)
            else:
                self._state.outbox.index.drop_session(made[place].key, is_indexed=True)

    def _complete(self, session: Session, index: int, *, is_cut: bool) -> None:
        """Complete a session that has unpacked blocks, settings, or a damaged or cut entry."""
        if index in self._of_heads:
            self._use_blocks(session, index)
        if index in self._sessions.settings:
            self._apply_settings(session, self._sessions.settings[index])
        if is_cut:
            session.lost = "evicted"
        if is_cut or index in self._sessions.damaged:
            self._state.outbox.index.put_session(session.key)

    def _use_blocks(self, session: Session, index: int) -> None:
        """Give a session its spans whose blocks are not packed."""
        blocks = self._of_heads.pop(index)
        full = self._sessions.full.get(index)
        if full is None:
            session.spans = [plain_span(block.key, block.num_tokens) for block in blocks]
        else:
            session.spans = full[: len(blocks)]
            if self._state.stored_parts is not None:
                self._state.stored_parts.replace(session.key, (), session.spans)
        tenant = session.key.tenant
        for block in blocks:
            if not block.tenant:
                block.tenant = tenant
                self._state.tenants.charge(tenant, 1)
        self._state.users.add(session, blocks)
        self._with_blocks.append(session)

    def _apply_settings(self, session: Session, settings: SessionRecord) -> None:
        """Give a session its settings."""
        state = self._state
        session.ttl_ns, session.pin, session.ended = settings.ttl_ns, settings.pin, settings.ended
        state.count_pin(session, 1)
        session.retain_ns = settings.retain_ns
        until_ns = session.retained_until_ns
        if until_ns is not None and until_ns <= state.now_ns:  # it ended while kvd was down
            session.retain_ns = None
            state.outbox.index.put_session(session.key)
        state.num_retained += session.retain_ns is not None


def _rank_all(
    state: CacheState, settings: Settings, tenants: Iterable[str], with_blocks: list[Session]
) -> None:
    """Give all sessions their places in the eviction orders."""
    pinned = {key for key, entry in settings.items() if entry.pin is Pin.HARD}
    ranked = [key for key in state.sessions if key not in pinned] if pinned else [*state.sessions]
    state.policy.on_restore(ranked)
    for session in with_blocks:
        state.users.recount(session, NOWHERE)
    has_quota = any(state.tenants.order_of(name) is not None for name in tenants)
    for key in ranked if has_quota else ():
        state.tenants.on_insert(key)
    for key in settings:
        _rank(state, state.sessions[key])


def _rank(state: CacheState, session: Session) -> None:
    """Give a session the place in the eviction orders that its settings ask for."""
    key = session.key
    if session.pin is Pin.HARD:
        return
    if session.guard:
        state.policy.guard(key, session.guard)
        state.tenants.guard(key, session.guard)
    if session.ended:
        state.policy.on_end(key)
        state.tenants.on_end(key)


def _schedule(state: CacheState, settings: Settings, tenants: Iterable[str]) -> None:
    """Schedule the expiry of sessions and the end of their retentions."""
    inherited = {name: state.inherited_ttl_ns(name) for name in tenants}
    ttl_ns = {name: ttl for name, ttl in inherited.items() if ttl not in (None, TTL_NEVER_NS)}
    deadlines = [
        (session.last_access_ns + ttl_ns[key.tenant], key)
        for key, session in state.sessions.items()
        if key.tenant in ttl_ns and key not in settings
    ]
    for key in settings:
        deadline_ns = state.expires_at_ns(state.sessions[key])
        if deadline_ns is not None:
            deadlines.append((deadline_ns, key))
    state.ttl.restore(deadlines)
    ends = ((state.sessions[key].retained_until_ns, key) for key in settings)
    state.retention.restore([(until_ns, key) for until_ns, key in ends if until_ns is not None])


def _count(state: CacheState, tenants: Counter[str], num_spans: int) -> None:
    """Count sessions and their packed blocks by tenant."""
    num_packed_bytes: Counter[str] = Counter()
    for key, session in state.sessions.items():
        num_packed_bytes[key.tenant] += len(session.packed)
    for tenant, num_sessions in tenants.items():
        state.tenants.charge(tenant, num_packed_bytes[tenant] // PLACE_BYTES)
        state.tenants.count_session(tenant, num_sessions)
    if num_spans:  # estimate about one block per span
        state.placement.observe_size(num_spans * state.layout.block_bytes // len(state.sessions))
