"""DRAM and leases when processes end: kvd is killed, engines are stopped, killed, disconnected."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import READER_SOCKET
from shared.types.granted_slots import Lookup
from tests.kvd_polling import all_clean, eventually, until_kept
from tests.processes import running_kvd
from tests.synthetic_engine import attached_engine, encode, key_of, small_layout

TOKENS = list(range(100, 150))  # three full blocks and two tokens
FLAGS = ("--dram", "1MB", "--ssd", "0")

# An engine that holds a store lease until a line on stdin makes it complete.
HOLDING = """
import asyncio, sys
from pathlib import Path
from tests.synthetic_engine import *

async def main():
    async with attached_engine(Path(sys.argv[1])) as engine:
        grant = await engine.client.prepare_store(key_of("held"), encode(range(16)), 0, 20)
        print(grant.lease_id, flush=True)
        while command := (await asyncio.to_thread(sys.stdin.readline)).strip():
            try:
                await engine.client.wait_attached(30)
                stored = await engine.client.complete_store(grant, success=True)
                print("stored", stored, flush=True)
            except Exception as error:
                print("lost", error.reason, flush=True)

asyncio.run(main())
"""


class HoldingEngine:
    """A process with an unfinished store."""

    def __init__(self, process, lease_id):
        self.process = process
        self.lease_id = lease_id

    async def complete(self):
        """Have it complete the store; return the result."""
        self.process.stdin.write(b"complete\n")
        async with asyncio.timeout(60):
            return (await self._line()).split()

    async def _line(self):
        while True:
            line = (await self.process.stdout.readline()).decode()
            if line.startswith(("stored", "lost")) or not line:
                return line


@asynccontextmanager
async def holding_engine(kvd):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOLDING, str(kvd.runtime_dir)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        while not (line := (await process.stdout.readline()).decode().strip()).isdigit():
            assert line, "it has ended"
        yield HoldingEngine(process, int(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def reader(kvd):
    address = f"unix:{kvd.runtime_dir / READER_SOCKET}"
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield kvd_pb2_grpc.ReaderStub(channel)


async def leases(kvd):
    """Return the leases that `kvd leases` lists."""
    async with reader(kvd) as stub:
        return list((await stub.ListLeases(kvd_pb2.ListLeasesRequest())).leases)


async def until_no_leases(kvd):
    async def num_leases():
        return len(await leases(kvd))

    await eventually(num_leases, 0)


def arena_files(kvd):
    return sorted(path.suffix for path in (kvd.state_dir.parent / "shm").rglob("*.*"))


def bytes_in(directory):
    return sum(path.stat().st_blocks * 512 for path in Path(directory).iterdir())


async def test_dram_outlives_a_kill_of_kvd(tmp_path: Path) -> None:
    """No block is on SSD; after SIGKILL the same engine loads every byte from DRAM."""
    async with (
        running_kvd(tmp_path, *FLAGS) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await engine.store(key_of("a"), TOKENS)
        await until_kept(kvd, "a")
        mapped = engine.client._attachment.mapped.slots
        for _ in range(2):
            await kvd.kill()
            await kvd.start()
            await engine.client.wait_attached(30)
            loaded = await engine.load(key_of("a"), TOKENS)
            assert (loaded.num_tokens, loaded.tiers) == (50, {"dram"})
            assert engine.client._attachment.mapped.slots is mapped
        assert arena_files(kvd) == [".journal", ".slots"]


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_slots_of_a_stopped_engine_are_not_reused(tmp_path: Path, end) -> None:
    """While it is stopped a new kvd keeps them for it; later it loses its lease, or is killed."""
    async with running_kvd(tmp_path, *FLAGS) as kvd, holding_engine(kvd) as engine:
        os.kill(engine.process.pid, signal.SIGSTOP)
        await kvd.kill()
        await kvd.start()
        (lease,) = await leases(kvd)
        assert (lease.lease_id, lease.pid) == (engine.lease_id, engine.process.pid)
        assert (lease.quarantined, lease.process_status) == (True, "stopped")
        async with attached_engine(kvd.runtime_dir) as other:
            await other.store(key_of("other"), TOKENS)
            assert [found.lease_id for found in await leases(kvd)] == [engine.lease_id]
            os.kill(engine.process.pid, end)
            if end is signal.SIGCONT:
                assert (await engine.complete())[0] == "lost"
            await until_no_leases(kvd)
            assert (await other.load(key_of("other"), TOKENS)).num_tokens == 50


async def test_a_store_survives_a_broken_connection(tmp_path: Path) -> None:
    """kvd keeps the lease, and the engine gets it back."""
    async with (
        running_kvd(tmp_path, *FLAGS) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        key, tokens = key_of("a"), bytes(4 * 16)
        grant = await engine.client.prepare_store(key, tokens, 0, 20)
        before = engine.client._attachment.engine_id
        engine.client._attachment.events.cancel()

        async def is_attached_again():
            return getattr(engine.client._attachment, "engine_id", before) != before

        await eventually(is_attached_again, True)
        (lease,) = await leases(kvd)
        assert (lease.lease_id, lease.quarantined) == (grant.lease_id, False)
        assert await engine.client.complete_store(grant, success=True) == 16
        assert not await leases(kvd)


async def test_an_engine_that_detaches_holds_nothing(tmp_path: Path) -> None:
    """Its process lives on: it is the test's own."""
    async with running_kvd(tmp_path, *FLAGS) as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            await engine.store(key_of("a"), TOKENS)
        await until_no_leases(kvd)


async def test_arenas_of_another_size_are_discarded(tmp_path: Path) -> None:
    """The log has a line for it; sessions that were in DRAM only are lost."""
    async with running_kvd(tmp_path, *FLAGS) as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            await engine.store(key_of("a"), TOKENS)
            await until_kept(kvd, "a")
        await kvd.kill()
        kvd._flags = ["--dram", "2MB", "--ssd", "0"]
        await kvd.start()
        async with attached_engine(kvd.runtime_dir, small_layout()) as engine:
            assert (await engine.load(key_of("a"), TOKENS)).num_tokens == 0
        assert "arena_discarded" in kvd.log()


async def test_layers_are_checked_as_they_are_read(tmp_path: Path) -> None:
    """The load is answered before its reads have ended.

    Each layer is complete when it is reported.
    """
    layout = small_layout(num_layers=12)
    tokens = list(range(1000, 1400))
    async with running_kvd(tmp_path, "--dram", "4MB", "--ssd", "64MB", keep="none") as kvd:
        async with attached_engine(kvd.runtime_dir, layout) as engine:
            await engine.store(key_of("a"), tokens)
            await all_clean(kvd)
            await kvd.kill()
            await kvd.start()
            await engine.client.wait_attached(30)
            grant = await engine.client.prepare_load(
                key_of("a"), encode(tokens), 0, 20, accept_pending=True
            )
            assert grant.lookup is Lookup.PENDING
            await engine.client.complete_load(grant)
            loaded = await engine.load(key_of("a"), tokens, accept_pending=True)
            assert (loaded.num_tokens, loaded.tiers <= {"dram", "ssd"}) == (400, True)
        assert not await leases(kvd)
        assert not arena_files(kvd)


async def test_an_engine_may_load_from_dram_only(tmp_path: Path) -> None:
    """It is granted what is in DRAM, learns that there is more, and nothing is read from SSD."""
    async with running_kvd(tmp_path, "--dram", "1MB", "--ssd", "64MB", keep="none") as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            await engine.store(key_of("a"), TOKENS)
            await all_clean(kvd)
            await kvd.kill()
            await kvd.start()
            await engine.client.wait_attached(30)
            ask = partial(
                engine.client.prepare_load, key_of("a"), encode(TOKENS), 0, 20, dram_only=True
            )
            assert (await ask()).miss_reason == "on_ssd"
            assert (await engine.load(key_of("a"), TOKENS[:32])).tiers == {"ssd"}
            grant = await ask()
            assert (grant.lookup, grant.end_token, grant.more) == (Lookup.HIT, 32, True)
            assert {span.tier for span in grant.spans} == {"dram"}
            await engine.client.complete_load(grant)
        assert not await leases(kvd)


@pytest.mark.parametrize(
    ("number", "is_kept"), [(signal.SIGTERM, True), (signal.SIGINT, False)], ids=str
)
async def test_the_log_says_what_stays_in_memory(tmp_path: Path, number, is_kept: bool) -> None:
    """After SIGTERM it has the path of the arena's file, its size, and how to remove it."""
    async with running_kvd(tmp_path, *FLAGS) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("a"), TOKENS)
        await kvd.signal(number)
    lines = [json.loads(line) for line in kvd.log().splitlines()]
    told = [line for line in lines if line["event"] == "dram_kept"]
    assert len(told) == is_kept
    for line in told:
        assert line["bytes"] == bytes_in(line["directory"]) > 0
        assert line["remedy"].startswith(f"run rm -r {line['directory']}")
