"""Starts that must be refused: one line with the remedy, exit code 78, no files left behind."""

import os
import socket
import sqlite3
from pathlib import Path

import pytest

from tests.processes import KvdProcess, running_kvd


async def _start_refused(kvd: KvdProcess) -> str:
    """Start, expect exit code 78, and return the last line of the log."""
    await kvd.spawn()
    assert await kvd.exit_code() == 78, kvd.log()
    return kvd.log().strip().splitlines()[-1]


async def test_runtime_directory_in_use(tmp_path: Path) -> None:
    """A second kvd on the same sockets is refused, and the first one continues."""
    async with running_kvd(tmp_path / "a", "--dram", "1MB") as first:
        second = KvdProcess(tmp_path / "b")
        second.runtime_dir = first.runtime_dir
        line = await _start_refused(second)
        assert "another kvd uses the runtime directory" in line
        assert "--runtime-dir" in line
        assert await first.stop() == 0


async def test_state_directory_in_use(tmp_path: Path) -> None:
    """A second kvd on the same state is refused."""
    async with running_kvd(tmp_path / "a", "--dram", "1MB") as first:
        second = KvdProcess(tmp_path / "b")
        second.state_dir = first.state_dir
        line = await _start_refused(second)
    assert "another kvd uses the state directory" in line
    assert "--state-dir" in line


async def test_stale_sockets_are_replaced(tmp_path: Path) -> None:
    """Sockets that a killed kvd has left do not prevent the next start."""
    kvd = KvdProcess(tmp_path, ("--dram", "1MB"))
    await kvd.start()
    await kvd.kill()
    assert (kvd.runtime_dir / "engine.sock").exists()
    await kvd.start()
    assert await kvd.stop() == 0


@pytest.mark.parametrize("which", ["runtime_dir", "state_dir"])
async def test_directory_that_cannot_be_made(tmp_path: Path, which: str) -> None:
    """A directory cannot be made below a file; the line names the option for another one."""
    (tmp_path / "file").write_text("")
    kvd = KvdProcess(tmp_path)
    setattr(kvd, which, tmp_path / "file" / "below")
    line = await _start_refused(kvd)
    assert f"--{which.replace('_', '-')}" in line


async def test_directory_others_may_write_to_is_refused(tmp_path: Path) -> None:
    """Any user could replace the sockets in a world-writable directory."""
    kvd = KvdProcess(tmp_path)
    kvd.runtime_dir.mkdir()
    kvd.runtime_dir.chmod(0o777)
    assert "other users may write" in await _start_refused(kvd)


async def test_path_too_long_for_a_socket(tmp_path: Path) -> None:
    """The kernel's limit on socket paths is named before any file is made."""
    kvd = KvdProcess(tmp_path)
    kvd.runtime_dir = tmp_path / ("x" * 120)
    assert "at most 107 are possible" in await _start_refused(kvd)
    assert not kvd.runtime_dir.exists()


async def test_every_bad_setting_is_named(tmp_path: Path) -> None:
    """All problems are listed at once, with key, value and what is accepted."""
    config = tmp_path / "kvd.toml"
    config.write_text(
        '[dram]\ntotal_bytes = "lots"\n[evictoin]\npolicy = "lru"\n[ssd]\nio_threads = 0\n'
    )
    line = await _start_refused(KvdProcess(tmp_path, ("--config", str(config))))
    for part in (
        "dram.total_bytes",
        "lots",
        "evictoin.policy",
        "eviction.policy?",
        "ssd.io_threads",
    ):
        assert part in line


async def test_missing_and_malformed_config(tmp_path: Path) -> None:
    """A settings file that is not there, or not valid TOML, is named."""
    missing = tmp_path / "no.toml"
    assert str(missing) in await _start_refused(KvdProcess(tmp_path, ("--config", str(missing))))
    malformed = tmp_path / "bad.toml"
    malformed.write_text("[dram\n")
    assert "not valid TOML" in await _start_refused(
        KvdProcess(tmp_path, ("--config", str(malformed)))
    )


async def test_state_of_a_newer_release(tmp_path: Path) -> None:
    """An index with a newer schema is left alone."""
    kvd = KvdProcess(tmp_path)
    kvd.state_dir.mkdir(mode=0o700)
    with sqlite3.connect(kvd.state_dir / "manifest.db") as db:
        db.execute("PRAGMA user_version = 99")
    assert "schema 99" in await _start_refused(kvd)


async def test_port_in_use(tmp_path: Path) -> None:
    """A TCP port in use is named."""
    config = tmp_path / "kvd.toml"
    config.write_text(f'[clients.ops]\ntoken_sha256 = ["{"0" * 64}"]\ntenants = ["*"]\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = await _start_refused(
            KvdProcess(tmp_path, ("--config", str(config), "--tcp", address))
        )
    assert f"cannot listen on {address}" in line


async def test_an_unguarded_port_is_refused(tmp_path: Path) -> None:
    """No port is opened unless a client is allowed there, not even a local one."""
    for host in ("0.0.0.0", "127.0.0.1"):  # noqa: S104
        line = await _start_refused(KvdProcess(tmp_path, ("--tcp", f"{host}:47392")))
        assert f"anybody could connect to {host}:47392" in line
        assert "[clients.NAME]" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_unwritable_directory(tmp_path: Path) -> None:
    """A directory without write permission is refused."""
    (tmp_path / "closed").mkdir(mode=0o500)
    kvd = KvdProcess(tmp_path)
    kvd.state_dir = tmp_path / "closed"
    assert "--state-dir" in await _start_refused(kvd)
