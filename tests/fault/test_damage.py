"""Damaged bytes, cut files and other releases' files cause counted misses, never wrong bytes.

Each case stores sessions, so that they are in both tiers, damages files, and loads everything. All
cases share one directory and one engine. Damage shows only if there is no other copy; so cases that
damage SSD remove the arena as well, as a reboot would.
"""

import sqlite3
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kvd.tiers.journal import HEADER_BYTES
from tests.fault.ledger import Ledger, everything_verifies, flip, nothing_leaks
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import all_clean, reader_stats
from tests.processes import run_cli
from tests.sampled import sampled
from tests.synthetic_engine import attached_engine, small_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAYOUT = small_layout()
NUM_SLOTS = 64
EXTENT_BYTES = LAYOUT.block_bytes + 4096
NAMES = [f"s{number}" for number in range(6)]
NUM_TOKENS = 32  # two full blocks per session
NUM_BLOCKS = 2 * len(NAMES)
SIZES = {
    "KVD_DRAM__BYTES": str(NUM_SLOTS * LAYOUT.block_bytes),
    "KVD_SSD__BYTES": str(64 * EXTENT_BYTES),
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "512KB",
    "KVD_INTEGRITY__VERIFY_ON_LOAD": "false",
}
NEWER = struct.pack("<I", 2)
OLDER = struct.pack("<I", 0)


class Files:
    """The files of a kvd."""

    def __init__(self, kvd: FaultyKvd) -> None:
        self._kvd = kvd
        self.index = kvd.state_dir / "manifest.db"

    def slots(self) -> Path:
        """Return the arena's file."""
        return self._arena("slots")

    def journal(self) -> Path:
        """Return its journal."""
        return self._arena("journal")

    def segment(self) -> Path:
        """Return the volume's only segment."""
        (path,) = (self._kvd.state_dir / "volumes").rglob("*.segment")
        return path

    def forget_dram(self) -> None:
        """Remove the arena, as a reboot does."""
        self.slots().unlink()
        self.journal().unlink()

    def _arena(self, part: str) -> Path:
        (path,) = (self._kvd.log_path.parent / "shm").rglob(f"*.{part}")
        return path


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _halve(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 // 4096 * 4096)


def _flip_slots(files: Files) -> None:
    for slot_id in range(NUM_SLOTS):
        flip(files.slots(), slot_id * LAYOUT.block_bytes + 5)


def _flip_records(files: Files) -> None:
    record_bytes = (files.journal().stat().st_size - HEADER_BYTES) // NUM_SLOTS
    for slot_id in range(NUM_SLOTS):
        flip(files.journal(), HEADER_BYTES + slot_id * (record_bytes // 64 * 64) + 30)


def _flip_extents(files: Files, offset: int) -> None:
    for extent in range(files.segment().stat().st_size // EXTENT_BYTES):
        flip(files.segment(), extent * EXTENT_BYTES + offset)


def _version_extents(files: Files, version: bytes) -> None:
    for extent in range(files.segment().stat().st_size // EXTENT_BYTES):
        _write(files.segment(), extent * EXTENT_BYTES + 4, version)


def _version_index(files: Files, version: int) -> None:
    db = sqlite3.connect(files.index)
    db.execute(f"PRAGMA user_version = {version}")
    db.commit()
    db.close()


def _flip_index(files: Files) -> None:
    for offset in range(4096 + 300, files.index.stat().st_size, 1000):
        flip(files.index, offset)


@dataclass(frozen=True)
class Case:
    """One kind of damage.

    Attributes:
        damage: done while kvd is down.
        served: the tier that serves every session afterwards; "" if nothing is promised.
        counter: the counter of corrupt copies that must increase.
        logged: an event that must be in the log.
        is_unavailable: whether the layout is served again only after an operator accepts the loss.
    """

    damage: Callable[[Files], object]
    served: str = ""
    counter: str = ""
    logged: str = ""
    is_unavailable: bool = False


def _without_dram(damage: Callable[[Files], object]) -> Callable[[Files], object]:
    def both(files: Files) -> None:
        damage(files)
        files.forget_dram()

    return both


def _slots_and_extents(files: Files) -> None:
    _flip_slots(files)
    _flip_extents(files, 4096 + 5)


CASES = {
    "arena: a byte of every slot": Case(_flip_slots, "ssd", "blocks_corrupt_dram"),
    "arena: a byte of every record": Case(_flip_records, "ssd"),
    "arena: header of the journal": Case(
        lambda files: flip(files.journal(), 20), "ssd", logged="arena_discarded"
    ),
    "arena: older version": Case(
        lambda files: _write(files.journal(), 8, OLDER), "ssd", logged="arena_discarded"
    ),
    "arena: newer version": Case(
        lambda files: _write(files.journal(), 8, NEWER), "ssd", logged="arena_discarded"
    ),
    "arena: slots cut": Case(lambda files: _halve(files.slots()), "ssd", logged="arena_discarded"),
    "arena: journal cut": Case(
        lambda files: _halve(files.journal()), "ssd", logged="arena_discarded"
    ),
    "arena: journal gone": Case(
        lambda files: files.journal().unlink(), "ssd", logged="arena_discarded"
    ),
    "arena: gone": Case(Files.forget_dram, "ssd"),
    "both tiers: a byte of every block": Case(_slots_and_extents, "missed", "blocks_corrupt_ssd"),
    "segment: a byte of every slice": Case(
        _without_dram(lambda files: _flip_extents(files, 4096 + 5)),
        "missed",
        "blocks_corrupt_ssd",
    ),
    "segment: a byte of every header": Case(
        _without_dram(lambda files: _flip_extents(files, 70)), "missed", "blocks_corrupt_ssd"
    ),
    "segment: older version": Case(
        _without_dram(lambda files: _version_extents(files, OLDER)),
        "missed",
        "blocks_corrupt_ssd",
    ),
    "segment: newer version": Case(
        _without_dram(lambda files: _version_extents(files, NEWER)),
        "missed",
        "blocks_corrupt_ssd",
    ),
    "segment: cut": Case(
        _without_dram(lambda files: _write_nothing_after(files.segment(), 5 * EXTENT_BYTES + 99)),
        logged="blocks_given_up",
        is_unavailable=True,
    ),
    "segment: gone": Case(
        _without_dram(lambda files: files.segment().unlink()),
        "missed",
        logged="blocks_given_up",
        is_unavailable=True,
    ),
    "index: bytes of every page": Case(_flip_index),
    "index: cut": Case(lambda files: _halve(files.index)),
    "index: no database": Case(
        lambda files: files.index.write_bytes(b"no database" * 999),
        "missed",
        "",
        "manifest_corrupt",
    ),
    "index: older version": Case(
        lambda files: _version_index(files, 1), "missed", "", "manifest_older"
    ),
    "index: gone": Case(lambda files: files.index.unlink(), "missed"),
}


def _write_nothing_after(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    """Run (kvd, engine), and start them again if a test has failed."""
    kvd = FaultyKvd(tmp_path_factory.mktemp("damage"), **SIZES)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        yield kvd, engine
    await kvd.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def stored(served):
    """Return (kvd, engine, ledger) with sessions in both tiers and nothing else."""
    kvd, engine = served
    if not kvd.is_running:  # an earlier test has failed
        kvd._environment |= SIZES
        await kvd.start()
    await engine.client.wait_attached(30)
    await nothing_leaks(kvd)
    ledger = Ledger()
    for name in NAMES:
        await ledger.grow(engine, name, NUM_TOKENS)
    await all_clean(kvd)
    return kvd, engine, ledger


@pytest.mark.parametrize("name", sampled(list(CASES), 8, seed=1))
async def test_damaged(stored, outcome, name):
    """The damage is done while kvd is down."""
    kvd, engine, ledger = stored
    case, log_bytes = CASES[name], len(kvd.log())
    assert await kvd.stop() == 0
    case.damage(Files(kvd))
    await kvd.start()
    if case.is_unavailable:
        name = LAYOUT.fingerprint[:8]
        accept = ("reopen", name, "--accept-loss", "--yes", "--runtime-dir", str(kvd.runtime_dir))
        assert (await run_cli(*accept))[0] == 0
    await engine.client.wait_attached(30)
    found = await ledger.judge(engine, kvd)
    outcome(found)
    if case.served:
        assert set(found) == {case.served}
    counters = (await reader_stats(kvd)).layouts[0].counters
    if case.counter:
        assert counters[case.counter] > 0
    assert case.logged in kvd.log()[log_bytes:]
    # Once stored again, every session is complete.
    for session in NAMES:
        await ledger.store(engine, session, ledger.tokens[session])
    assert sum((await ledger.judge(engine, kvd)).values()) == len(NAMES)
    await everything_verifies(kvd)


async def test_a_newer_index_is_refused(stored, outcome):
    """Started on the files of a newer release, kvd refuses with a reason and changes nothing."""
    kvd, engine, ledger = stored
    assert await kvd.stop() == 0
    _version_index(Files(kvd), 99)
    await kvd.spawn()
    assert await kvd.exit_code() != 0
    assert "has schema 99" in kvd.log()
    _version_index(Files(kvd), 2)
    await kvd.start()
    await engine.client.wait_attached(30)
    found = await ledger.judge(engine, kvd)
    outcome(f"refused; then {dict(found)}")
    assert set(found) == {"dram"}


async def test_arena_damaged_while_up_is_found_by_a_scrub(stored, outcome):
    """`kvd verify` reports the copies and drops them; they are read from SSD."""
    kvd, engine, ledger = stored
    _flip_slots(Files(kvd))
    code, _, stderr = await run_cli("verify", "--runtime-dir", str(kvd.runtime_dir))
    assert code == 1
    assert f"{NUM_BLOCKS} copies" in stderr
    found = await ledger.judge(engine, kvd)
    outcome(found)
    assert set(found) == {"ssd"}
    await everything_verifies(kvd)


async def test_arena_damaged_while_up_is_found_by_verify_on_load(stored, outcome):
    """With integrity.verify_on_load a load that finds damage in DRAM gets the bytes from SSD."""
    kvd, engine, ledger = stored
    assert await kvd.stop() == 0
    kvd._environment["KVD_INTEGRITY__VERIFY_ON_LOAD"] = "true"
    await kvd.start()
    kvd._environment |= SIZES
    await engine.client.wait_attached(30)
    assert set(await ledger.judge(engine, kvd)) == {"dram"}
    _flip_slots(Files(kvd))
    found = await ledger.judge(engine, kvd)
    outcome(found)
    assert sum(found[tier] for tier in ("dram", "ssd", "dram+ssd")) == len(NAMES)
    assert (await reader_stats(kvd)).layouts[0].counters["blocks_corrupt_dram"] == NUM_BLOCKS


async def test_segment_damaged_while_up_is_repaired_from_dram(stored, outcome):
    """`kvd verify --repair` rewrites corrupt extents while the good copy is in DRAM."""
    kvd, engine, ledger = stored
    _flip_extents(Files(kvd), 4096 + 5)
    at = ("--runtime-dir", str(kvd.runtime_dir))
    assert (await run_cli("verify", *at))[0] == 1
    assert (await run_cli("verify", "--repair", *at))[0] == 0
    await everything_verifies(kvd)
    assert await kvd.stop() == 0
    Files(kvd).forget_dram()
    await kvd.start()
    await engine.client.wait_attached(30)
    found = await ledger.judge(engine, kvd)
    outcome(found)
    assert set(found) == {"ssd"}
