"""kvd kills itself while it erases a tenant, which is then intact or erased; others are intact.

All cases share one directory. *Intact*: the tenant's key exists, and the rest of its
sessions is served, byte for byte. *Erased*: its key is deleted, and its sessions are misses.
"""

import asyncio
import random
import signal
import sqlite3

import pytest
import pytest_asyncio

from kvd.tiers.faults import WritePoint
from shared.encryption.key_file import new_key, write_key
from tests.fault.ledger import everything_verifies
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import all_clean
from tests.processes import run_cli
from tests.synthetic_engine import attached_engine, key_of, small_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIED_S = 30.0
LAYOUT = small_layout()
SIZES = {
    "KVD_DRAM__BYTES": str(40 * LAYOUT.block_bytes),
    "KVD_SSD__BYTES": "2MB",
    "KVD_SSD__RESERVE_BYTES": "0",
}
NUM_SESSIONS = 3  # of each tenant
NUM_TOKENS = 40
# A start with keys purges the index, too: the erasure is the second time.
POINTS = [
    (WritePoint.JOURNAL_CLEARED, 1),  # the first block has been wiped from memory
    (WritePoint.JOURNAL_CLEARED, 5),
    (WritePoint.SLOT_WIPED, 1),
    (WritePoint.SLOT_WIPED, 20),
    (WritePoint.KEYS_DROPPED, 2),
    (WritePoint.WAL_TRUNCATED, 2),  # erased, but not answered yet
]
SHORT = (0, 3, 4)  # the rest takes its time


class World:
    """A kvd with a key, its engine, and two tenants."""

    def __init__(self, kvd, engine):
        self.kvd = kvd
        self.engine = engine

    async def store(self, tenant):
        for number in range(NUM_SESSIONS):
            await self.engine.store(key_of(f"s{number}", tenant), _tokens(number))
        await all_clean(self.kvd)

    async def served(self, tenant):
        """Return the tokens of each session that are served, byte for byte."""
        loads = [
            await self.engine.load(key_of(f"s{number}", tenant), _tokens(number))
            for number in range(NUM_SESSIONS)
        ]
        return [load.num_tokens for load in loads]

    async def start(self, kill_at=None):
        self.kvd.faults = {"kill_at": kill_at} if kill_at else {}
        await self.kvd.start()
        await self.engine.client.wait_attached(DIED_S)

    async def erase(self):
        flush = ("flush", "--secure", "--tenant", "a", "--yes", "--json")
        return await run_cli(*flush, "--runtime-dir", str(self.kvd.runtime_dir))

    def has_key(self, tenant):
        return self._num_rows("tenant_keys", tenant) > 0

    def has_sessions(self, tenant):
        return self._num_rows("sessions", tenant) > 0

    def _num_rows(self, table, tenant):
        db = sqlite3.connect(f"file:{self.kvd.state_dir / 'manifest.db'}?mode=ro", uri=True)
        try:
            sql = f"SELECT count(*) FROM {table} WHERE tenant = ?"  # noqa: S608
            return db.execute(sql, (tenant,)).fetchone()[0]
        finally:
            db.close()

    async def judge(self, outcome):
        """Check a kvd that has just been killed while it erased tenant a, and return its state."""
        has_key = self.has_key("a")
        assert has_key or not self.has_sessions("a"), "their rows go before the key"
        await self.start()
        served = await self.served("a")
        assert has_key or served == [0] * NUM_SESSIONS, "without a key nothing is served"
        assert await self.served("b") == [NUM_TOKENS] * NUM_SESSIONS, "others are not concerned"
        await everything_verifies(self.kvd)
        code, stdout, stderr = await self.erase()
        assert code == 0, stdout + stderr
        assert not self.has_key("a")
        assert not self.has_sessions("a")
        assert await self.served("a") == [0] * NUM_SESSIONS
        outcome("as before" if has_key else "erased")
        return has_key


def _tokens(number):
    return list(range(1000 * number, 1000 * number + NUM_TOKENS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    """Store tenant b's sessions for good; each test stores a's."""
    directory = tmp_path_factory.mktemp("erase")
    key_file = directory / "key"
    write_key(key_file, new_key())
    kvd = FaultyKvd(directory, KVD_ENCRYPTION__KEY_FILE=str(key_file), **SIZES)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        world = World(kvd, engine)
        await world.store("b")
        yield world
    assert await kvd.stop() == 0, kvd.log()[-3000:]


def _points(numbers):
    return pytest.mark.parametrize(
        "number", numbers, ids=lambda n: f"{POINTS[n][0].value}-{POINTS[n][1]}"
    )


@_points(SHORT)
async def test_killed_while_erasing(world, outcome, number):
    """Until the keys are deleted nothing is erased, afterwards everything."""
    await _kill_at(world, outcome, number)


@pytest.mark.long
@_points([number for number in range(len(POINTS)) if number not in SHORT])
async def test_killed_elsewhere_while_erasing(world, outcome, number):
    """The same at other moments."""
    await _kill_at(world, outcome, number)


async def _kill_at(world, outcome, number):
    point, nth = POINTS[number]
    await world.store("a")
    await world.kvd.stop()
    await world.start([point.value, nth])
    code, _, _ = await world.erase()
    assert code != 0, "nobody is told that it is erased"
    async with asyncio.timeout(DIED_S):
        assert await world.kvd.exit_code() == -signal.SIGKILL, world.kvd.log()[-3000:]
    is_as_before = await world.judge(outcome)
    assert is_as_before == (point not in (WritePoint.KEYS_DROPPED, WritePoint.WAL_TRUNCATED))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
async def test_killed_at_any_moment_while_erasing(world, outcome, seed):
    """Moments without a write point count, too; an engine loads and stores for the same tenant."""
    die = random.Random(seed)  # noqa: S311  # test data
    await world.store("a")
    erasing = asyncio.ensure_future(world.erase())
    using = asyncio.ensure_future(_use(world))
    await asyncio.sleep(die.uniform(0, 0.3))
    await world.kvd.kill()
    await erasing
    using.cancel()
    await asyncio.gather(using, return_exceptions=True)
    await world.judge(outcome)


async def _use(world):
    while True:
        await world.served("a")
        await world.store("a")
