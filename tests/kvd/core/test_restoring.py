"""Recovery from the index, whatever it says."""

import dataclasses

from kvd.core.actions import IoOutcome
from kvd.core.engine import CacheEngine, Limits
from tests.kvd.core.turns import (
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    load,
    new_world,
    store,
    tiers_of,
)
from tests.property.cache_world import LAYOUT, salt_of


def test_every_stored_session_survives_a_restart():
    """Spans, TTL, pin, end and last access come back; loads read from SSD."""
    world = new_world(default_ttl_ns=10**12)
    store(world, A, [*ONES, 2])
    store(world, B, TWOS)
    store(world, C, THREES)
    world.engine.pin(A, world.now_ns)
    world.engine.set_ttl(A, 10**13, world.now_ns)
    world.engine.end_session(B, world.now_ns)
    world.pump()
    world.commit(len(world.index.uncommitted))
    before = [world.engine.session_info(key) for key in (A, B, C)]
    world.start()
    after = [world.engine.session_info(key) for key in (A, B, C)]
    assert after == [dataclasses.replace(info, dram_bytes=0) for info in before]
    assert load(world, A, [*ONES, 2, 9]).end_token == 5


def test_unwritten_blocks_cut_their_session():
    """A session is restored up to the first block that is not on SSD; the rest is unlisted."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES, settle=False)
    first, second, third = sorted(world.io)
    world.finish_io(first, IoOutcome.OK)
    world.finish_io(third, IoOutcome.OK)
    world.commit(len(world.index.uncommitted))
    world.start()
    assert world.engine.session_info(A).num_tokens == 4
    assert len(world.engine.describe(A).blocks) == 1
    world.commit(len(world.index.uncommitted))
    assert len(world.index.blocks) == 1, "the orphan's row is removed"
    assert second


def test_a_session_without_any_block_is_removed():
    """Its row goes with the next commit."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.commit(len(world.index.uncommitted))
    assert A in world.index.sessions
    world.start()
    world.commit(len(world.index.uncommitted))
    assert A not in world.index.sessions


def test_rows_that_cannot_be_are_removed():
    """Extents outside the tier or named twice, wrong token ids, spans outside their block."""
    world = new_world()
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        store(world, key, tokens)
    first, second, third = world.index.blocks.values()
    blocks = [
        first,
        dataclasses.replace(second, extent=first.extent),
        dataclasses.replace(third, extent=10**6),
        dataclasses.replace(third, key=b"?", token_ids=b""),
    ]
    record = world.index.sessions[A]
    longer = dataclasses.replace(record.spans[0], num_tokens=5)
    sessions = [
        record,
        dataclasses.replace(record, key=B, spans=(longer,)),
        dataclasses.replace(record, key=C, spans=(*record.spans, longer)),
    ]
    engine = CacheEngine(LAYOUT, Limits(4, 8), salt_of)
    engine.restore(sessions, blocks, world.now_ns)
    engine.check()
    assert engine.session_info(B) is None
    assert engine.session_info(C).num_tokens == 4
    assert engine.stats().tiers[1].num_blocks == 1


def test_the_oldest_sessions_beyond_the_bound_are_not_restored():
    """max_sessions holds after a restart with a smaller bound, too."""
    world = new_world()
    for key, tokens in ((A, ONES), (B, TWOS)):
        world.now_ns += 1
        store(world, key, tokens)
    world.limits = Limits(4, 64, max_sessions=1)
    world.start()
    assert world.engine.session_info(A) is None
    assert tiers_of(world, B) == ["S"]


def test_order_of_last_access_survives():
    """After a restart the coldest session is still the first victim on SSD."""
    world = new_world(num_slots=4, num_extents=2)
    for key, tokens in ((A, ONES), (B, TWOS)):
        world.now_ns += 1
        store(world, key, tokens)
    world.now_ns += 1
    load(world, A, ONES)
    world.commit(len(world.index.uncommitted))
    world.start()
    store(world, C, THREES)
    assert world.engine.session_info(B) is None
    assert tiers_of(world, A) == ["S"]
