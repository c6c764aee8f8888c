"""kvd doctor with real daemons: the remedies that it names mend its findings."""

import asyncio
import errno
import grp
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_kvd import FaultyKvd
from tests.integration.test_kvd_access import run_as
from tests.kvd_as_user import let_others_enter
from tests.kvd_polling import eventually, reader_stats
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import attached_engine, key_of

SIZES = ("--dram", "1MB", "--ssd", "4MB")
TOKENS = list(range(100, 200))


async def _examine(kvd: KvdProcess, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the remedies: the first finding of each check."""
    at = ("--runtime-dir", str(kvd.runtime_dir), "--state-dir", str(kvd.state_dir))
    code, stdout, stderr = await run_cli("doctor", "--json", "--quiet", *at, *arguments)
    assert not stderr
    findings = json.loads(stdout)["findings"]
    of_machine = ("huge_pages", "memory")  # depends on the machine
    return code, {f["check"]: f for f in reversed(findings) if f["check"] not in of_machine}


async def test_settings_that_are_not_in_force(tmp_path: Path) -> None:
    """It distinguishes a reload from a restart, and each removes its line."""
    file = tmp_path / "kvd.toml"
    file.write_text('[sessions]\ndefault_ttl = "1h"\n')
    kvd = KvdProcess(tmp_path, (*SIZES, "--config", str(file)))
    await kvd.start()
    try:
        assert await _examine(kvd) == (0, {})
        file.write_text('[sessions]\ndefault_ttl = "2h"\n[tenants.acme]\nttl = "1h"\n')
        code, found = await _examine(kvd)
        assert (code, list(found)) == (0, ["settings"])
        assert "sessions.default_ttl" in found["settings"]["what"]
        assert found["settings"]["remedy"] == "run: kvd config reload"
        code, _, _ = await run_cli("config", "reload", "--runtime-dir", str(kvd.runtime_dir))
        assert (code, await _examine(kvd)) == (0, (0, {}))
        file.write_text('[eviction]\npolicy = "lru"\n')
        code, _, _ = await run_cli("config", "reload", "--runtime-dir", str(kvd.runtime_dir))
        _, found = await _examine(kvd)
        assert "eviction.policy" in found["settings"]["what"]
        assert "restart" in found["settings"]["remedy"]
        await kvd.stop()
        await kvd.start()
        assert await _examine(kvd) == (0, {})
        file.write_text("[sessions]\ndefault_tll = 1\n")
        code, found = await _examine(kvd)
        assert (code, found["settings"]["level"]) == (1, "problem")
        assert "default_ttl" in found["settings"]["what"]
    finally:
        await kvd.stop()


async def test_without_a_kvd(tmp_path: Path) -> None:
    """That no kvd runs is a warning: it says how to start one, and where it looked."""
    kvd = KvdProcess(tmp_path)
    code, found = await _examine(kvd)
    assert (code, list(found)) == (0, ["kvd"])
    assert str(kvd.runtime_dir) in found["kvd"]["what"]
    assert "kvd serve" in found["kvd"]["remedy"]
    async with running_kvd(tmp_path, *SIZES) as kvd:
        assert await _examine(kvd) == (0, {})


async def test_a_full_disk(tmp_path: Path) -> None:
    """Failing writes are a problem as long as they fail."""
    kvd = FaultyKvd(tmp_path, *SIZES)
    kvd.faults = {"write_errno": errno.ENOSPC}
    await kvd.start()

    async def is_degraded() -> bool:
        layouts = (await reader_stats(kvd)).layouts
        return any(tier.degraded for layout in layouts for tier in layout.tiers)

    try:
        async with attached_engine(kvd.runtime_dir) as engine:
            await engine.store(key_of("a"), TOKENS)
            await eventually(is_degraded, True)
        code, found = await _examine(kvd)
        assert (code, found["tiers"]["level"]) == (1, "problem")
        assert "df -h" in found["tiers"]["remedy"]
        kvd.faults = {}  # there is room again
        await kvd.stop()
        await kvd.start()
        assert await _examine(kvd) == (0, {})
    finally:
        await kvd.stop()


async def test_sockets_that_are_open_to_all(tmp_path: Path) -> None:
    """A socket that others may open is a problem, and the line has the chmod that mends it."""
    async with running_kvd(tmp_path, *SIZES) as kvd:
        path = kvd.runtime_dir / "operator.sock"
        await asyncio.to_thread(path.chmod, 0o666)
        code, found = await _examine(kvd)
        assert (code, found["sockets"]["remedy"]) == (1, f"run: chmod 660 {path}")
        await asyncio.to_thread(path.chmod, 0o660)
        assert await _examine(kvd) == (0, {})


async def test_the_report_for_people(tmp_path: Path) -> None:
    """Every line is shown without --quiet, and the last one has the counts."""
    kvd = KvdProcess(tmp_path)
    at = ("--runtime-dir", str(kvd.runtime_dir), "--state-dir", str(kvd.state_dir))
    code, stdout, _ = await run_cli("doctor", *at)
    assert code == 0
    for check in ("kernel", "cuda", "settings", "memory", "shared_memory", "state_disk", "unit"):
        assert check in stdout
    assert stdout.splitlines()[-1].startswith("0 problems, ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_an_operator_who_is_not_the_kvd_user(tmp_path: Path) -> None:
    """kvd's own files are no problem; the user's missing permission is, with the group to join."""
    key, file = tmp_path / "key", tmp_path / "kvd.toml"
    assert (await run_cli("key", "new", str(key)))[0] == 0
    operators = grp.getgrgid(1).gr_name
    file.write_text(f'[access]\noperator_group = "{operators}"\n[encryption]\nkey_file = "{key}"\n')
    file.chmod(0o600)
    async with running_kvd(tmp_path, *SIZES, "--config", str(file)) as kvd:
        let_others_enter(tmp_path)
        at = ("--runtime-dir", str(kvd.runtime_dir), "--state-dir", str(kvd.state_dir))
        code, said = await run_as(tmp_path, 1, "doctor", "--json", *at)
        findings = json.loads(said)["findings"]
        levels = {(f["check"], f["level"]) for f in findings}
        assert code == 0, said
        assert {("settings", "warning"), ("state_dir", "warning"), ("sockets", "ok")} <= levels
        assert ("kvd", "ok") in levels
        file.chmod(0o644)
        code, said = await run_as(tmp_path, 2, "doctor", "--json", "--config", str(file), *at)
        found = {f["check"]: f for f in json.loads(said)["findings"]}
        assert "sudo kvd doctor" in found["encryption"]["remedy"]
        assert "may not open" in found["kvd"]["what"]
        assert (code, operators in found["kvd"]["remedy"]) == (1, True)
        assert "Traceback" not in said
