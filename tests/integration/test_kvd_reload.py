"""A running kvd takes new settings, by signal and by command: all at once or none."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared.access.tokens import new_token, token_digest
from tests.kvd_polling import eventually, sessions_of
from tests.processes import KvdProcess, pipe_to_reader, run_cli
from tests.synthetic_engine import attached_engine, key_of

SIZES = ("--dram", "1MB", "--ssd", "4MB")
TOKENS = list(range(100, 150))
OTHERS = list(range(500, 550))


@asynccontextmanager
async def _kvd(tmp_path: Path, text: str) -> AsyncIterator[KvdProcess]:
    """Run a kvd with a settings file that tests change."""
    (tmp_path / "kvd.toml").write_text(text)
    kvd = KvdProcess(tmp_path, (*SIZES, "--config", str(tmp_path / "kvd.toml")))
    await kvd.start()
    try:
        yield kvd
    finally:
        await kvd.stop()


async def _cli(kvd: KvdProcess, *arguments: str) -> tuple[int, str]:
    code, stdout, stderr = await run_cli(*arguments, "--runtime-dir", str(kvd.runtime_dir))
    return code, stdout + stderr


async def _reload(kvd: KvdProcess, text: str) -> tuple[list[str], list[str]]:
    """Change the file and reload; return the applied and the waiting keys."""
    (kvd.log_path.parent / "kvd.toml").write_text(text)
    code, said = await _cli(kvd, "config", "reload", "--json")
    assert code == 0, said
    answer = json.loads(said)
    return answer["applied"], answer["needs_restart"]


async def test_new_settings_apply_to_stored_sessions(tmp_path: Path) -> None:
    """TTLs, quotas and the number of sessions apply at once; other keys wait for a restart."""
    async with (
        _kvd(tmp_path, '[sessions]\ndefault_ttl = "1h"\n') as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        for name in ("a", "b", "c"):
            await engine.store(key_of(name), TOKENS)
        expiries = [i.expires_in_s for i in await sessions_of(kvd)]
        assert all(3500 < expiry <= 3600 for expiry in expiries)
        assert await _reload(
            kvd,
            '[sessions]\nmax_sessions = 2\n[tenants.default]\nttl = "1m"\n[eviction]\n'
            'policy = "lru"\n',
        ) == (
            ["sessions.default_ttl", "sessions.max_sessions", "tenants.default.ttl"],
            ["eviction.policy"],
        )
        await eventually(lambda: _names(kvd), ["b", "c"])
        assert all(i.expires_in_s <= 60 for i in await sessions_of(kvd))
        assert await _reload(kvd, '[tenants.default]\nquota = "8KB"\n') == (
            ["sessions.max_sessions", "tenants.default.ttl", "tenants.default.quota"],
            [],
        )
        assert await engine.store(key_of("d"), OTHERS) == 0  # four blocks exceed the quota
        await _reload(kvd, "")
        assert await engine.store(key_of("d"), OTHERS) == 50


async def test_retentions_follow_a_new_bound(tmp_path: Path) -> None:
    """A granted retention is cut to the new bound; a tenant's own bound has precedence."""
    async with (
        _kvd(tmp_path, '[tenants.default]\nmax_retention = "2h"\n') as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        assert await engine.client.retain_session(key_of("a"), 86_400) == 7200
        assert await _reload(kvd, '[sessions]\nmax_retention = "10m"\n') == (
            ["sessions.max_retention", "tenants.default.max_retention"],
            [],
        )
        await eventually(lambda: _retentions(kvd), [600.0])
        await _reload(kvd, "[sessions]\nmax_retention = 0\n")
        await eventually(lambda: _retentions(kvd), [0.0])
        assert await engine.client.retain_session(key_of("a"), 60) == 0


async def _retentions(kvd: KvdProcess) -> list[float]:
    return [info.retain_s for info in await sessions_of(kvd)]


async def _names(kvd: KvdProcess) -> list[str]:
    return [info.session.session_id for info in await sessions_of(kvd)]


async def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    """The command fails with every problem in one line; the present settings stay in force."""
    async with _kvd(tmp_path, '[sessions]\ndefault_ttl = "1h"\n') as kvd:
        before = await _cli(kvd, "config", "show", "--running")
        bad = '[sessions]\ndefault_ttl = "2h"\nmax_sesions = 3\n[limits]\ndrain = "soon"\n'
        (tmp_path / "kvd.toml").write_text(bad)
        code, said = await _cli(kvd, "config", "reload")
        assert code == 5
        assert "nothing was changed" in said
        assert "sessions.max_sessions" in said
        assert "limits.drain" in said
        assert said.count("\n") == 1
        assert await _cli(kvd, "config", "show", "--running") == before
        code, said = await _cli(kvd, "config", "check", "--config", str(tmp_path / "kvd.toml"))
        assert code == 2


async def test_settings_in_force_are_shown(tmp_path: Path) -> None:
    """Each has its value, its source, and whether a reload changes it.

    Secrets show only presence.
    """
    token = new_token()
    digest = token_digest(token)
    text = f'[clients.ops]\ntoken_sha256 = ["{digest}"]\ntenants = ["*"]\n'
    async with _kvd(tmp_path, text) as kvd:
        code, said = await _cli(kvd, "config", "show", "--running", "--json")
        assert code == 0
        shown = json.loads(said)
        assert shown["dram.bytes"] == {"value": 1 << 20, "source": "flag", "live": False}
        assert shown["dram.keep"]["source"] == "env"
        week = {"value": 604_800.0, "source": "default", "live": True}
        assert shown["sessions.default_ttl"] == week
        assert shown["clients.ops.token_sha256"]["value"] == "(hidden)"
        (tmp_path / "kvd.toml").write_text(text.replace('"*"', '"acme"'))
        _, table = await _cli(kvd, "config", "reload")
        assert "clients.ops.tenants" in table
        assert digest not in said + table + kvd.log()
        assert token not in kvd.log()


async def test_a_signal_reloads(tmp_path: Path) -> None:
    """SIGHUP does the same; the log has the result, and systemd is notified of the end."""
    (tmp_path / "kvd.toml").write_text("")
    kvd = KvdProcess(tmp_path, (*SIZES, "--config", str(tmp_path / "kvd.toml")))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.setblocking(False)
        kvd._environment["NOTIFY_SOCKET"] = str(tmp_path / "notify")
        await kvd.start()
        try:
            assert await _next_notification(supervisor) == ["READY=1"]
            (tmp_path / "kvd.toml").write_text('[limits]\ndrain = "3s"\n')
            await _hang_up(kvd, "settings_reloaded")
            assert await _next_notification(supervisor) == ["RELOADING=1"]
            assert await _next_notification(supervisor) == ["READY=1"]
            (tmp_path / "kvd.toml").write_text("[limits")
            await _hang_up(kvd, "settings_not_reloaded")
            assert await _next_notification(supervisor) == ["RELOADING=1"]
            assert await _next_notification(supervisor) == ["READY=1"]
            _, said = await _cli(kvd, "config", "show", "--running", "--json")
            assert json.loads(said)["limits.drain"]["value"] == 3.0
        finally:
            await kvd.stop()
    assert '"deadline_s": 3.0' in kvd.log()


async def test_a_signal_during_the_start_reloads_after_it(tmp_path: Path) -> None:
    """While kvd reads its settings, here from a pipe, so that the moment is certain."""
    settings = tmp_path / "kvd.toml"
    os.mkfifo(settings)
    kvd = KvdProcess(tmp_path, (*SIZES, "--config", str(settings)))
    starting = asyncio.create_task(kvd.start())
    try:
        with os.fdopen(await pipe_to_reader(settings), "w") as pipe:
            assert kvd._process is not None
            kvd._process.send_signal(signal.SIGHUP)
            pipe.write('[limits]\ndrain = "2s"\n')
            (tmp_path / "new.toml").write_text('[limits]\ndrain = "3s"\n')
            (tmp_path / "new.toml").replace(settings)  # what the reload reads
        await starting
        _, said = await _cli(kvd, "config", "show", "--running", "--json")
        assert json.loads(said)["limits.drain"]["value"] == 3.0
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await kvd.stop()


async def _next_notification(supervisor: socket.socket) -> list[str]:
    """Return the next notification of systemd but for watchdog ones; check its time."""
    while True:
        async with asyncio.timeout(30):
            message = await asyncio.get_running_loop().sock_recv(supervisor, 4096)
        lines = message.decode().splitlines()
        if lines[0] == "RELOADING=1":
            assert lines.pop().startswith("MONOTONIC_USEC=")
        if lines[0] in ("READY=1", "RELOADING=1"):
            return lines


async def _hang_up(kvd: KvdProcess, event: str) -> None:
    """Send SIGHUP and wait for the log's line about it."""
    assert kvd._process is not None
    kvd._process.send_signal(signal.SIGHUP)

    async def is_logged() -> bool:
        return event in kvd.log()

    await eventually(is_logged, True)
