"""The kvd command against a real daemon: its output in both forms, and its exit codes."""

import json
from pathlib import Path
from typing import Any

from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import MODEL, attached_engine, encode, key_of, small_layout

TOKENS = list(range(100, 150))


async def _json(kvd: KvdProcess, *arguments: str) -> Any:
    code, stdout, stderr = await run_cli(
        *arguments, "--json", "--runtime-dir", str(kvd.runtime_dir)
    )
    assert code == 0, stderr
    return json.loads(stdout)


async def _fails(kvd: KvdProcess, *arguments: str) -> tuple[int, str]:
    """Return the exit code and the one line on stderr."""
    code, _, stderr = await run_cli(*arguments, "--runtime-dir", str(kvd.runtime_dir))
    (line,) = stderr.strip().splitlines()
    return code, line


async def test_looking_at_sessions(tmp_path: Path) -> None:
    """ls, show and stats give the same facts as tables and as JSON."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd,
        attached_engine(kvd.runtime_dir, name="engine-under-test") as engine,
    ):
        for name in ("a", "b"):
            await engine.store(key_of(name), TOKENS)
        listed = await _json(kvd, "ls")
        limited = await _json(kvd, "ls", "--limit", "1")
        shown = await _json(kvd, "show", "a")
        stats = await _json(kvd, "stats")
        at = ("--runtime-dir", str(kvd.runtime_dir))
        tables = [
            (await run_cli(*command, *at))[1] for command in (("ls",), ("show", "a"), ("stats",))
        ]
    assert [info["session"]["session_id"] for info in listed["sessions"]] == ["a", "b"]
    assert (len(limited["sessions"]), limited["total"]) == (1, 2)
    assert shown["info"]["num_tokens"] == 50
    assert [block["num_tokens"] for block in shown["blocks"]] == [16, 16, 16, 2]
    assert "dram" in shown["blocks"][0]["tiers"]
    (layout,) = stats["layouts"]
    assert (layout["num_sessions"], layout["model"]) == (2, MODEL)
    assert stats["engines"][0]["name"] == "engine-under-test"
    assert all("50" in table for table in tables[:2])
    assert "engine-under-test" in tables[2]


async def test_paging_over_layouts(tmp_path: Path) -> None:
    """A listing over several layouts and many pages names every session once."""
    (tmp_path / "kvd.toml").write_text("[limits]\nsessions_page = 3\n")
    flags = ("--dram", "1MB", "--config", str(tmp_path / "kvd.toml"))
    names = [f"s{number}" for number in range(7)]
    async with (
        running_kvd(tmp_path, *flags) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
        attached_engine(kvd.runtime_dir, small_layout(model="ab" * 16)) as other,
    ):
        for name in names:
            await engine.store(key_of(name), TOKENS)
            await other.store(key_of(name, model="ab" * 16), TOKENS)
        listed = await _json(kvd, "ls")
        of_model = await _json(kvd, "ls", "--model", "abab")
        ambiguous = await _fails(kvd, "show", "s0")
        chosen = await _json(kvd, "show", "s0", "--model", "ab" * 16)
    keys = [
        (info["session"]["model"], info["session"]["session_id"]) for info in listed["sessions"]
    ]
    assert sorted(keys) == sorted((model, name) for model in (MODEL, "ab" * 16) for name in names)
    assert listed["total"] == 14
    assert of_model["total"] == 7
    assert ambiguous[0] == 5
    assert chosen["info"]["session"]["model"] == "ab" * 16


async def test_changing_sessions(tmp_path: Path) -> None:
    """pin, unpin, ttl and flush change the output of show, and survive a restart."""
    async with running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            for name in ("a", "b"):
                await engine.store(key_of(name), TOKENS)
        assert (await _json(kvd, "pin", "a"))["state"] == "pinned"
        assert (await _json(kvd, "ttl", "b", "2h"))["expires_in_s"] > 7000
        await kvd.stop()
        await kvd.start()
        assert (await _json(kvd, "show", "a"))["info"]["pin"] == "hard"
        shown = (await _json(kvd, "show", "b"))["info"]
        assert (shown["ttl_s"], shown["ttl_source"]) == (7200, "session")
        assert (await _json(kvd, "ttl", "b", "never"))["expires_in_s"] < 0
        await _json(kvd, "unpin", "a")
        assert (await _json(kvd, "show", "a"))["info"]["pin"] == "none"
        assert (await _json(kvd, "pin", "a", "--soft"))["state"] == "soft-pinned"
        assert (await _json(kvd, "show", "a"))["info"]["pin"] == "soft"
        assert (await _json(kvd, "flush", "--all", "--dry-run"))["sessions"] == 2
        assert (await _json(kvd, "flush", "a"))["sessions"] == 1
        assert (await _fails(kvd, "show", "a"))[0] == 3
        assert (await _json(kvd, "flush", "--all", "--yes"))["sessions"] == 1
        await kvd.kill()
        await kvd.start()
        assert (await _json(kvd, "ls"))["total"] == 0


async def test_stats_show_how_the_tiers_are_kept(tmp_path: Path) -> None:
    """The arena, the volume and each tenant's share are in the statistics, in both forms."""
    (tmp_path / "kvd.toml").write_text(
        '[dram]\nkeep = "none"\n[ssd]\ndirect = "off"\nadmission = "write_back"\n'
        '[tenants.acme]\nquota = "1MB"\nttl = "1h"\n'
    )
    flags = ("--dram", "1MB", "--ssd", "4MB", "--config", str(tmp_path / "kvd.toml"))
    async with (
        running_kvd(tmp_path, *flags, keep="none") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a", tenant="acme"), TOKENS)
        await engine.store(key_of("b"), TOKENS)
        (layout,) = (await _json(kvd, "stats"))["layouts"]
        shown = [
            (await _json(kvd, "show", *of))["info"] for of in (("a", "--tenant", "acme"), ("b",))
        ]
        table = (await run_cli("stats", "--runtime-dir", str(kvd.runtime_dir)))[1]
    assert layout["arena"]["keep"] == "none"
    assert (layout["volume"]["direct"], layout["volume"]["admission"]) == (False, "write_back")
    tenants = {t["tenant"]: (t["has_quota"], t["num_sessions"]) for t in layout["tenants"]}
    assert tenants == {"acme": (True, 1), "default": (False, 1)}
    assert [info["ttl_source"] for info in shown] == ["tenant", "default"]
    assert shown[0]["expires_in_s"] < 3601
    for word in ("kept: none", "write-back", "buffered", "acme"):
        assert word in table


async def test_a_leased_session_is_not_flushed(tmp_path: Path) -> None:
    """Flushing a session in use fails with exit code 4."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        grant = await engine.client.prepare_load(key_of("a"), encode(TOKENS), 0, 5)
        code, line = await _fails(kvd, "flush", "a")
        await engine.client.complete_load(grant)
        assert (await _json(kvd, "flush", "a"))["sessions"] == 1
    assert code == 4
    assert "in use" in line


async def test_errors_are_one_line_with_a_remedy(tmp_path: Path) -> None:
    """Each mistake has its exit code, and its line names the remedy."""
    async with running_kvd(tmp_path, "--dram", "1MB") as kvd:
        cases = {
            ("show", "nobody"): (3, "kvd ls"),
            ("pin", "nobody"): (3, "kvd ls"),
            ("flush", "nobody"): (3, "kvd ls"),
            ("ttl", "nobody", "1h"): (3, "kvd ls"),
            ("ttl", "a", "soon"): (2, '"never" or "default"'),
            ("show", "no such name!"): (2, "letters, digits"),
            ("flush",): (2, "--all"),
            ("flush", "--all"): (2, "--yes"),
            ("leases", "--kill", "1"): (2, "--yes"),
            ("leases", "--kill", "1", "--yes"): (3, "kvd leases"),
        }
        for arguments, (expected, remedy) in cases.items():
            code, line = await _fails(kvd, *arguments)
            assert (code, remedy in line) == (expected, True), (arguments, line)


async def test_without_a_daemon(tmp_path: Path) -> None:
    """Every command reports that no kvd answers, and how to start one, with exit code 69."""
    kvd = KvdProcess(tmp_path)
    commands = ("ls", "stats", "leases", "verify")
    of_a_session = ("show", "flush", "pin")
    for arguments in (*((c,) for c in commands), *((c, "a") for c in of_a_session)):
        code, line = await _fails(kvd, *arguments)
        assert code == 69
        assert "kvd serve" in line
