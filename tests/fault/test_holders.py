"""Engines are stopped or killed in the middle of a store, while kvd runs, dies and restarts.

An engine that may still be writing keeps its slots, even if others need room; nothing else is
affected.
"""

import json
import signal
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from tests.fault.ledger import Ledger, everything_verifies, nothing_leaks
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import all_clean, eventually, reader_stats, until_indexed
from tests.processes import run_cli
from tests.synthetic_engine import attached_engine, small_layout
from tests.warm_engine import driven_engine

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAYOUT = small_layout()
NUM_SLOTS = 16
OPEN_SLOTS = 4  # of the fifty tokens that a driven engine stores
MANY = [f"s{number}" for number in range(30)]  # far more than the arena holds
SIZES = {
    "KVD_DRAM__BYTES": str(NUM_SLOTS * LAYOUT.block_bytes),
    "KVD_SSD__BYTES": "4MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "1MB",
    "KVD_LIMITS__DRAIN": "300ms",  # leases are held over restarts here
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory):
    """Run one kvd for all tests here."""
    kvd = FaultyKvd(tmp_path_factory.mktemp("holders"), **SIZES)
    await kvd.start()
    yield kvd
    assert await kvd.stop() == 0, "its invariants hold"


@pytest_asyncio.fixture(loop_scope="module")
async def kvd(started):
    """Return that kvd with nothing stored; check that a test leaves nothing behind."""
    if not started.is_running:
        await started.start()
    yield started
    if started.is_running:
        await everything_verifies(started)
        await nothing_leaks(started)


async def count_quarantined(kvd) -> list[int]:
    """Return [quarantined leases, quarantined slots]."""
    (layout,) = (await reader_stats(kvd)).layouts
    return [layout.orphan_leases, layout.quarantined_slots]


async def leases(kvd) -> list[dict]:
    """Return the output of `kvd leases --json`."""
    code, stdout, stderr = await run_cli("leases", "--json", "--runtime-dir", str(kvd.runtime_dir))
    assert code == 0, stderr
    return json.loads(stdout)["leases"]


async def others_are_unharmed(kvd):
    """Check that another engine can store much more than the arena holds, and finds it again."""
    ledger = Ledger()
    async with attached_engine(kvd.runtime_dir, LAYOUT, "other") as other:
        for name in MANY:
            await ledger.grow(other, name, 50)
        found = await ledger.judge(other, kvd)
    assert found["missed"] == found["cut"] == 0
    return found


async def test_a_stopped_writer_keeps_its_slots_over_a_kill_of_kvd(kvd, outcome):
    """Its slots are quarantined and shown; once resumed it learns of the loss and frees them."""
    async with driven_engine(kvd.runtime_dir) as writer:
        assert await writer.ask("begin", "a")
        await until_indexed(kvd)
        writer.process.send_signal(signal.SIGSTOP)
        assert await kvd.kill_it()
        await kvd.start()
        assert await count_quarantined(kvd) == [1, OPEN_SLOTS]
        (lease,) = await leases(kvd)
        assert (lease["pid"], lease["process_status"]) == (writer.process.pid, "stopped")
        assert lease["quarantined"]
        outcome(await others_are_unharmed(kvd))
        assert await count_quarantined(kvd) == [1, OPEN_SLOTS]
        writer.process.send_signal(signal.SIGCONT)
        await writer.attached(2)
        assert await writer.ask("finish") == ["lease_lost"]
        assert await leases(kvd) == []
        assert await writer.store("a") == [50]
        assert await writer.load("a") == [(50, ["dram"])]


async def test_a_stopped_writer_is_killed_by_the_operator(kvd, outcome):
    """`kvd leases --kill` frees the slots of a hanging process; none of its store is visible."""
    async with driven_engine(kvd.runtime_dir) as writer:
        await writer.ask("begin", "a")
        await until_indexed(kvd)
        writer.process.send_signal(signal.SIGSTOP)
        assert await kvd.kill_it()
        await kvd.start()
        assert await count_quarantined(kvd) == [1, OPEN_SLOTS]
        pid = str(writer.process.pid)
        code, stdout, stderr = await run_cli(
            "leases", "--kill", pid, "--yes", "--runtime-dir", str(kvd.runtime_dir)
        )
        assert code == 0, stderr
        assert f"{OPEN_SLOTS} slots" in stdout
        await eventually(lambda: count_quarantined(kvd), [0, 0])
        assert await writer.process.wait() == -signal.SIGKILL
    assert await leases(kvd) == []
    async with driven_engine(kvd.runtime_dir) as other:
        assert await other.load("a") == [(0, [])]
    outcome(await others_are_unharmed(kvd))


@pytest.mark.parametrize("first", ["kvd", "engine"])
async def test_a_writer_killed_while_kvd_is_down(kvd, outcome, first):
    """Both are killed, in either order: no slot stays with a dead process."""
    async with driven_engine(kvd.runtime_dir) as writer:
        await writer.store("a")
        await all_clean(kvd)
        await writer.ask("begin", "b")
        if first == "kvd":
            assert await kvd.kill_it()
        writer.process.kill()
        await writer.process.wait()
        if first == "engine":
            assert await kvd.kill_it()
    await kvd.start()
    assert await leases(kvd) == []
    async with driven_engine(kvd.runtime_dir) as other:
        loads = await other.load("a", "b")
        outcome(f"stored {loads[0]}, not completed {loads[1]}")
        assert loads == [(50, ["dram"]), (0, [])]


@pytest.mark.parametrize("order", ["kvd, engine", "engine, kvd"])
async def test_restarts_in_every_order(kvd, outcome, order):
    """Both restart, gracefully or killed, and every stored session is served."""
    names = ("a", "b", "c")
    for kill in (False, True):
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(driven_engine(kvd.runtime_dir))
            assert await engine.store(*names) == [50] * len(names)
            await all_clean(kvd)  # a kill would lose a block that is not hashed yet
            for process in order.split(", "):
                if process == "kvd":
                    await (kvd.kill() if kill else kvd.stop())
                    await kvd.start()
                else:
                    await stack.aclose()
                    engine = await stack.enter_async_context(driven_engine(kvd.runtime_dir))
            loads = await engine.load(*names)
            assert loads == [(50, ["dram"])] * len(names)
    outcome("served from dram each time")


async def test_an_unfinished_store_is_lost_with_its_kvd(kvd, outcome):
    """None of it is visible, its writer keeps the slots until it frees them, and stores again."""
    for end in (kvd.stop, kvd.kill):
        name = f"{end.__name__}-over"
        async with driven_engine(kvd.runtime_dir) as writer:
            await writer.ask("begin", name)
            await end()
            await kvd.start()
            await writer.attached(2)
            assert len(await leases(kvd)) == 1
            assert await writer.load(name) == [(0, [])]
            assert await writer.ask("finish") == ["lease_lost"]
            assert await leases(kvd) == []
            assert await writer.store(name) == [50]
            assert await writer.load(name) == [(50, ["dram"])]
    outcome("refused and stored again, after SIGTERM and after SIGKILL")


async def test_garbage_in_every_slot(kvd, outcome):
    """With verify_on_load an engine that fills memory with garbage costs others misses at most."""
    await kvd.stop()
    kvd._environment["KVD_INTEGRITY__VERIFY_ON_LOAD"] = "true"
    await kvd.start()
    kvd._environment |= SIZES | {"KVD_INTEGRITY__VERIFY_ON_LOAD": "false"}
    async with (
        driven_engine(kvd.runtime_dir) as rogue,
        attached_engine(kvd.runtime_dir, LAYOUT, "good") as good,
    ):
        ledger = Ledger()
        for seed in range(3):
            for name in MANY[:4]:
                await ledger.grow(good, name, 20)
            await all_clean(kvd)  # hashed: before that kvd cannot detect the change
            (num_bytes,) = await rogue.ask("scribble", seed)
            assert num_bytes >= NUM_SLOTS * LAYOUT.block_bytes
            found = await ledger.judge(good, kvd)
        outcome(found)
        (layout,) = (await reader_stats(kvd)).layouts
        assert layout.counters["blocks_corrupt_dram"] > 0
        rogue.process.kill()
    assert kvd.is_running
    await others_are_unharmed(kvd)
