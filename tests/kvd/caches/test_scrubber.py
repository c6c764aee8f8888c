"""A run of `kvd verify` inside the daemon: its pace, its progress, one at a time."""

import asyncio
from contextlib import aclosing

import pytest

from kvd.caches.scrubber import Scrubber
from kvd.errors import VerifyRunningError
from tests.kvd.core.turns import ONES, TWOS, A, B, new_world, store

FAST = 1 << 40  # bytes per second: no pause


class WorldCache:
    """A cache over a CacheWorld: its operations end when a caller waits for a change."""

    def __init__(self):
        self.world = new_world()
        self.layout = self.world.engine.layout
        for key, tokens in ((A, ONES), (B, TWOS)):
            store(self.world, key, tokens)

    def act(self, step):
        answer = step(self.world.engine)
        self.world.pump()
        return answer

    def stats(self):
        return self.world.engine.inspection.stats()

    async def wait_for_change(self, _timeout_s):
        self.world.quiesce()
        return True


async def _run(scrubber, *caches, repair=False):
    return [progress async for progress in scrubber.run(caches, repair=repair)]


async def test_all_copies_of_all_caches_are_counted():
    """The sum has both tiers of each cache; only the last progress message is done."""
    *early, last = await _run(Scrubber(FAST), WorldCache(), WorldCache())
    assert (last.report.dram_blocks, last.report.ssd_blocks, last.num_copies) == (4, 4, 8)
    assert last.done
    assert not any(progress.done for progress in early)
    assert all(progress.layout for progress in early)


async def test_corruption_is_reported_and_repaired():
    """A damaged extent is found, and rewritten with repair."""
    cache = WorldCache()
    cache.world.damage_extent(next(iter(cache.world.extents)))
    found = (await _run(Scrubber(FAST), cache))[-1].report
    assert (found.ssd_corrupt, found.repaired) == (1, 0)
    repaired = (await _run(Scrubber(FAST), cache, repair=True))[-1].report
    assert (repaired.ssd_corrupt, repaired.repaired, repaired.lost) == (1, 1, 0)
    cache.world.quiesce()
    assert (await _run(Scrubber(FAST), cache))[-1].report.ssd_corrupt == 0


async def test_a_second_run_is_refused_until_the_first_ends():
    """While a run is active there is no other; one that is given up makes room at once."""
    scrubber, cache = Scrubber(1), WorldCache()
    async with aclosing(scrubber.run([cache], repair=False)) as run:
        await anext(run)
        assert scrubber.is_running
        with pytest.raises(VerifyRunningError):
            await _run(scrubber, cache)
        assert scrubber.is_running
    assert not scrubber.is_running
    async with aclosing(scrubber.run([cache], repair=False)) as run:
        await anext(run)


async def test_a_cancelled_caller_ends_its_run():
    """Cancelled while it waits for its pace, a run leaves the core as if it had ended."""
    scrubber, cache = Scrubber(1), WorldCache()
    begun = asyncio.Event()

    async def watch():
        async with aclosing(scrubber.run([cache], repair=False)) as run:
            async for _ in run:
                begun.set()

    watching = asyncio.create_task(watch())
    await begun.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert not scrubber.is_running
    assert cache.act(lambda core: core.scrubs.begin(repair=False))
