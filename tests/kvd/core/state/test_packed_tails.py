"""Idle sessions are packed into bytes; only their memory use changes."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.records.entries import Pin
from kvd.core.records.records import LoadAnswer
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    infos,
    load,
    new_world,
    prepare_load,
    prepare_store,
    queue_of,
    store,
    tiers_of,
)
from tests.property.cache_world import CacheWorld, to_bytes
from tests.sampled import examples

TOKENS = ONES + TWOS + THREES


def idle_world(tokens: list[int] = TOKENS, **limits) -> CacheWorld:
    """Make a world in which A is stored, and another session has taken its place in DRAM."""
    world = new_world(num_slots=3, **limits)
    store(world, A, tokens)
    store(world, B, [7] * 12)
    store(world, B, [7] * 12 + [8])
    return world


def num_objects(world: CacheWorld) -> int:
    """Return the number of blocks that are not packed."""
    return len(world.engine._state.blocks)


def test_a_session_is_packed_when_it_has_left_dram():
    """It is still listed, described and counted block by block."""
    world = idle_world([*ONES, *TWOS, 4])
    assert num_objects(world) == 4
    assert tiers_of(world, A) == ["S"] * 3
    info = world.engine.inspection.info(A)
    assert (info.num_tokens, info.num_blocks, info.shared_blocks) == (9, 3, 0)
    assert info.ssd_bytes == info.total_bytes > info.dram_bytes == 0
    blocks = world.engine.inspection.describe(A).blocks
    assert [(b.token_offset, b.num_tokens, b.dirty, b.num_sessions) for b in blocks] == [
        (0, 4, False, 1),
        (4, 4, False, 1),
        (8, 1, False, 1),
    ]
    assert world.engine.inspection.stats().tiers[1].num_blocks == 7
    world.start()
    assert num_objects(world) == 0
    assert tiers_of(world, A) == ["S"] * 3


def test_a_packed_session_is_found_by_its_own_tokens_only():
    """Other tokens leave it packed; its own unpack it for the load."""
    world = idle_world()
    before = num_objects(world)
    assert load(world, A, THREES).miss_reason == "tokens_differ"
    assert num_objects(world) == before
    assert load(world, A, TOKENS).end_token == 12
    assert tiers_of(world, A) == ["DS"] * 3


def test_a_packed_session_is_found_along_the_chain():
    """By a session that forks from it, and shares its stored part."""
    world = idle_world()
    store(world, C, ONES + TWOS)
    blocks = world.engine.inspection.describe(A).blocks
    assert [block.num_sessions for block in blocks] == [2, 2, 1]
    assert load(world, C, ONES + TWOS + THREES).end_token == 12


def test_a_session_unpacked_in_vain_is_packed_again():
    """A load found no slot; it is packed once nothing holds it."""
    world = new_world(num_slots=1)
    store(world, A, TOKENS)
    store(world, B, [7] * 4)
    before = num_objects(world)
    lease = prepare_load(world, B, [7] * 4)
    assert prepare_load(world, A, TOKENS).miss_reason == "busy"
    assert num_objects(world) == before
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)


def test_a_block_that_becomes_private_is_packed():
    """When the last other session that used it has gone."""
    world = idle_world()
    store(world, C, ONES)
    store(world, B, [7] * 12 + [9])
    assert len(world.engine._state.sessions[A].spans) == 1
    world.engine.sessions.flush(C, dry_run=False)
    world.pump()
    world.pump()
    assert world.engine._state.sessions[A].num_packed == 3


def test_a_held_block_is_packed_later():
    """While a store builds on it, it stays unpacked."""
    world = idle_world()
    world.engine.sessions.flush(B, dry_run=False)
    answer = prepare_store(world, A, [*TOKENS, 5], from_token=12)
    world.pump()
    assert world.engine._state.sessions[A].num_packed == 0
    world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=False)
    world.pump()
    world.pump()
    assert world.engine._state.sessions[A].num_packed == 3


def test_a_slow_store_does_not_change_a_longer_session():
    """It found the beginning stored, and the rest was packed while it was active."""
    world = idle_world()
    state = world.engine._state
    answer = prepare_store(world, A, ONES + [9] * 4)
    assert answer.lease_id
    assert state.sessions[A].num_packed, "what the store does not build on"
    world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
    world.pump()
    assert world.engine.inspection.info(A).num_tokens == 8
    assert load(world, A, ONES + [9] * 4).end_token == 8


def test_the_tail_of_a_packed_session_is_evicted_first():
    """Block by block as room is needed, without unpacking it; then it is gone."""
    world = idle_world(num_extents=8)
    session = world.engine._state.sessions[A]
    store(world, C, [4] * 8)
    assert (session.num_packed, session.spans) == (2, ())
    assert session.lost == "evicted"
    assert load(world, C, [4] * 8).end_token == 8
    world.now_ns += 1
    store(world, B, [7] * 12 + [8])
    store(world, C, [4] * 8 + [5] * 8)
    assert world.engine.inspection.info(A) is None


def test_no_more_packed_blocks_are_evicted_than_needed():
    """The last session that gives way keeps its other blocks."""
    world = new_world(num_slots=2, num_extents=6)
    for key, tokens in ((A, ONES + TWOS), (B, THREES + ONES), (C, [7] * 8)):
        store(world, key, tokens)
    assert world.engine._state.tails.num_blocks == 4, "A's and B's"
    world.engine.writes.set_capacity(3)
    world.quiesce()
    assert world.engine.inspection.info(A) is None
    assert tiers_of(world, B) == ["S"]


def test_blocks_behind_a_discard_are_found_one_by_one():
    """Their keys do not follow from each other; so each of them can be looked up."""
    world = idle_world()
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(0, 4)])
    world.pump()
    state = world.engine._state
    assert state.sessions[A].num_packed == 2
    assert set(state.tails.heads) == {b.key for b in world.engine.inspection.describe(A).blocks}
    store(world, C, ONES)
    assert load(world, C, TOKENS).end_token == 12, "the chain goes on into another's packed blocks"
    assert load(world, A, TWOS + THREES).end_token == 8


def test_two_spans_of_one_block_are_not_packed():
    """A discard within a block leaves two; the session stays unpacked."""
    world = idle_world()
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(1, 2)])
    world.pump()
    assert world.engine._state.sessions[A].num_packed == 0
    assert load(world, A, [1, 1, 1, *TWOS, *THREES]).end_token == 11


# ----------------------------------------------------------------------------------- equal
# histories

KEYS = [A, B, C, A._replace(session_id="d")]
PHRASES = [[0] * 4, [1] * 8, [0, 0, 0, 0, 1, 1, 1, 1], [2] * 12]
STEPS = st.one_of(
    st.tuples(st.just("turn"), st.sampled_from(KEYS), st.sampled_from(PHRASES)),
    st.tuples(st.just("turn"), st.sampled_from(KEYS), st.sampled_from(PHRASES)),
    st.tuples(st.just("look"), st.sampled_from(KEYS), st.sampled_from(KEYS)),
    st.tuples(st.just("fork"), st.sampled_from(KEYS), st.sampled_from(KEYS)),
    st.tuples(st.just("discard"), st.sampled_from(KEYS), st.integers(0, 12)),
    st.tuples(st.just("pin"), st.sampled_from(KEYS), st.sampled_from(Pin)),
    st.tuples(st.just("end"), st.sampled_from(KEYS), st.none()),
    st.tuples(st.just("flush"), st.sampled_from(KEYS), st.booleans()),
    st.tuples(st.just("queue"), st.sampled_from(KEYS), st.none()),
    st.tuples(st.just("wait"), st.none(), st.integers(1, 60)),
    st.tuples(st.just("restart"), st.none(), st.booleans()),
)


class Twin:
    """One of two caches with the same history."""

    def __init__(self, *, packs_sessions: bool, num_extents: int, partial: list[int]) -> None:
        self.world = new_world(
            num_slots=3, num_extents=num_extents, default_ttl_ns=100, packs_sessions=packs_sessions
        )
        self.tokens: dict[object, list[int]] = {key: [] for key in KEYS}
        self.partial = partial

    def step(self, what, key, argument) -> object:
        """Take one step; return its visible result."""
        self.world.now_ns += 1
        if what in ("pin", "flush") and not self.world.engine.inspection.info(key):
            return None
        answer = getattr(self, f"_{what}")(key, argument)
        self.world.pump()
        self.world.quiesce()
        return answer

    def _turn(self, key, new_tokens) -> object:
        answer = _visible_parts(load(self.world, key, self.tokens[key]))
        self.tokens[key] = self.tokens[key] + new_tokens
        store(self.world, key, self.tokens[key] + self.partial)
        return answer

    def _look(self, key, other) -> object:
        return _visible_parts(load(self.world, key, self.tokens[other]))

    def _fork(self, key, other) -> None:
        self.tokens[key] = list(self.tokens[other])
        store(self.world, key, self.tokens[key] or [0])

    def _discard(self, key, start) -> object:
        tokens = self.tokens[key]
        if start >= len(tokens):
            return None
        ranges = [(start, min(start + 4, len(tokens)))]
        kept = self.world.engine.sessions.discard(key, to_bytes(tokens), ranges)
        if kept:
            self.tokens[key] = tokens[:start] + tokens[start + 4 :]
        return kept

    def _wait(self, _, elapsed_ns) -> None:
        self.world.now_ns += elapsed_ns
        self.world.engine.expire()

    def _queue(self, key, _) -> None:
        self.world.engine.engines.replace_queue(ENGINE_ID, queue_of(key))

    def _end(self, key, _) -> object:
        return self.world.engine.sessions.end(key)

    def _restart(self, _, keep_dram) -> None:
        self.world.commit(len(self.world.index.uncommitted))
        self.world.start(keep_dram=keep_dram)

    def _pin(self, key, pin) -> None:
        self.world.engine.sessions.pin(key, pin)

    def _flush(self, key, dry_run) -> object:
        return self.world.engine.sessions.flush(key, dry_run=dry_run)

    def look(self) -> tuple[object, ...]:
        """Return everything an operator can see, but for places on SSD."""
        engine = self.world.engine
        listed = infos(engine)
        details = [engine.inspection.describe(info.key).blocks for info in listed]
        blocks = [tuple(replace(b, extent=None, slot_id=None) for b in d) for d in details]
        stats = replace(engine.inspection.stats(), counters={})
        evictions = engine.inspection.stats().counters["evictions_ssd"]
        return listed, blocks, stats, evictions, tuple(engine.inspection.tenants)


def _visible_parts(answer: LoadAnswer) -> object:
    """Return what an engine learns, but for the slots."""
    spans = [(span.token_offset, span.num_tokens, span.tier) for span in answer.spans]
    return answer.lookup, spans, answer.end_token, answer.more, answer.miss_reason


def live_through(steps, num_extents: int, partial: list[int]) -> None:
    packing = Twin(packs_sessions=True, num_extents=num_extents, partial=partial)
    plain = Twin(packs_sessions=False, num_extents=num_extents, partial=partial)
    for step in steps:
        assert packing.step(*step) == plain.step(*step), step
        assert packing.look() == plain.look(), step
        assert not plain.world.engine._state.tails.num_blocks


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_packing_changes_no_answer_when_ssd_is_short(steps):
    """Sessions are evicted from SSD, too, packed or not: the same blocks in the same order."""
    live_through(steps, num_extents=8, partial=[])


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_packing_changes_no_answer_with_partial_blocks(steps):
    """Packed tails are packed like whole blocks."""
    live_through(steps, num_extents=200, partial=[6])


def test_shared_blocks_are_not_examined_again():
    """They may be packed once one of their sessions has gone; until then nothing changes."""
    world = new_world(num_slots=2)
    for key in (A, C):
        store(world, key, ONES + TWOS)
    store(world, B, THREES * 2)
    world.pump()
    assert tiers_of(world, A) == ["S", "S"]
    state = world.engine._state
    assert (state.sessions[A].num_packed, state.sessions[C].num_packed) == (0, 0)
    assert not {A, C} & state.tails._waiting.keys()


def test_blocks_that_cannot_be_packed_are_not_examined_again():
    """Two spans of one block: until the session is used."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    world.engine.sessions.discard(A, to_bytes(ONES + TWOS), [(1, 2)])
    store(world, B, THREES * 2)
    world.pump()
    session = world.engine._state.sessions[A]
    assert (len(session.spans), session.num_packed) == (3, 0)
    assert A not in world.engine._state.tails._waiting
