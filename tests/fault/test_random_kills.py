"""kvd is killed at random moments, and at random write points, while two engines work with it."""

import asyncio
import random
from collections import Counter

import pytest

from kvd.tiers.faults import WritePoint
from tests.fault.ledger import Ledger, everything_verifies, nothing_leaks
from tests.faulty_kvd import ERASE_POINTS, FaultyKvd
from tests.synthetic_engine import attached_engine, small_layout

LAYOUT = small_layout()
NUM_SLOTS, NUM_EXTENTS = 30, 60  # less than the size of all sessions
MAX_LOAD_S = 0.3
MAX_TOKENS = 150
SIZES = {
    "KVD_DRAM__BYTES": str(NUM_SLOTS * LAYOUT.block_bytes),
    "KVD_SSD__BYTES": str(NUM_EXTENTS * (LAYOUT.block_bytes + 4096)),
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "128KB",
}


async def test_a_few_kills(new_kvd, outcome):
    """A seeded sample of the long test."""
    outcome(await _kill_often(new_kvd(SIZES), seed=1, num_kills=6))


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
async def test_many_kills(new_kvd, outcome, seed):
    """Two hundred kills, fifty in a row on the same files."""
    outcome(await _kill_often(new_kvd(SIZES), seed, num_kills=50))


async def _kill_often(kvd: FaultyKvd, seed: int, num_kills: int) -> Counter[str]:
    die = random.Random(seed)  # noqa: S311  # test data
    ledgers = (Ledger(), Ledger())
    found: Counter[str] = Counter()
    await kvd.start()
    async with (
        attached_engine(kvd.runtime_dir, LAYOUT, "first") as first,
        attached_engine(kvd.runtime_dir, LAYOUT, "second") as second,
    ):
        engines = (first, second)
        for number in range(num_kills):
            work = [
                asyncio.create_task(_work(ledger, engine, die.randrange(1 << 30), 10 * index))
                for index, (ledger, engine) in enumerate(zip(ledgers, engines, strict=True))
            ]
            await _run_and_kill(kvd, die)
            await asyncio.gather(*work)
            kvd.faults = {}
            if die.random() < 0.5:  # the next run ends at a write point, perhaps during its start
                point = die.choice([point for point in WritePoint if point not in ERASE_POINTS])
                kvd.faults = {"kill_at": [point.value, die.randint(1, 60)]}
            await _start(kvd)
            for ledger, engine in zip(ledgers, engines, strict=True):
                found += await _check_stored(ledger, engine, kvd)
            if number % 10 == 9 and not kvd.faults:
                await everything_verifies(kvd)
        await kvd.kill()
        kvd.faults = {}
        await kvd.start()
        for ledger, engine in zip(ledgers, engines, strict=True):
            await engine.client.wait_attached(30)
            found += await ledger.judge(engine, kvd)
        await everything_verifies(kvd)
        await nothing_leaks(kvd)
    assert await kvd.stop() == 0, "its invariants hold"
    return found


async def _run_and_kill(kvd: FaultyKvd, die: random.Random) -> None:
    """Let kvd run for a moment, then kill it, if it has not killed itself."""
    await asyncio.sleep(die.random() * MAX_LOAD_S)
    assert await kvd.kill_it(), kvd.log()[-3000:]


async def _start(kvd: FaultyKvd) -> None:
    """Start kvd, without its faults if they prevent the start."""
    await kvd.spawn()
    if not await kvd.serves_or_is_killed():
        kvd.faults = {}
        await kvd.start()


async def _check_stored(ledger: Ledger, engine, kvd: FaultyKvd) -> Counter[str]:
    """Check what is stored; check nothing if kvd kills itself meanwhile."""
    with ledger.until_refused() as refused:
        await engine.client.wait_attached(2)
        found = await ledger.judge(engine, kvd)
        ledger.forget_missed()
    return Counter() if refused else found


async def _work(ledger: Ledger, engine, seed: int, first: int) -> None:
    """Grow random sessions until kvd is gone; long ones start over under another name."""
    die = random.Random(seed)  # noqa: S311  # test data
    with ledger.until_refused():
        await engine.client.wait_attached(1)
        while True:
            name = f"s{first + die.randrange(8)}"
            while len(ledger.tokens.get(name, ())) > MAX_TOKENS:
                name = f"s{int(name[1:]) + 100}"
            await ledger.grow(engine, name, die.randint(1, 60))
