"""What SREs do with a running kvd: filters, history, events, live views, completion."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of
from tests.terminal import on_terminal

TOKENS = list(range(100, 150))
COMMAND_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Stage:
    """A kvd with an engine, and named sessions."""

    def __init__(self, kvd: KvdProcess, engine: SyntheticEngine) -> None:
        self.kvd = kvd
        self.engine = engine
        self.at = ("--runtime-dir", str(kvd.runtime_dir))

    async def store(self, *names: str, tenant: str = "default", num_tokens: int = 50) -> None:
        for name in names:
            await self.engine.store(key_of(name, tenant=tenant), list(range(num_tokens)))

    async def json(self, *arguments: str) -> Any:
        code, stdout, stderr = await run_cli(*arguments, "--json", *self.at)
        assert code == 0, stderr
        return json.loads(stdout)

    async def ids(self, *arguments: str) -> list[str]:
        listed = await self.json("ls", *arguments)
        return [info["session"]["session_id"] for info in listed["sessions"]]

    async def fails(self, *arguments: str) -> tuple[int, str]:
        code, _, stderr = await run_cli(*arguments, *self.at)
        (line,) = stderr.strip().splitlines()
        return code, line


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory):
    async with (
        running_kvd(tmp_path_factory.mktemp("kvd"), "--dram", "1MB", "--ssd", "8MB") as kvd,
        attached_engine(kvd.runtime_dir, name="engine-under-test") as engine,
    ):
        yield Stage(kvd, engine)


async def test_sessions_are_filtered_and_sorted(stage):
    """Conditions are combined, orders cover all sessions, and the total counts filtered ones."""
    await stage.store("ls-small", tenant="filtering", num_tokens=5)
    await stage.store("ls-large", tenant="filtering", num_tokens=90)
    await stage.store("ls-middle", tenant="filtering", num_tokens=40)
    await stage.json("pin", "ls-middle", "--tenant", "filtering", "--soft")
    await stage.json("ttl", "ls-small", "1h", "--tenant", "filtering")
    await stage.engine.client.end_session(key_of("ls-large", tenant="filtering"))
    ours = ("--tenant", "filtering")
    assert await stage.ids(*ours) == ["ls-small", "ls-large", "ls-middle"]
    assert await stage.ids(*ours, "--sort", "bytes") == ["ls-large", "ls-middle", "ls-small"]
    assert await stage.ids(*ours, "--sort", "tokens", "--reverse", "--limit", "1") == ["ls-small"]
    assert (await stage.ids(*ours, "--sort", "ttl"))[0] == "ls-small"
    assert await stage.ids(*ours, "--pinned") == ["ls-middle"]
    assert await stage.ids(*ours, "--ended") == ["ls-large"]
    assert await stage.ids(*ours, "--larger-than", "16KB", "--tier", "dram") == [
        "ls-large",
        "ls-middle",
    ]
    assert await stage.ids(*ours, "--idle", "1h") == []
    assert await stage.ids("ls-m", *ours) == ["ls-middle"]
    assert (await stage.json("ls", *ours, "--limit", "1"))["total"] == 3
    many = "9" * 15
    assert await stage.ids(*ours, "--larger-than", f"{many}TB", "--limit", many) == []
    for options, complaint in ((("--idle", "soon"), '"10m"'), (("--larger-than", "big"), '"1GB"')):
        code, line = await stage.fails("ls", *options)
        assert (code, complaint in line) == (2, True)


async def test_a_filter_is_flushed(stage):
    """A dry run shows what the flush then does; a leased session is named and stays."""
    await stage.store("gone-1", "gone-2", tenant="flushing")
    await stage.store("kept", tenant="other")
    grant = await stage.engine.client.prepare_load(
        key_of("gone-2", tenant="flushing"), _encode(50), 0, 5
    )
    dry = await stage.json("flush", "--tenant", "flushing", "--dry-run")
    done = await stage.json("flush", "--tenant", "flushing", "--yes")
    assert (dry["sessions"], done["sessions"]) == (1, 1)
    assert dry["bytes"] == done["bytes"]
    assert [key["session_id"] for key in done["skipped_leased"]] == ["gone-2"]
    await stage.engine.client.complete_load(grant)
    assert await stage.ids("--tenant", "flushing") == ["gone-2"]
    assert await stage.ids("--tenant", "other") == ["kept"]
    for arguments, remedy in (
        (("flush", "kept", "--idle", "1h"), "name a session"),
        (("flush", "--all", "--tenant", "other"), "name a session"),
        (("flush", "--secure", "--idle", "1h"), "--tenant alone"),
        (("flush", "kept", "--secure"), "--tenant or --all"),
        (("flush", "--tenant", "other"), "--yes"),
        (("flush", "--tenant", "", "--larger-than", "1KB", "--yes"), "leave the option out"),
        (("flush", "--tenant", "other", "--model", "", "--yes"), "leave the option out"),
        (("flush", "--tenant", "other", "--idle", "", "--yes"), '"10m"'),
        (("flush", "--tenant", "other", "--larger-than", "", "--yes"), '"1GB"'),
    ):
        code, line = await stage.fails(*arguments)
        assert (code, remedy in line) == (2, True), line
    assert await stage.ids("--tenant", "other") == ["kept"]


@pytest.mark.parametrize(
    ("answer", "code", "left", "word"),
    [("y", 0, 0, "freed"), pytest.param("n", 2, 2, "nothing was changed", marks=pytest.mark.long)],
)
async def test_a_flush_asks_for_confirmation_on_a_terminal(stage, answer, code, left, word):
    """The question has the amount; "no" keeps everything, "yes" flushes."""
    await stage.store("asked-1", "asked-2", tenant="asking")
    with on_terminal("flush", "--tenant", "asking", *stage.at) as terminal:
        await asyncio.to_thread(terminal.until, "Drop the KV of 2 sessions (")
        terminal.type(f"{answer}\n")
        assert await asyncio.to_thread(terminal.exit_code) == code
    assert word in terminal.shown
    assert len(await stage.ids("--tenant", "asking")) == left


async def test_show_has_a_sessions_history(stage):
    """It lists moves and leases; for a session that is gone the error says what became of it."""
    await stage.store("told")
    await stage.engine.load(key_of("told"), list(range(50)))
    grant = await stage.engine.client.prepare_load(key_of("told"), _encode(50), 0, 5)
    shown = await stage.json("show", "told")
    table = (await run_cli("show", "told", *stage.at))[1]
    await stage.engine.client.complete_load(grant)
    moves = {move["kind"]: move for move in shown["history"]}
    assert (moves["loaded"]["num_tokens"], moves["loaded"]["why"]) == (100, "dram")
    assert [(lease["kind"], lease["num_slots"]) for lease in shown["leases"]] == [("load", 4)]
    for words in ("history", "loaded from dram", "leases", "engine-under-test", "blocks"):
        assert words in table
    await stage.json("flush", "told")
    code, line = await stage.fails("show", "told")
    assert (code, "it was flushed" in line) == (3, True)


async def test_a_session_is_found_by_an_unambiguous_prefix(stage):
    """The id works in any tenant, as does its beginning; if several match all are named."""
    await stage.store("nam-one", "nam-other")
    await stage.store("nam-elsewhere", tenant="naming")
    whole = {"session_id": "nam-elsewhere", "tenant": "naming"}
    shown = [await stage.json("show", said) for said in ("nam-elsewhere", "nam-e")]
    assert [found["info"]["session"]["tenant"] for found in shown] == ["naming", "naming"]
    assert await stage.json("pin", "nam-el") == {**whole, "state": "pinned"}
    assert (await stage.json("ttl", "nam-el", "1h"))["session_id"] == "nam-elsewhere"
    assert await stage.json("unpin", "nam-elsewhere") == {**whole, "state": "unpinned"}
    code, line = await stage.fails("pin", "nam-o")
    assert code == 5
    assert "'nam-o' matches several sessions" in line
    assert {"nam-one", "nam-other"} <= set(line.replace(",", " ").replace(":", " ").split())
    await stage.store("nam-one", tenant="naming")
    in_tenants = [("default", ()), ("naming", ("--tenant", "naming"))]
    for tenant, option in in_tenants:
        found = (await stage.json("show", "nam-one", *option))["info"]["session"]
        assert (found["session_id"], found["tenant"]) == ("nam-one", tenant)
    code, line = await stage.fails("show", "nam-nobody")
    assert (code, "no session 'nam-nobody'" in line) == (3, True)


async def test_a_prefix_needs_confirmation_before_a_flush(stage):
    """The intended session may be gone, and another one match: the command asks, or refuses."""
    await stage.store("begun-1", "begun-10")
    await stage.json("flush", "begun-1")
    code, line = await stage.fails("flush", "begun-1")
    assert (code, "--yes" in line) == (2, True)
    assert await stage.ids("begun") == ["begun-10"]
    _, said, _ = await run_cli("flush", "begun-1", "--dry-run", *stage.at)
    assert said.startswith("would free ")
    assert said.endswith("of session begun-10\n")
    await stage.json("flush", "begun-1", "--yes")
    assert await stage.ids("begun") == []


async def test_recent_events_are_shown(stage):
    """The last ones that fit are shown, oldest first, by session, tenant and name."""
    await stage.store("seen-1", "seen-2", tenant="seeing")
    await stage.json("flush", "seen-1", "--tenant", "seeing")
    ours = ("events", "--tenant", "seeing")
    found = (await stage.json(*ours))["events"]
    assert [event["name"] for event in found] == [
        "session_stored",
        "session_stored",
        "session_flushed",
    ]
    of_one = (await stage.json(*ours, "--session", "seen-2", "--last", "5"))["events"]
    assert [event["session"]["session_id"] for event in of_one] == ["seen-2"]
    named = ("--name", "session_flushed", "--name", "session_cut")
    assert len((await stage.json(*ours, *named))["events"]) == 1
    assert (await stage.json(*ours, "--last", "0"))["events"] == []
    _, text, _ = await run_cli(*ours, "--last", "1", *stage.at)
    assert "session_flushed    seeing/seen-1  tokens=50 why=flush" in text


async def test_events_are_followed(stage):
    """Each is one document per line, until an interrupt: exit 130, no message."""
    command = ("events", "--follow", "--json", "--last", "0", "--session", "followed", *stage.at)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvd", *command, stdout=-1, stderr=-1
    )
    try:
        event = await _first_line(process, stage)
        process.send_signal(2)
        _, stderr = await asyncio.wait_for(process.communicate(), COMMAND_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert (event["name"], event["session"]["session_id"]) == ("session_stored", "followed")
    assert (process.returncode, stderr) == (130, b"")


async def _first_line(process, stage) -> Any:
    """Store more and more until the watcher, which connects at some time, has printed a line."""
    line = asyncio.ensure_future(process.stdout.readline())
    for num_tokens in range(1, 600):
        await stage.store("followed", num_tokens=num_tokens)
        done, _ = await asyncio.wait([line], timeout=0.1)
        if done:
            return json.loads(line.result())
    raise AssertionError("no event ever came")


async def test_statistics_are_watched(stage):
    """On a terminal they are updated in place, with rates, until Ctrl-C: exit 130."""
    with on_terminal("stats", "--watch", "--interval", "100ms", *stage.at) as terminal:
        await asyncio.to_thread(
            terminal.until, "loads and stores, in the last", "engine-under-test"
        )
        terminal.interrupt()
        assert await asyncio.to_thread(terminal.exit_code) == 130
    code, line = await stage.fails("stats", "--watch", "--interval", "0s")
    assert (code, "too short" in line) == (2, True)


@pytest.mark.long
async def test_statistics_are_watched_as_json(stage):
    """With --json there is one document per line."""
    watch = ("stats", "--watch", "--interval", "100ms", *stage.at)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvd", *watch, "--json", stdout=-1
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            looks = [json.loads(await process.stdout.readline()) for _ in range(2)]
    finally:
        process.kill()
        await process.wait()
    assert looks[0]["process"]["uptime_s"] < looks[1]["process"]["uptime_s"]


async def test_top_on_a_terminal(stage):
    """Rows, sorting, a session's history, pin and flush with confirmation, another size, q."""
    await stage.store("top-1", tenant="topping", num_tokens=80)
    await stage.store("top-2", tenant="topping", num_tokens=40)
    of_ours = ("top", "--tenant", "topping", "--interval", "200ms", *stage.at)

    def watch() -> int:
        with on_terminal(*of_ours, width=80, height=24) as terminal:
            terminal.until("engine-under-test", "2 sessions by last use", "q quit")
            assert not terminal.echoes()
            terminal.type("b")
            terminal.until("2 sessions by bytes", "top-1")
            terminal.type("\x1b[Bp")
            terminal.until("pin session top-2?")
            terminal.type("y")
            terminal.until("top-2: pinned", "hot, pinned")
            terminal.type("\r")
            terminal.until("history", "pinned (hard)")
            terminal.type("\r")
            terminal.until("2 sessions by bytes")
            terminal.type("\x1b[Hf")
            terminal.until("flush session top-1?")
            terminal.type("n")
            terminal.until("nothing was done")
            terminal.type("fy")  # pasted: keys that come together with the question's are no answer
            terminal.until("flush session top-1?")
            terminal.type("y")
            terminal.until("top-1: flushed", "1 session by bytes")
            terminal.resize(140, 30)
            terminal.until("expires in")
            terminal.type("?")
            terminal.until("Keys of kvd top")
            terminal.type("q")
            code = terminal.exit_code()
            assert terminal.echoes()
            return code

    assert await asyncio.to_thread(watch) == 0
    assert await stage.ids("--tenant", "topping") == ["top-2"]
    assert (await stage.json("show", "top-2", "--tenant", "topping"))["info"]["pin"] == "hard"


async def test_top_without_a_terminal(stage):
    """It is refused with a reason; --json prints one sample, with the rates of an interval."""
    code, line = await stage.fails("top")
    assert (code, "--json" in line, "stats --watch" in line) == (2, True, True)
    look = await stage.json("top", "--interval", "100ms", "--sort", "bytes")
    assert look["interval_s"] > 0
    (rates,) = look["rates"]
    assert rates["per_second"]["store_tokens"] >= 0
    sizes = [info["bytes"] for info in look["sessions"]]
    assert (sizes, look["total"]) == (sorted(sizes, reverse=True), len(sizes))


async def test_empty_lists_say_so(stage):
    """They print no header without rows, and are not silent."""
    for arguments, said in (
        (("ls", "nobody-has-this-"), "no session is stored that fits\n"),
        (("events", "--session", "nobody"), "no events that fit\n"),
        (("leases", "--model", "nobody"), "no leases: nobody loads or stores just now\n"),
    ):
        assert await run_cli(*arguments, *stage.at) == (0, said, "")


async def test_stored_sessions_are_completed(stage):
    """At a Tab shells get the ids that the running kvd has; nothing without a kvd."""
    await stage.store("complete-me", "complete-it", "x")
    code, found, _ = await run_cli("complete", "--", "show", *stage.at, "complete-")
    assert (code, sorted(found.split())) == (0, ["complete-it", "complete-me"])
    _, found, _ = await run_cli("complete", "--", "flush", *stage.at, "--tenant", "def")
    assert found.split() == ["default"]
    nowhere = ("--runtime-dir", str(stage.kvd.runtime_dir / "nowhere"))
    assert await run_cli("complete", "--", "show", *nowhere, "") == (0, "", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
async def test_completion_in_bash(stage, tmp_path: Path):
    """A real bash completes stored sessions, most recently used first."""
    await stage.store("bash-2", "bash-1")
    _, script, _ = await run_cli("completion", "bash")
    (tmp_path / "kvd").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvd "$@"\n')
    (tmp_path / "kvd").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "KVD_RUNTIME_DIR": str(stage.kvd.runtime_dir),
    }
    asked = """
        COMP_WORDS=(kvd show bash-) COMP_CWORD=2; _kvd; echo "${COMPREPLY[*]}"
    """
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "--norc", "-c", script + asked],
        capture_output=True,
        text=True,
        env=environment,
        timeout=COMMAND_S,
        check=True,
    )
    assert done.stdout.split() == ["bash-1", "bash-2"]


def _encode(num_tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in range(num_tokens))
