"""Simultaneous completions are handed to the loop together, and none after the end."""

import asyncio
import threading

from kvd.core.records.actions import VerifySlot
from kvd.runtime.completions import EndedOperations
from tests.kvd.runtime.performer_world import World


async def test_all_operations_are_reported_before_the_end(world):
    """Before the files and the arena are closed, and none afterwards."""
    for op_id in range(1, 101):
        world.performer._completions.put(
            EndedOperations(lambda engine, op_id=op_id: engine.ended(op_id))
        )
    await world.performer.close()
    assert [op_id for _, op_id in world.engine.done] == list(range(1, 101))
    world.performer._completions.put(EndedOperations(lambda engine: engine.ended(101)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(world.engine.done) == 100


class CountingLoop:
    """The running loop, with its wake-ups from threads counted."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.num_wakes = 0

    def call_soon_threadsafe(self, callback, *args):
        self.num_wakes += 1
        self.loop.call_soon_threadsafe(callback, *args)

    def call_soon(self, callback, *args):
        self.loop.call_soon(callback, *args)


async def test_simultaneous_completions_are_one_wake_up(tmp_path):
    """While the loop is busy any number of operations cost one wake-up."""
    world, loop = World(tmp_path), CountingLoop()
    world.start(loop)
    stored = world.fill(0)
    for op_id in range(1, 301):
        world.performer.perform(VerifySlot(op_id, 0, 16, stored.checksums, urgent=True))
    while len(world.performer._completions) < 300:
        threading.Event().wait(0.001)  # the loop does not run in between
    assert loop.num_wakes == 1
    done = await world.until_idle()
    assert sorted(op_id for _, op_id, _ in done) == list(range(1, 301))
    await world.close()
