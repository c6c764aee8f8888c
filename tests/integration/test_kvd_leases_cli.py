"""`kvd leases` against a real daemon and real engine processes."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvd.client.operator_client import connect
from shared.types.errors import InvalidInputError
from tests.kvd_polling import eventually, reader_stats
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import attached_engine, encode, key_of

TOKENS = list(range(100, 150))

# Stores to slots until its parent kills it.
WRITING_ENGINE = """
import asyncio, sys
from pathlib import Path
from tests.synthetic_engine import attached_engine, encode, key_of

async def hold():
    async with attached_engine(Path(sys.argv[1]), name="writer") as engine:
        await engine.client.prepare_store(key_of("open"), encode(range(500, 540)), 0, 5)
        print("holding", flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""


@asynccontextmanager
async def _writing_engine(runtime_dir: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITING_ENGINE, str(runtime_dir), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            while line := await process.stdout.readline():  # log lines come before it
                if line == b"holding\n":
                    break
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _leases(kvd: KvdProcess) -> list[dict[str, Any]]:
    code, stdout, stderr = await run_cli("leases", "--json", "--runtime-dir", str(kvd.runtime_dir))
    assert code == 0, stderr
    found: list[dict[str, Any]] = json.loads(stdout)["leases"]
    return found


async def test_leases_are_listed_with_their_holder(tmp_path: Path) -> None:
    """An active load and store have their process, session and slots listed until they complete."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd,
        attached_engine(kvd.runtime_dir, name="engine-under-test") as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        load = await engine.client.prepare_load(key_of("a"), encode(TOKENS), 0, 5)
        store = await engine.client.prepare_store(key_of("b"), encode(range(40)), 0, 5)
        held = await _leases(kvd)
        table = (await run_cli("leases", "--runtime-dir", str(kvd.runtime_dir)))[1]
        await engine.client.complete_load(load)
        await engine.client.complete_store(store, success=False)
        left = await _leases(kvd)
        told = (await run_cli("leases", "--runtime-dir", str(kvd.runtime_dir)))[1]
    facts = [(lease["kind"], lease["session"]["session_id"], lease["num_slots"]) for lease in held]
    assert facts == [("load", "a", 4), ("store", "b", 3)]
    assert {lease["pid"] for lease in held} == {os.getpid()}
    assert not any(lease["quarantined"] for lease in held)
    assert table.count("engine-under-test") == 2
    assert left == []
    assert told == "no leases: nobody loads or stores just now\n"


async def test_a_stopped_writer_is_quarantined_over_a_restart_and_can_be_killed(
    tmp_path: Path,
) -> None:
    """Slots of a writer that hangs while kvd restarts are not reused until it is killed."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd,
        _writing_engine(kvd.runtime_dir) as writer,
    ):
        (before,) = await _leases(kvd)
        assert (before["pid"], before["engine_name"]) == (writer.pid, "writer")
        writer.send_signal(signal.SIGSTOP)
        await kvd.kill()
        await kvd.start()
        (lease,) = await _leases(kvd)
        assert (lease["pid"], lease["quarantined"], lease["kind"]) == (writer.pid, True, "store")
        assert (lease["process_status"], lease["num_slots"]) == ("stopped", 3)
        stats = await reader_stats(kvd)
        assert stats.layouts[0].quarantined_slots == 3
        at = ("--runtime-dir", str(kvd.runtime_dir))
        code, stdout, stderr = await run_cli("leases", "--kill", str(writer.pid), "--yes", *at)
        assert code == 0, stderr
        assert "3 slots" in stdout
        assert await writer.wait() == -signal.SIGKILL
        assert await _leases(kvd) == []
        assert (await reader_stats(kvd)).layouts[0].quarantined_slots == 0


async def test_an_attached_holder_can_be_killed(tmp_path: Path) -> None:
    """An attached engine that holds leases is killed too; its leases end with it."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        _writing_engine(kvd.runtime_dir) as writer,
    ):
        at = ("--runtime-dir", str(kvd.runtime_dir))
        arguments = ("leases", "--kill", str(writer.pid), "--yes", "--json", *at)
        code, stdout, stderr = await run_cli(*arguments)
        assert code == 0, stderr
        answer = json.loads(stdout)
        assert (answer["num_leases"], answer["num_slots"], answer["gone"]) == (1, 3, True)
        assert await writer.wait() == -signal.SIGKILL

        async def num_engines() -> int:
            return len((await reader_stats(kvd)).engines)

        await eventually(num_engines, 0)


async def test_only_holders_of_leases_are_killed(tmp_path: Path) -> None:
    """A process without a lease is refused: exit 3; without --yes nothing happens: exit 2."""
    async with (
        running_kvd(tmp_path, "--dram", "1MB") as kvd,
        attached_engine(kvd.runtime_dir),
    ):
        at = ("--runtime-dir", str(kvd.runtime_dir))
        for pid in (os.getpid(), kvd.pid, 1):
            code, _, stderr = await run_cli("leases", "--kill", str(pid), "--yes", *at)
            assert (code, "holds no lease" in stderr) == (3, True)
        code, _, stderr = await run_cli("leases", "--kill", str(os.getpid()), *at)
        assert (code, "--yes" in stderr) == (2, True)
        with connect(kvd.runtime_dir) as client, pytest.raises(InvalidInputError):
            # as processes of other namespaces appear
            await asyncio.to_thread(client.kill_holder, 0)
