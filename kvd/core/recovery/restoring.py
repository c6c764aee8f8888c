"""Recovery: from the entries of the index to the state they describe.

Pure. Reads no data: blocks are verified when they are used (D11). Impossible entries are removed,
not trusted: blocks outside the tier, two blocks on one place, sessions beyond the prefix whose
blocks exist. Blocks that adoption has found in DRAM are there already
(kvd/core/recovery/adopting.py).

Sessions begin packed, as far as they may be, and rest until they are used. What is needed of a
million of them at once is columns (entry_join.py); `kvd bench --only control` shows what they take.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.actions import RESTORED
from kvd.core.records.entries import (
    PLACE_BYTES,
    TTL_NEVER_NS,
    IndexEntries,
    Pin,
    SessionRecord,
    plain_span,
)
from kvd.core.recovery.entry_join import (
    BlockColumns,
    EntryIndexes,
    Flags,
    Ints,
    SessionEntries,
    SpanColumns,
    SpanJoin,
    count_users,
    gathered,
    head_lengths,
    index_blocks,
    pack_places_of,
)
from kvd.core.state.block import Block
from kvd.core.state.block_users import NOWHERE
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from shared.types.block_key import KEY_BYTES
from shared.types.session_key import SessionKey

Number = TypeVar("Number", np.int32, np.int64)


class BlockEntries:
    """All blocks there are: the entries of the index, and then those in DRAM.

    Attributes:
        keys: block keys of KEY_BYTES each, joined.
        num_tokens: how many tokens each has.
        extents: where they lie; -1: not on SSD.
        is_sound: which may be used.
    """

    def __init__(self, state: CacheState, entries: IndexEntries) -> None:
        self._state = state
        self._num_entries = len(entries.block_keys) // KEY_BYTES
        adopted = list(state.blocks)
        self._made: dict[int, Block] = {}
        self.keys = entries.block_keys + b"".join(block.key for block in adopted)
        self.num_tokens = _extended(
            np.asarray(entries.block_tokens, dtype=np.int32), [b.num_tokens for b in adopted]
        )
        extents = np.asarray(entries.extents).astype(np.int64, copy=False)
        num_blocks = len(self.num_tokens)
        self.is_sound: Flags = np.ones(num_blocks, dtype=np.bool_)
        self._is_used: Flags = np.zeros(num_blocks, dtype=np.bool_)
        self._index: BlockColumns | None = index_blocks(self.keys, self.num_tokens)
        same_as = self._index.same_as
        self._is_copy: Flags = (same_as != np.arange(num_blocks)) & (same_as >= 0)
        self._take_extents(extents, same_as)
        is_on_ssd = self.is_sound[: self._num_entries]
        if not is_on_ssd.all():
            extents = np.where(is_on_ssd, extents, -1)
        self.extents: Ints = _extended(extents, [-1] * len(adopted))
        for index, block in enumerate(adopted, start=self._num_entries):
            self._join_adopted(int(same_as[index]), block)

    def join(self) -> SpanJoin:
        """Have the blocks of spans found."""
        assert self._index is not None, "blocks are found before they are used"
        return SpanJoin(self._index, self.is_sound)

    @property
    def is_object(self) -> Flags:
        """Which blocks are in DRAM, and so cannot be packed."""
        is_object = np.zeros(len(self.extents), dtype=np.bool_)
        is_object[list(self._made)] = True
        return is_object

    def use(self, num_users: Ints) -> None:
        """Record how many spans use each block; none is to be found any more."""
        self._is_used = num_users > 0
        self._index = None  # it takes as much memory as all the rest

    def block(self, index: int) -> Block:
        """Find a block, or make it."""
        block = self._made.get(index)
        if block is None:
            block = self._made[index] = Block(self._key(index), int(self.num_tokens[index]))
            self._state.blocks.add(block)
        if block.extent is None and self.extents[index] >= 0:
            self._state.blocks.enter_ssd(block, int(self.extents[index]))
        return block

    def drop_unused(self) -> int:
        """Remove the entries that nothing needs, or that cannot be; returns how many."""
        is_needed = self._is_copy | (
            self._is_used & (self.extents >= 0)
        )  # or its entry is another's
        dropped = np.flatnonzero(~is_needed[: self._num_entries]).tolist()
        for index in dropped:
            extent = int(self.extents[index])
            num_tokens = int(self.num_tokens[index])
            self._state.drop_entry(self._key(index), extent if extent >= 0 else None, num_tokens)
        return len(dropped)

    def _key(self, index: int) -> bytes:
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def _take_extents(self, extents: Ints, same_as: EntryIndexes) -> None:
        """Let entries of the index own what they say they do, as far as that can be."""
        shape, num_entries = self._state.shape, self._num_entries
        block_tokens = self._state.layout.block_tokens
        num_tokens = self.num_tokens[:num_entries]
        sectors_of = np.array([0, *map(shape.num_sectors, range(1, block_tokens + 1))])
        is_possible = (num_tokens > 0) & (num_tokens <= block_tokens)
        is_possible &= same_as[:num_entries] == np.arange(num_entries)
        num_sectors = sectors_of[np.where(is_possible, num_tokens, 0)]
        self.is_sound[:num_entries] = self._state.extents.restore(extents, num_sectors)

    def _join_adopted(self, entry: int, block: Block) -> None:
        """Record which of all blocks one in DRAM is: that of an entry, or one of its own.

        One that has a key in common with an entry, and no more, is not found, and forgotten.
        """
        if entry < 0 or self.num_tokens[entry] != block.num_tokens:
            self._state.forget(block)
        else:
            self.is_sound[entry] = True
            self._made[entry] = block


def _extended(column: NDArray[Number], more: Sequence[int]) -> NDArray[Number]:
    """Put more numbers behind a column; one that gets none is not copied."""
    return np.concatenate((column, np.array(more, dtype=column.dtype))) if more else column


Settings: TypeAlias = dict[SessionKey, SessionRecord]  # of sessions that have some of their own

MADE_AT_ONCE = 1 << 14  # sessions whose places are packed together


def restore(state: CacheState, entries: IndexEntries) -> None:
    """See CacheEngine.restore; adopted blocks are in the index of blocks, and nothing else is."""
    assert not state.sessions, "a cache is restored before it is used"
    sessions = SessionEntries()
    with_blocks, num_spans, num_dropped = _make_all(state, sessions, entries)
    entries.forget_blocks()  # what follows takes as much memory again
    settings = {
        entry.key: entry for entry in sessions.settings.values() if entry.key in state.sessions
    }
    tenants = Counter(key.tenant for key in state.sessions)
    _rank_all(state, settings, tenants, with_blocks)
    _schedule(state, settings, tenants)
    _count(state, tenants, num_spans)
    if state.limits.packs_sessions:
        for key in (sessions.keys[index] for index in sessions.full):
            if key in state.sessions:
                state.tails.pack(state.sessions[key])
    fields = {
        "num_sessions": len(state.sessions),
        "num_blocks": len(state.blocks) + state.tails.num_blocks,
        "num_dropped_blocks": num_dropped,
    }
    state.outbox.emit(RESTORED, None, fields)


def _make_all(
    state: CacheState, sessions: SessionEntries, entries: IndexEntries
) -> tuple[list[Session], int, int]:
    """Make all sessions; returns those that are not wholly packed, and counts spans and drops."""
    blocks = BlockEntries(state, entries)
    join = blocks.join()
    sessions.collect(entries.sessions, join)
    restoration = _Restoration(state, sessions, blocks, join.finish())
    del join
    num_spans = restoration.run()
    return restoration.with_blocks, num_spans, blocks.drop_unused()


class _Restoration:
    """Makes the sessions of entries.

    Attributes:
        with_blocks: those that have blocks in the index of blocks.
    """

    def __init__(
        self, state: CacheState, sessions: SessionEntries, blocks: BlockEntries, spans: SpanColumns
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._blocks = blocks
        self._spans = spans
        self._last_access_ns = np.frombuffer(sessions.last_access_ns, dtype=np.int64)
        self._are_plain = sessions.are_plain()
        self.with_blocks: list[Session] = []

    def run(self) -> int:
        """Make all sessions, least recently used first; returns how many spans they have."""
        state, sessions, blocks, spans = self._state, self._sessions, self._blocks, self._spans
        order = sessions.in_order()
        num_over = max(0, len(order) - state.limits.max_sessions)
        spans.lengths[order[:num_over]] = 0
        num_users = count_users(spans, len(blocks.is_sound))
        blocks.use(num_users)
        is_packable = (num_users == 1) & ~blocks.is_object
        heads = head_lengths(spans, is_packable & state.limits.packs_sessions)
        del num_users, is_packable
        heads[list(sessions.full)] = spans.lengths[list(sessions.full)]
        for first in range(0, len(order), MADE_AT_ONCE):
            self._make(order[first : first + MADE_AT_ONCE], heads)
        return int(spans.lengths.sum())

    def _make(self, some: Ints, heads: Ints) -> None:
        """Make the sessions of some entries, in order: all at once, as far as they are alike."""
        spans, entries, blocks = self._spans, self._sessions, self._blocks
        lengths, num_stored = spans.lengths[some], np.diff(spans.starts)[some]
        num_packed = lengths - heads[some]
        packed = gathered(spans.starts[some] + heads[some], num_packed)
        places = pack_places_of(
            blocks.keys, blocks.num_tokens, blocks.extents, spans.entries[packed]
        )
        ends = np.cumsum(num_packed) * PLACE_BYTES
        starts = ends - num_packed * PLACE_BYTES
        last_access_ns = np.minimum(self._last_access_ns[some], self._state.now_ns)
        columns = (some.tolist(), last_access_ns.tolist(), starts.tolist(), ends.tolist())
        made = [
            Session(entries.keys[index], last_ns, (), places[start:end], is_indexed=True)
            for index, last_ns, start, end in zip(*columns, strict=True)
        ]
        is_alike = self._are_plain[some] & (num_packed > 0) & (num_packed == num_stored)
        self._state.tails.restored([made[place] for place in np.flatnonzero(num_packed).tolist()])
        is_left = zip(made, lengths.tolist(), strict=True)
        self._state.sessions.update((session.key, session) for session, left in is_left if left)
        for place in np.flatnonzero(~is_alike).tolist():
            index, length = int(some[place]), int(lengths[place])
            if length:
                is_cut = length < num_stored[place]
                self._settle(made[place], index, int(heads[index]), is_cut=is_cut)
            else:
                self._state.outbox.index.session_gone(entries.keys[index], is_indexed=True)

    def _settle(self, session: Session, index: int, head: int, *, is_cut: bool) -> None:
        """Do for a session what few need: its first `head` blocks are no packed ones."""
        if head:
            self._use_blocks(session, index, head)
        if index in self._sessions.settings:
            self._set(session, self._sessions.settings[index])
        if is_cut:
            session.lost = "evicted"
        if is_cut or index in self._sessions.damaged:
            self._state.outbox.index.session_changed(session.key)

    def _use_blocks(self, session: Session, index: int, head: int) -> None:
        """Give a session the spans whose blocks are not packed."""
        start = int(self._spans.starts[index])
        entries = self._spans.entries[start : start + head].tolist()
        blocks = [self._blocks.block(entry) for entry in entries]
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


def _rank_all(
    state: CacheState, settings: Settings, tenants: Iterable[str], with_blocks: list[Session]
) -> None:
    """Give sessions their places in the orders."""
    pinned = {key for key, entry in settings.items() if entry.pin is Pin.HARD}
    ranked = [key for key in state.sessions if key not in pinned] if pinned else [*state.sessions]
    state.policy.on_restore(ranked)
    for session in with_blocks:
        state.users.recount(session, NOWHERE)
    has_quota = any(state.tenants.order_of(name) is not None for name in tenants)
    for key in ranked if has_quota else ():
        state.tenants.on_insert(key)
    for entry in settings.values():
        _rank(state, entry)


def _rank(state: CacheState, settings: SessionRecord) -> None:
    """Give a session the place in the orders that its settings ask for."""
    key = settings.key
    if settings.pin is Pin.HARD:
        return
    if settings.pin is Pin.SOFT:
        state.policy.guard(key, is_guarded=True)
        state.tenants.guard(key, is_guarded=True)
    if settings.ended:
        state.policy.on_end(key)
        state.tenants.on_end(key)


def _schedule(state: CacheState, settings: Settings, tenants: Iterable[str]) -> None:
    """Have sessions expire in time."""
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


def _count(state: CacheState, tenants: Counter[str], num_spans: int) -> None:
    """Count sessions, and what is packed of them, by tenant."""
    num_packed_bytes: Counter[str] = Counter()
    for key, session in state.sessions.items():
        num_packed_bytes[key.tenant] += len(session.packed)
    for tenant, num_sessions in tenants.items():
        state.tenants.charge(tenant, num_packed_bytes[tenant] // PLACE_BYTES)
        state.tenants.count_session(tenant, num_sessions)
    if num_spans:  # about one block each
        state.placement.observe_size(num_spans * state.layout.block_bytes // len(state.sessions))
