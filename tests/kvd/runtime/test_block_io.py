"""Reads announce their layers as they arrive, and get priority when a load waits for them."""

import asyncio
import threading

import pytest

from kvd.core.records.actions import IoOutcome, ReadBlock, TrackLoad, UntrackLoad
from kvd.tiers.io_threads import Priority
from shared.kvd_client.arena_map import FAILED_BIT, LAYERS_MASK, ProgressWords
from tests.kvd.runtime.performer_world import DEADLINE_S, ENGINE_ID, LEASE


async def test_progress_of_a_load(world):
    """Layers are published as they arrive; the word is released with the lease."""
    words = ProgressWords(world.arena.progress.fd, 4)
    for slot_id in (0, 1):
        world.performer.perform(world.write_action(slot_id + 1, slot_id, slot_id)[0])
    await world.until_idle()
    sectors = world.volume.shape.sectors_per_extent
    world.faults.hold.clear()
    for op_id, slot_id in ((11, 0), (12, 1)):
        key = bytes([slot_id]) * 16
        world.performer.perform(
            ReadBlock(op_id, key, slot_id * sectors, slot_id + 2, 16, layered=True)
        )
    world.performer.perform(TrackLoad(LEASE, ENGINE_ID, (11, 12)))
    index = world.performer.loads.index_of(LEASE)
    assert words.word(index) & (LAYERS_MASK | FAILED_BIT) == 0
    world.faults.hold.set()
    await asyncio.to_thread(words_ready, world, words, index)
    await world.until_idle()
    assert words.word(index) & (LAYERS_MASK | FAILED_BIT) == 8
    assert 1 <= world.num_wakes <= 8
    world.performer.perform(UntrackLoad(LEASE))
    assert world.performer.loads.index_of(LEASE) is None


def words_ready(world, words, index):
    """Wait as an engine does, notified by the publications."""
    waker = threading.Thread(target=_wake_until, args=(world, words, index))
    waker.start()
    words.wait(index, LEASE, 8, DEADLINE_S)
    waker.join()


def _wake_until(world, words, index):
    while words.word(index) & LAYERS_MASK < 8:
        threading.Event().wait(0.001)
    words.wake()


async def test_a_failed_read_fails_the_load(world):
    """The engine sees FAILED."""
    words = ProgressWords(world.arena.progress.fd, 4)
    world.performer.perform(ReadBlock(11, b"x" * 16, 0, 1, 16, layered=True))
    world.performer.perform(TrackLoad(LEASE, ENGINE_ID, (11,)))
    index = world.performer.loads.index_of(LEASE)
    assert await world.until_idle() == [("read_done", 11, IoOutcome.CORRUPT, None)]
    assert words.word(index) & FAILED_BIT


async def test_layers_before_a_corrupt_one_are_announced(world):
    """A flipped bit in the last slice: no layer of its group, then FAILED; answered once."""
    words = ProgressWords(world.arena.progress.fd, 4)
    write, _ = world.write_action(1, 0, 0)
    world.performer.perform(write)
    await world.until_idle()
    with world.segment.open("r+b") as file:
        file.seek(world.volume.shape.full_bytes - 1)
        file.write(bytes([world.arena.slots.slot(0)[-1] ^ 1]))
    world.performer.perform(ReadBlock(11, write.key, 0, 1, 16, layered=True))
    world.performer.perform(TrackLoad(LEASE, ENGINE_ID, (11,)))
    assert await world.until_idle() == [("read_done", 11, IoOutcome.CORRUPT, None)]
    word = words.word(world.performer.loads.index_of(LEASE))
    assert word & FAILED_BIT
    assert word & LAYERS_MASK <= 6


@pytest.mark.parametrize("num_tokens", [16, 3])
async def test_a_load_speeds_up_reads_ahead(world, num_tokens):
    """They go before the writes then; the entry queued before finds the read done."""
    words = ProgressWords(world.arena.progress.fd, 4)
    write, stored = world.write_action(1, 0, 0, num_tokens)
    world.performer.perform(write)
    await world.until_idle()
    may_end = threading.Event()
    for _ in range(3):  # one per thread for work that no load waits for
        world.pool.submit(Priority.WRITE, 0, lambda _: may_end.wait(DEADLINE_S))
    try:
        world.performer.perform(ReadBlock(11, write.key, 0, 1, num_tokens, ahead=True))
        world.performer.perform(TrackLoad(LEASE, ENGINE_ID, (11,)))
        index = world.performer.loads.index_of(LEASE)
        async with asyncio.timeout(DEADLINE_S):
            while words.word(index) & LAYERS_MASK < 8:  # noqa: ASYNC110  # the word is what counts
                await asyncio.sleep(0.001)
    finally:
        may_end.set()
    assert await world.until_idle() == [("read_done", 11, IoOutcome.OK, stored)]
    async with asyncio.timeout(DEADLINE_S):
        while len(world.pool):  # noqa: ASYNC110  # the job that came too late
            await asyncio.sleep(0.001)
    assert await world.until_idle() == []
