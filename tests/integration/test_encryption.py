"""A real kvd with a key: its files, and what happens when keys change, are lost or deleted."""

import asyncio
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest_asyncio

from kvd.core.records.extent_shape import ExtentShape
from shared.encryption.key_file import read_key
from shared.types.errors import ReportedError
from tests.fault.ledger import flip
from tests.kvd_polling import all_clean, reader_stats
from tests.processes import KvdProcess, run_cli
from tests.synthetic_engine import (
    CALL_S,
    SyntheticEngine,
    attached_engine,
    encode,
    key_of,
    small_layout,
)

ATTACH_S = 30.0
REFUSED = 78
LAYOUT = small_layout()
SIZES = ("--dram", "1MB", "--ssd", "4MB")


class World:
    """A kvd and its engine.

    Sessions have the tokens of their number, which no other session has.
    """

    def __init__(self, kvd: KvdProcess, engine: SyntheticEngine) -> None:
        self.kvd = kvd
        self.engine = engine

    async def store(self, tenant: str, number: int) -> None:
        """Store a session and have it written to SSD."""
        await self.engine.store(key_of(f"s{number}", tenant), tokens_of(number))
        await all_clean(self.kvd)

    async def load(self, tenant: str, number: int):
        """Load a session; compare every byte."""
        return await self.engine.load(key_of(f"s{number}", tenant), tokens_of(number))

    async def is_stored(self, tenant: str, number: int) -> bool:
        found = await self.load(tenant, number)
        assert found.num_tokens in (0, len(tokens_of(number)))
        return bool(found.num_tokens)

    async def restart(self) -> None:
        await self.kvd.stop()
        await self.kvd.start()
        await self.engine.client.wait_attached(ATTACH_S)

    async def refusal(self) -> str:
        """Start kvd, which must be refused, and return the reason."""
        await self.kvd.stop()
        before = len(self.kvd.log())
        await self.kvd.spawn()
        assert await self.kvd.exit_code() == REFUSED
        return self.kvd.log()[before:]

    async def cli(self, *arguments: str) -> tuple[int, str]:
        code, stdout, stderr = await run_cli(*arguments, "--runtime-dir", str(self.kvd.runtime_dir))
        return code, stdout + stderr

    async def erase(self, *arguments: str) -> tuple[int, str]:
        return await self.cli("flush", "--secure", *arguments, "--yes", "--json")

    def use_key(self, path: Path | None, *, enabled: bool = True) -> None:
        self.kvd._environment["KVD_ENCRYPTION__KEY_FILE"] = str(path or "")
        self.kvd._environment["KVD_ENCRYPTION__ENABLED"] = str(enabled).lower()

    def on_disk(self, number: int) -> set[str]:
        """Return names of the files that have tokens or rows of a session in plain."""
        return _files_with(self.kvd.state_dir, number)

    def in_memory(self, number: int) -> set[str]:
        """Return the same for the arena, with its journal."""
        return _files_with(self.kvd.log_path.parent / "shm", number)


def tokens_of(number: int) -> list[int]:
    first = 1_000_000 * (number + 1)
    return list(range(first, first + 40))


def _files_with(directory: Path, number: int) -> set[str]:
    """Return the files with two token ids side by side, or with the first row of a layer's keys."""
    first = tokens_of(number)[0]
    row = np.asarray([first, 0, 0, 0] * 2, "<u4").tobytes()
    traces = (encode(tokens_of(number)[2:4]), row)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.suffix for path in files if any(x in path.read_bytes() for x in traces)}


@pytest_asyncio.fixture
async def world(tmp_path):
    """Run a kvd without a key and without sessions; DRAM is kept over restarts."""
    kvd = KvdProcess(tmp_path, SIZES)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        yield World(kvd, engine)
    assert await kvd.stop() == 0, kvd.log()[-3000:]


@pytest_asyncio.fixture
async def key(world):
    """Write a key file."""
    path = world.kvd.log_path.parent / "master.key"
    code, stdout, _ = await run_cli("key", "new", str(path))
    assert code == 0
    assert path.read_text().strip() not in stdout
    return path


@pytest_asyncio.fixture
async def encrypted(world, key):
    """Let the kvd encrypt, with a session of tenant b stored."""
    world.use_key(key)
    world.kvd._environment["KVD_DRAM__KEEP"] = "file"
    await world.restart()
    await world.store("b", 6)
    return world


async def test_without_a_key_a_secure_flush_is_refused(world):
    """Blocks are plain, and kvd could not keep the promise of a secure flush."""
    await world.store("old", 1)
    assert world.on_disk(1) == {".segment"}
    code, said = await world.erase("--all")
    assert code == 5
    assert "encryption.key_file" in said
    assert await world.is_stored("old", 1)


async def test_turning_encryption_on_keeps_plain_blocks(world, key):
    """Old blocks are served, new ones are encrypted; no tenant can be erased by its key alone."""
    await world.store("old", 1)
    world.use_key(key)
    world.kvd._environment["KVD_DRAM__KEEP"] = "none"  # from SSD
    await world.restart()
    assert (await world.load("old", 1)).tiers == {"ssd"}
    await world.store("a", 2)
    assert world.on_disk(2) == set()
    code, said = await world.erase("--tenant", "old")
    assert code == 5
    assert "kvd flush --secure --all" in said
    found = (await reader_stats(world.kvd)).encryption
    assert (found.encrypting, found.may_have_plain, found.tenants) == (True, True, 2)
    _, said = await world.cli("stats")
    assert f"encrypts (key {found.key[:8]})" in " ".join(said.split())
    await world.restart()
    assert (await world.load("a", 2)).tiers == {"ssd"}
    assert (await world.load("old", 1)).tiers == {"ssd"}


async def test_erasing_everything_removes_plain_blocks(world, key):
    """Afterwards neither disk nor memory has any part of any session, encrypted or not."""
    await world.store("old", 1)
    world.use_key(key)
    await world.restart()
    await world.store("a", 2)
    world.kvd._environment["KVD_DRAM__KEEP"] = "file"
    await world.restart()
    await world.store("old", 3)
    assert world.in_memory(3)
    code, said = await world.erase("--all")
    assert (code, '"old"' in said, '"a"' in said) == (0, True, True)
    for number in (1, 2, 3):
        assert world.on_disk(number) == world.in_memory(number) == set()
    found = [await world.is_stored(t, n) for t, n in (("old", 1), ("a", 2), ("old", 3))]
    assert found == [False] * 3
    encryption = (await reader_stats(world.kvd)).encryption
    assert (encryption.may_have_plain, encryption.key) == (
        False,
        read_key(str(key)).fingerprint,
    )


async def test_erasing_a_tenant_leaves_the_others(encrypted):
    """Its sessions are misses, now and later, and no file has its key; the others' are hits."""
    world = encrypted
    for number in (4, 5):
        await world.store("a", number)
    secret = _wrapped_keys(world, "a")
    assert _files_having(world, secret)
    code, _ = await world.erase("--tenant", "a", "--dry-run")
    assert code == 0
    assert await world.is_stored("a", 4)
    code, said = await world.erase("--tenant", "a")
    assert (code, '"sessions": 2' in said) == (0, True)
    assert not _files_having(world, secret)
    assert world.in_memory(4) == world.in_memory(5) == set()
    assert world.in_memory(6)
    for _ in range(2):
        found = [await world.is_stored(t, n) for t, n in (("a", 4), ("a", 5), ("b", 6))]
        assert found == [False, False, True]
        await world.restart()
    await world.store("a", 4)
    assert await world.is_stored("a", 4)
    assert _wrapped_keys(world, "a") != secret


async def test_engines_run_on_while_a_tenant_is_erased(encrypted):
    """Loads meanwhile are complete, refused or missed; after the answer they are misses."""
    world = encrypted
    for number in range(10, 16):
        await world.store("a", number)
    done = asyncio.Event()
    loading = asyncio.ensure_future(_load_until(world, done))
    try:
        code, said = await world.erase("--tenant", "a")
        assert code == 0, said
        for number in range(10, 16):
            assert not await world.is_stored("a", number)
    finally:
        done.set()  # otherwise the loads of a failed test would never end
    assert await loading
    assert await world.is_stored("b", 6)


async def _load_until(world, done) -> int:
    num_loads = 0
    while not done.is_set():
        for number in range(10, 16):
            # the tenant is being erased, or its lease is lost by that
            with suppress(ReportedError):
                await _load_and_complete(world.engine, number)
            num_loads += 1
    return num_loads


async def _load_and_complete(engine: SyntheticEngine, number: int) -> None:
    """Load a session and complete: only then do the bytes count.

    Before, memory may have anything.
    """
    grant = await engine.client.prepare_load(
        key_of(f"s{number}", "a"), encode(tokens_of(number)), 0, CALL_S
    )
    wrong: list[AssertionError] = []
    for layer_index in range(len(LAYOUT.layers)):
        for span in grant.spans:
            try:
                engine._check(grant.arena, span, tokens_of(number), layer_index)
            except AssertionError as error:
                wrong.append(error)
    await engine.client.complete_load(grant)
    assert not wrong


async def test_a_single_session_cannot_be_erased(encrypted):
    """Only a whole tenant has a key of its own."""
    code, said = await encrypted.cli("flush", "s6", "--tenant", "b", "--secure", "--yes")
    assert code != 0
    assert await encrypted.is_stored("b", 6), said


async def test_kvd_does_not_start_without_its_key(encrypted, key):
    """Nor does it with another key.

    It names the key it needs, changes nothing, and shows no key.
    """
    world, other = encrypted, key.with_name("other.key")
    await run_cli("key", "new", str(other))
    world.use_key(other)
    said = await world.refusal()
    assert "not the one" in said
    world.use_key(None)
    assert "encryption.key_file" in await world.refusal()
    key.chmod(0o644)
    world.use_key(key)
    assert "chmod 600" in await world.refusal()
    key.chmod(0o600)
    await world.restart()
    assert await world.is_stored("b", 6)
    for path in (key, other):
        assert path.read_text().strip() not in world.kvd.log()


async def test_a_key_is_rotated(encrypted, key, monkeypatch):
    """The sessions' keys are wrapped by another key while kvd is down.

    The old key opens nothing.
    """
    world, new = encrypted, key.with_name("new.key")
    await run_cli("key", "new", str(new))
    state = ("--state-dir", str(world.kvd.state_dir))
    code, _, stderr = await run_cli("key", "rotate", str(new), "--old", str(key), *state)
    assert (code, "stop that" in stderr) == (REFUSED, True)
    nowhere = world.kvd.state_dir / "nowhere"
    mistyped = ("--state-dir", str(nowhere))
    code, _, stderr = await run_cli("key", "rotate", str(new), "--old", str(key), *mistyped)
    assert (code, f"{nowhere} does not exist" in stderr) == (REFUSED, True)
    assert not nowhere.exists()
    await world.kvd.stop()
    old_secret = _wrapped_keys(world, "b")
    unset = await run_cli("key", "rotate", str(new), *state)
    assert (unset[0], "with --old" in unset[2]) == (REFUSED, True)
    monkeypatch.setenv("KVD_ENCRYPTION__KEY_FILE", "kvd-key")
    unseen = await run_cli("key", "rotate", str(new), *state)
    assert (unseen[0], "credential 'kvd-key'" in unseen[2], "with --old" in unseen[2]) == (
        *(REFUSED, True, True),
    )
    wrong = await run_cli("key", "rotate", str(key), "--old", str(new), *state)
    assert (wrong[0], "--old" in wrong[2]) == (REFUSED, True)
    monkeypatch.chdir(key.parent)  # bare names are files there
    code, _, stderr = await run_cli("key", "rotate", new.name, "--old", key.name, *state)
    assert code == 0, stderr
    assert not _files_having(world, old_secret)
    assert "not the one" in await world.refusal()
    world.use_key(new)
    world.kvd._environment["KVD_DRAM__KEEP"] = "none"
    await world.restart()
    assert (await world.load("b", 6)).tiers == {"ssd"}


async def test_damage_is_a_counted_miss(encrypted):
    """An encrypted block with a flipped bit is not served, and the next one is."""
    world = encrypted
    world.kvd._environment["KVD_DRAM__KEEP"] = "none"
    await world.store("b", 8)
    await world.kvd.stop()
    (segment,) = world.kvd.state_dir.rglob("*.segment")
    extent_bytes = ExtentShape(LAYOUT).full_bytes
    for offset in range(extent_bytes // 3 + 100, segment.stat().st_size, extent_bytes):
        flip(segment, offset)
    await world.kvd.start()
    await world.engine.client.wait_attached(ATTACH_S)
    found = [await world.load("b", number) for number in (6, 8)]
    assert {load.num_tokens for load in found} == {0}
    (layout,) = (await reader_stats(world.kvd)).layouts
    assert layout.counters["blocks_corrupt_ssd"] >= len(found)
    for number in (6, 8):
        await world.store("b", number)
    await world.restart()
    assert (await world.load("b", 6)).tiers == {"ssd"}


async def test_turning_encryption_off_keeps_encrypted_blocks(encrypted, key):
    """With the key present and encryption off, old blocks are served and new ones are plain."""
    world = encrypted
    world.use_key(key, enabled=False)
    world.kvd._environment["KVD_DRAM__KEEP"] = "none"
    await world.restart()
    await world.store("b", 7)
    assert world.on_disk(7) == {".segment"}
    await world.restart()
    for number in (6, 7):
        assert (await world.load("b", number)).tiers == {"ssd"}
    code, _ = await world.erase("--all")
    assert code == 0
    assert world.on_disk(7) == set()
    world.use_key(None)
    await world.restart()
    assert not await world.is_stored("b", 6)


def _wrapped_keys(world, tenant: str) -> bytes:
    import sqlite3

    with sqlite3.connect(world.kvd.state_dir / "manifest.db") as db:
        sql = "SELECT wrapped FROM tenant_keys WHERE tenant = ?"
        (found,) = db.execute(sql, (tenant,)).fetchone()
    db.close()
    return found


def _files_having(world, secret: bytes) -> set[str]:
    files = world.kvd.state_dir.glob("manifest.db*")
    return {path.name for path in files if secret in path.read_bytes()}
