"""kvd kills itself at every named write point, in turn; each start recovers from the kill before.

All cases share one directory and one engine, which stays up. A point is reached by ordinary work,
or because `PREPARATIONS` changed the stopped kvd's files before the start that is killed.
"""

import asyncio
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvd.tiers.faults import WritePoint
from kvd.tiers.volume_identity import ID_NAME
from tests.fault.ledger import Ledger, everything_verifies, flip, nothing_leaks
from tests.faulty_kvd import ERASE_POINTS, FaultyKvd
from tests.sampled import sampled
from tests.synthetic_engine import SyntheticEngine, attached_engine, small_layout

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # Each recovers from the kill before.
    pytest.mark.random_order(disabled=True),
]

NUM_SLOTS = 40
LAYOUT = small_layout()
NAMES = [f"s{number}" for number in range(8)]
DIED_S = 30.0
SIZES = {
    "KVD_DRAM__BYTES": str(NUM_SLOTS * LAYOUT.block_bytes),
    "KVD_SSD__BYTES": "2MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "256KB",
}


def _damage_arena(kvd: FaultyKvd) -> None:
    """Make the next start remove the arena and create another."""
    for path in _arena_files(kvd, ".journal"):
        flip(path, 20)


def _arena_files(kvd: FaultyKvd, suffix: str) -> list[Path]:
    return list((kvd.log_path.parent / "shm").rglob(f"*{suffix}"))


def _shrink(kvd: FaultyKvd) -> None:
    """Make the next start give segments back."""
    kvd._environment["KVD_SSD__BYTES"] = "256KB"


def _age_index(kvd: FaultyKvd) -> None:
    """Make the index look like an older release's: none of its blocks can be found."""
    with sqlite3.connect(kvd.state_dir / "manifest.db") as db:
        db.execute("PRAGMA user_version = 1")
    db.close()


def _forget_volume_id(kvd: FaultyKvd) -> None:
    """Make the volume look like an older release's, which had no ids."""
    for path in kvd.state_dir.glob(f"volumes/*/{ID_NAME}"):
        path.unlink()
    with sqlite3.connect(kvd.state_dir / "manifest.db") as db:
        db.execute("DELETE FROM meta WHERE name LIKE 'volume_id:%'")
    db.close()


PREPARATIONS: dict[WritePoint, Callable[[FaultyKvd], None]] = {
    WritePoint.ARENA_FILES: _damage_arena,
    WritePoint.ARENA_HEADER: _damage_arena,
    WritePoint.ARENA_KEPT: _damage_arena,
    WritePoint.ARENA_REMOVED: _damage_arena,
    WritePoint.VOLUME_ID_WRITTEN: _forget_volume_id,
    WritePoint.VOLUME_ID_KEPT: _forget_volume_id,
    WritePoint.SEGMENT_REMOVED: _shrink,
    WritePoint.INDEX_SET_ASIDE: _age_index,
}
POINTS = [point for point in WritePoint if point not in ERASE_POINTS]
# After the first time there are ever fewer things half done; these happen often.
OFTEN = {
    WritePoint.JOURNAL_FREED: 30,
    WritePoint.JOURNAL_BODY: 30,
    WritePoint.JOURNAL_PUT: 30,
    WritePoint.JOURNAL_CLEARED: 10,
    WritePoint.EXTENT_WRITTEN: 5,
    WritePoint.SEGMENT_SYNCED: 3,
    WritePoint.INDEX_BEGUN: 4,
    WritePoint.INDEX_ROWS: 4,
    WritePoint.INDEX_COMMITTED: 4,
}


class World:
    """A kvd that will be killed, and its engine."""

    def __init__(self, kvd: FaultyKvd, engine: SyntheticEngine) -> None:
        self.kvd = kvd
        self.engine = engine
        self.ledger = Ledger()

    async def die_at(self, point: WritePoint, nth: int) -> None:
        """Start kvd and work with it until it kills itself at a point."""
        kvd, engine = self.kvd, self.engine
        PREPARATIONS.get(point, lambda _: None)(kvd)
        if point is WritePoint.INDEX_SET_ASIDE:
            self.ledger.durable.clear()
        kvd.faults = {"kill_at": [point.value, nth]}
        await kvd.spawn()
        ended = asyncio.ensure_future(kvd.exit_code())
        async with asyncio.timeout(DIED_S):
            while not ended.done():
                attached = asyncio.ensure_future(engine.client.wait_attached(DIED_S))
                await asyncio.wait((ended, attached), return_when=asyncio.FIRST_COMPLETED)
                attached.cancel()
                if not ended.done():
                    await self.ledger.work(engine, NAMES)
                    await asyncio.wait((ended,), timeout=0.05)
        assert ended.result() == -signal.SIGKILL, kvd.log()[-3000:]

    async def recover(self) -> dict[str, int]:
        """Start it again and check what remains."""
        self.kvd.faults = {}
        self.kvd._environment |= SIZES
        await self.kvd.start()
        await self.engine.client.wait_attached(DIED_S)
        found = await self.ledger.judge(self.engine, self.kvd)
        await everything_verifies(self.kvd)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    """Prepare a kvd that is down, with stored sessions."""
    kvd = FaultyKvd(tmp_path_factory.mktemp("points"), **SIZES)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        world = World(kvd, engine)
        await world.ledger.work(engine, NAMES)
        await world.ledger.settle(kvd)
        await kvd.kill()
        yield world
    await kvd.kill()


@pytest.mark.parametrize("name", sampled([point.value for point in POINTS], 8, seed=1))
async def test_killed_at_every_point(world, outcome, name):
    """Stored sessions are served or missed, everything verifies, and nothing leaks."""
    point = WritePoint(name)
    await _kill_and_judge(world, outcome, point, OFTEN.get(point, 1))


@pytest.mark.long
@pytest.mark.parametrize("nth", [2, 3, 5, 8, 13, 21, 34])
@pytest.mark.parametrize("point", list(OFTEN), ids=lambda point: point.value)
async def test_killed_at_later_passes_of_a_point(world, outcome, point, nth):
    """Points that are passed often are tried at later passes, too."""
    await _kill_and_judge(world, outcome, point, nth)


async def _kill_and_judge(world, outcome, point, nth):
    await world.kvd.kill()  # it has checked its invariants until now, or ended at a violated one
    await world.die_at(point, nth)
    outcome(await world.recover())
    await nothing_leaks(world.kvd)
    world.ledger = Ledger()
    await world.ledger.work(world.engine, NAMES)  # data for the next kill to lose
    await world.ledger.settle(world.kvd)
    assert world.kvd.is_running, world.kvd.log()[-3000:]
