"""kvd kills itself during a compaction, at every write point: nothing is lost.

All cases share one directory. Each start compacts one more session and is killed;
afterwards all sessions are complete: with their old spans or with the new ones.
"""

import asyncio
import signal

import pytest
import pytest_asyncio

from kvd.tiers.faults import WritePoint
from tests.fault.ledger import everything_verifies
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import all_clean
from tests.sparse_sessions import make_sparse, read_rows
from tests.synthetic_engine import attached_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIED_S = 30.0
SETTINGS = {
    "KVD_DRAM__BYTES": "4MB",
    "KVD_SSD__BYTES": "16MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_COMPACTION__REST": "10ms",
    "KVD_COMPACTION__MIN_BYTES": "0",
}
NUM_BLOCKS = 8  # of a session, before it is sparse: two afterwards
STEP = 4
POINTS = [
    (WritePoint.JOURNAL_PUT, 2),  # one new block of two is in the journal
    (WritePoint.SEGMENT_SYNCED, 1),  # new blocks are on SSD, and no index row says so
    (WritePoint.JOURNAL_CLEARED, 1),  # the session's row is committed, the old blocks are removed
    (WritePoint.JOURNAL_BODY, 1),
    (WritePoint.EXTENT_WRITTEN, 1),
    (WritePoint.JOURNAL_CLEARED, NUM_BLOCKS),
]
NUM_SHORT = 3  # the rest takes its time


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    """Run a kvd with its engine, and an uncompacted sparse session for each point."""
    kvd = FaultyKvd(tmp_path_factory.mktemp("compaction"), **SETTINGS)
    kvd._environment["KVD_COMPACTION__MAX_WASTE"] = "1"
    await kvd.start()
    async with attached_engine(kvd.runtime_dir) as engine:
        sessions = []
        for number in range(len(POINTS)):
            tokens = list(range(1000 * number, 1000 * number + 16 * NUM_BLOCKS))
            sessions.append(await make_sparse(engine, f"s{number}", tokens, STEP))
        await all_clean(kvd)
        kvd._environment["KVD_COMPACTION__MAX_WASTE"] = "0.5"
        yield kvd, engine, sessions
    assert await kvd.stop() == 0, kvd.log()[-3000:]


def _points(numbers: range):
    return pytest.mark.parametrize(
        "number", numbers, ids=lambda n: f"{POINTS[n][0].value}-{POINTS[n][1]}"
    )


@_points(range(NUM_SHORT))
async def test_killed_while_compacting(world, number):
    """The compaction begins once an engine has named the discards; stored data stays."""
    await _kill_and_compare(world, number)


@pytest.mark.long
@_points(range(NUM_SHORT, len(POINTS)))
async def test_killed_elsewhere_while_compacting(world, number):
    """The same at other moments."""
    await _kill_and_compare(world, number)


async def _kill_and_compare(world, number: int) -> None:
    kvd, engine, sessions = world
    point, nth = POINTS[number]
    await kvd.stop()
    kvd.faults = {"kill_at": [point.value, nth]}
    await kvd.start()
    await engine.client.wait_attached(DIED_S)
    sparse = sessions[number]
    ended = asyncio.ensure_future(kvd.exit_code())
    assert await read_rows(engine, sparse.name, sparse.tokens, sparse.lineage) == sparse.rows
    async with asyncio.timeout(DIED_S):
        assert await ended == -signal.SIGKILL, kvd.log()[-3000:]
    kvd.faults = {}
    await kvd.start()
    await engine.client.wait_attached(DIED_S)
    for session in sessions:
        rows = await read_rows(engine, session.name, session.tokens)
        assert rows == session.rows, f"{session.name} after {point.value}"
    await everything_verifies(kvd)
