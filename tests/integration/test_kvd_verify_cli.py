"""`kvd verify` against a real daemon: its findings, its repairs, and that only one may run."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.kvd_polling import all_clean, eventually, reader_stats
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of

SECTOR_BYTES = 4096


def _tokens(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 50))


async def _verify(kvd: KvdProcess, *flags: str) -> tuple[int, dict[str, Any], str]:
    at = ("--runtime-dir", str(kvd.runtime_dir))
    code, stdout, stderr = await run_cli("verify", "--json", *flags, *at)
    return code, json.loads(stdout), stderr


@asynccontextmanager
async def _filled_kvd(
    directory: Path, *flags: str, num_sessions: int = 4, keep: str = "file"
) -> AsyncIterator[tuple[KvdProcess, SyntheticEngine]]:
    """Run a kvd with sessions of four blocks, in both tiers, and the engine that stored them."""
    async with (
        running_kvd(directory, "--dram", "1MB", "--ssd", "16MB", *flags, keep=keep) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        for number in range(num_sessions):
            await engine.store(key_of(f"s{number}"), _tokens(number))
        await all_clean(kvd)
        yield kvd, engine


def _flip_volume(kvd: KvdProcess) -> None:
    """Change a byte in every sector that was written."""
    for segment in (kvd.state_dir / "volumes").rglob("*.segment"):
        content = bytearray(segment.read_bytes())
        for start in range(0, len(content), SECTOR_BYTES):
            if any(content[start : start + SECTOR_BYTES]):
                content[start] ^= 0xFF
        with segment.open("r+b") as file:
            file.write(content)


async def test_a_sound_store_passes(tmp_path: Path) -> None:
    """Every block is compared in both tiers, and the exit code is 0."""
    async with _filled_kvd(tmp_path) as (kvd, _):
        code, report, stderr = await _verify(kvd)
        at = ("--runtime-dir", str(kvd.runtime_dir))
        table = (await run_cli("verify", *at))[1]
        mistyped = await run_cli("verify", "--model", "no-such", *at)
    assert (mistyped[0], mistyped[1]) == (3, "")
    assert "no-such" in mistyped[2]
    assert (code, stderr) == (0, "")
    assert report["done"]
    assert report["num_copies"] == 32
    assert [(report[t]["num_blocks"], report[t]["num_corrupt"]) for t in ("dram", "ssd")] == [
        (16, 0),
        (16, 0),
    ]
    assert "16" in table


async def test_corrupt_copies_are_found_and_written_again(tmp_path: Path) -> None:
    """Without --repair they are counted, exit 1; with it they are replaced from DRAM, exit 0."""
    async with _filled_kvd(tmp_path) as (kvd, engine):
        _flip_volume(kvd)
        code, report, stderr = await _verify(kvd)
        assert (code, report["ssd"]["num_corrupt"], report["num_repaired"]) == (1, 16, 0)
        assert "--repair" in stderr
        code, report, stderr = await _verify(kvd, "--repair")
        assert (code, report["num_repaired"], report["num_lost"]) == (0, 16, 0), stderr
        await all_clean(kvd)
        code, report, _ = await _verify(kvd)
        assert (code, report["ssd"]["num_corrupt"], report["ssd"]["num_blocks"]) == (0, 0, 16)
        for number in range(4):
            loaded = await engine.load(key_of(f"s{number}"), _tokens(number))
            assert loaded.num_tokens == 50


async def test_blocks_without_a_good_copy_are_dropped(tmp_path: Path) -> None:
    """A block that is corrupt on SSD and not in DRAM is lost, exit 1; its session is a miss."""
    async with _filled_kvd(tmp_path, keep="none") as (kvd, engine):
        await kvd.kill()
        _flip_volume(kvd)
        await kvd.start()
        code, report, stderr = await _verify(kvd, "--repair")
        assert (code, report["num_repaired"]) == (1, 0)
        assert report["num_lost"] >= 4  # without its first block a session loses those behind it
        assert "no good copy" in stderr
        await engine.client.wait_attached(30)
        loads = [await engine.load(key_of(f"s{number}"), _tokens(number)) for number in range(4)]
        assert {loaded.num_tokens for loaded in loads} == {0}


async def test_only_one_verification_runs_at_a_time(tmp_path: Path) -> None:
    """While one runs a second is refused, exit 6; it ends with its caller."""
    (tmp_path / "kvd.toml").write_text('[integrity]\nscrub_rate = "64KB"\n')
    flags = ("--config", str(tmp_path / "kvd.toml"))
    async with _filled_kvd(tmp_path, *flags, num_sessions=16) as (kvd, _):

        async def is_verifying() -> bool:
            return (await reader_stats(kvd)).verifying

        at = ("--runtime-dir", str(kvd.runtime_dir))
        first = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvd", "verify", *at)
        try:
            await eventually(is_verifying, wanted=True)
            code, _, stderr = await run_cli("verify", *at)
            assert (code, "already running" in stderr) == (6, True)
        finally:
            first.kill()
            await first.wait()
        await eventually(is_verifying, wanted=False)


async def test_an_empty_store_passes(tmp_path: Path) -> None:
    """A kvd without sessions passes at once."""
    async with running_kvd(tmp_path, "--dram", "1MB") as kvd:
        code, report, _ = await _verify(kvd)
    assert (code, report["done"], report["num_copies"]) == (0, True, 0)
