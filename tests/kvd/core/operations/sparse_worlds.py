"""Worlds whose sessions have discarded tokens, for tests of compaction."""

from tests.kvd.core.turns import A, new_world, store
from tests.property.cache_world import CacheWorld, to_bytes

REST_NS = 100
TOKENS = list(range(10, 34))  # six blocks
EVEN = [(i, i + 1) for i in range(0, len(TOKENS), 2)]
KEPT = TOKENS[1::2]  # three blocks


def sparse_world(**limits) -> CacheWorld:
    """Make a session without every other token, which is to be compacted a while later."""
    limits = {"num_slots": 16, "max_waste": 0.5, "compact_rest_ns": REST_NS} | limits
    world = new_world(**limits)
    store(world, A, TOKENS)
    discard(world, A, TOKENS, EVEN)
    return world


def discard(world, key, tokens, ranges) -> int:
    kept = world.engine.sessions.discard(key, to_bytes(tokens), ranges)
    world.pump()
    world.quiesce()
    return kept


def rest(world, elapsed_ns=REST_NS) -> None:
    """Let time pass; operations that are due begin, and none ends."""
    world.now_ns += elapsed_ns
    world.engine.expire()
    world.pump()


def rows_of(world, answer) -> list[int]:
    return [row for s in answer.spans for row in world.slots[s.slot_id][s.start :][: s.num_tokens]]


def num_blocks(world, key=A) -> int:
    return world.engine.inspection.info(key).num_blocks
