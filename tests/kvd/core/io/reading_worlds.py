"""Cache worlds that read blocks ahead, and operations of their tests."""

from kvd.core.records.actions import ReadBlock
from kvd.core.state.limits import Limits
from shared.types.queue_delta import RunningRequest
from tests.kvd.core.turns import ENGINE_ID, ONES, THREES, TWOS, A, B, C, new_world, queue_of, store
from tests.property.cache_world import SHAPE, CacheWorld
from tests.property.expecting_policy import ExpectingPolicy
from tests.queue_changes import queue_change

BLOCK_BYTES = SHAPE.full_bytes  # bytes of a read
ONE, MANY = BLOCK_BYTES, 64 * BLOCK_BYTES  # in flight
TOKENS = {A: ONES, B: TWOS, C: THREES}


def reading_world(num_slots=16, prefetch_bytes=MANY, policy="lookahead_queue", **limits):
    return new_world(num_slots, policy=policy, prefetch_bytes=prefetch_bytes, **limits)


def expecting_world(num_slots=16, **limits):
    return CacheWorld(Limits(num_slots, 64, prefetch_bytes=MANY, **limits), ExpectingPolicy)


def store_on_ssd(world, sizes):
    """Store sessions of so many blocks, and empty DRAM."""
    for key, num_blocks in sizes.items():
        store(world, key, tokens_of(key, num_blocks))
    assert world.engine.release_dram()
    world.pump()


def tokens_of(key, num_blocks):
    """Return tokens of blocks that no other session has."""
    return TOKENS[key] * num_blocks


def queue(world, *keys, engine_id=ENGINE_ID):
    world.engine.engines.replace_queue(engine_id, queue_of(*keys))
    world.pump()


def run(world, key, number=99):
    """Run a turn of the session, and no other."""
    change = queue_change(running=[RunningRequest(number, key)])
    world.engine.engines.replace_queue(ENGINE_ID, change)
    world.pump()


def being_read(world):
    """Return the sessions whose blocks are being read, in the order of the requests."""
    infos = {
        key: world.engine.inspection.info(key) and world.engine.inspection.describe(key)
        for key in TOKENS
    }
    key_of_block = {b.key: key for key, info in infos.items() if info for b in info.blocks}
    return [key_of_block[world.io[op_id].key] for op_id in world.io_of(ReadBlock)]


def finish_reads(world):
    """End reads one by one, with their consequences; return their sessions."""
    done = []
    while world.io_of(ReadBlock):
        done.append(being_read(world)[0])
        world.finish_io(world.io_of(ReadBlock)[0])
    return done
