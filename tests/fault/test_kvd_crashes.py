"""kvd or its engine is killed, or stored data is damaged: misses, never wrong bytes.

The synthetic engine checks every byte it loads, so each load here is also such a check.
"""

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest

from shared.kvd_client import data_socket_protocol as packets
from shared.kvd_client.messages import layout_message
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.packets import receive
from shared.types.errors import ReportedError
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of
from tests.processes import KvdProcess, running_kvd
from tests.synthetic_engine import ATTACH_S, SyntheticEngine, attached_engine, key_of, small_layout

HEADER_BYTES = 4096
EXTENT_BYTES = HEADER_BYTES + 2 * 4096
FLAGS = ("--dram", "1MB", "--ssd", "4MB")

# An engine with an open store and load: it says when they are open, and waits to be killed.
HOLDING_ENGINE = """
import asyncio, sys
from pathlib import Path
from tests.synthetic_engine import attached_engine, encode, key_of

async def hold():
    async with attached_engine(Path(sys.argv[1])) as engine:
        await engine.store(key_of("held"), range(40))
        await engine.client.prepare_load(key_of("held"), encode(range(40)), 0, 5)
        await engine.client.prepare_store(key_of("open"), encode(range(500, 540)), 0, 5)
        print("holding", flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""


def _tokens(number: int) -> list[int]:
    """Return fifty tokens of a session that shares no prefix with another."""
    return list(range(1000 * number, 1000 * number + 50))


async def _store(engine: SyntheticEngine, num_sessions: int) -> None:
    for number in range(num_sessions):
        await engine.store(key_of(f"s{number}"), _tokens(number))


async def _restart(kvd: KvdProcess, engine: SyntheticEngine) -> None:
    """Kill kvd, start it, and wait until the engine has found the new one."""
    detached = asyncio.Event()
    engine.client.on_change.append(lambda attached: attached or detached.set())
    await kvd.kill()
    await kvd.start()
    async with asyncio.timeout(30):
        await detached.wait()
    await engine.client.wait_attached(30)


async def test_kill_keeps_every_stored_session(tmp_path: Path) -> None:
    """After SIGKILL every clean session is listed, and loaded completely from SSD."""
    async with (
        running_kvd(tmp_path, *FLAGS, keep="none") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        await _store(engine, 12)
        await all_clean(kvd)
        await _restart(kvd, engine)
        listed = await sessions_of(kvd)
        loads = [await engine.load(key_of(f"s{n}"), _tokens(n)) for n in range(12)]
    assert len(listed) == 12
    assert all((load.num_tokens, load.tiers) == (50, {"ssd"}) for load in loads)


async def test_kill_with_dirty_blocks_is_a_shorter_hit(tmp_path: Path) -> None:
    """Killed right after a store, kvd serves a prefix of it or a miss, and stores it again."""
    async with (
        running_kvd(tmp_path, *FLAGS, keep="none") as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        for _ in range(3):
            await _store(engine, 8)
            await _restart(kvd, engine)
            for number in range(8):
                load = await engine.load(key_of(f"s{number}"), _tokens(number))
                assert load.num_tokens in (0, 16, 32, 48, 50)
        await _store(engine, 8)
        load = await engine.load(key_of("s7"), _tokens(7))
    assert load.num_tokens == 50


async def test_kill_in_the_middle_of_stores(tmp_path: Path) -> None:
    """An engine that stores and loads while kvd is killed sees errors or misses only."""
    async with running_kvd(tmp_path, *FLAGS) as kvd, attached_engine(kvd.runtime_dir) as engine:
        stop = asyncio.Event()
        failures = 0

        async def work() -> None:
            """Store and load until the kill."""
            nonlocal failures
            number = 0
            while not stop.is_set():
                number = (number + 1) % 5
                try:
                    load = await engine.load(key_of(f"s{number}"), _tokens(number))
                    kept = load.num_tokens // 16 * 16
                    await engine.store(key_of(f"s{number}"), _tokens(number), kept)
                except ReportedError:  # wrong bytes would be an AssertionError
                    failures += 1
                    await engine.client.wait_attached(ATTACH_S)

        working = asyncio.create_task(work())
        for _ in range(3):
            await _restart(kvd, engine)
        stop.set()
        await working
        assert engine.client.attached
    assert failures > 0


async def test_damaged_segment_is_a_counted_miss(tmp_path: Path) -> None:
    """Damaged bytes on SSD are detected when they are read: the session is cut and counted."""
    async with running_kvd(tmp_path, *FLAGS, keep="none") as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            await engine.store(key_of("a"), _tokens(0))
            await all_clean(kvd)
        await kvd.kill()
        (segment,) = kvd.state_dir.glob("volumes/*/00000.segment")
        _flip(segment)
        await kvd.start()
        async with attached_engine(kvd.runtime_dir) as engine:
            load = await engine.load(key_of("a"), _tokens(0))
            counters = (await reader_stats(kvd)).layouts[0].counters
            assert load.num_tokens < 50
            assert counters["blocks_corrupt_ssd"] >= 1
            # Once stored again, it is complete, on SSD too.
            await engine.store(key_of("a"), _tokens(0), load.num_tokens)
            await all_clean(kvd)
            await _restart(kvd, engine)
            assert (await engine.load(key_of("a"), _tokens(0))).num_tokens == 50


def _flip(segment: Path) -> None:
    """Damage the second extent."""
    with segment.open("r+b") as file:
        file.seek(EXTENT_BYTES + HEADER_BYTES + 777)
        (byte,) = file.read(1)
        file.seek(EXTENT_BYTES + HEADER_BYTES + 777)
        file.write(bytes([byte ^ 1]))


async def test_corrupt_manifest_starts_empty(tmp_path: Path) -> None:
    """An index that is not a database is moved aside, and kvd serves without its sessions."""
    async with running_kvd(tmp_path, *FLAGS) as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            await _store(engine, 2)
        await kvd.stop()  # not killed: otherwise the write-ahead log would repair it
        (kvd.state_dir / "manifest.db").write_bytes(b"not a database" * 1000)
        await kvd.start()
        assert await sessions_of(kvd) == []
        async with attached_engine(kvd.runtime_dir) as engine:
            assert (await engine.load(key_of("s0"), _tokens(0))).num_tokens == 0
            assert await engine.store(key_of("s0"), _tokens(0)) == 50
    assert (kvd.state_dir / "manifest.db.corrupt-1").exists()
    assert "manifest_corrupt" in kvd.log()


async def test_manifest_with_a_lost_page_starts(tmp_path: Path) -> None:
    """An index with a damaged page is moved aside as well, or only the page's rows are lost."""
    async with running_kvd(tmp_path, *FLAGS) as kvd:
        async with attached_engine(kvd.runtime_dir) as engine:
            await _store(engine, 8)
        assert await kvd.stop() == 0
        path = kvd.state_dir / "manifest.db"
        content = bytearray(path.read_bytes())
        content[len(content) // 2 :] = b"\xa5" * (len(content) - len(content) // 2)
        path.write_bytes(content)
        await kvd.start()
        async with attached_engine(kvd.runtime_dir) as engine:
            for number in range(8):
                await engine.load(key_of(f"s{number}"), _tokens(number))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_dead_engine_releases_its_leases(tmp_path: Path, number: signal.Signals) -> None:
    """An engine process that dies leaves no lease, and none of its open store is visible."""
    async with running_kvd(tmp_path, *FLAGS) as kvd:
        engine = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDING_ENGINE, str(kvd.runtime_dir)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert engine.stdout is not None
        assert await engine.stdout.readline()  # "holding", after the log's lines
        await eventually(lambda: _num_leases(kvd), 2)
        engine.send_signal(number)
        await engine.wait()
        await eventually(lambda: _num_leases(kvd), 0)
        async with attached_engine(kvd.runtime_dir) as other:
            assert (await other.load(key_of("open"), list(range(500, 540)))).num_tokens == 0
            assert (await other.load(key_of("held"), list(range(40)))).num_tokens == 40
        assert {info.session.session_id for info in await sessions_of(kvd)} == {"held"}


async def _num_leases(kvd: KvdProcess) -> int:
    layouts = (await reader_stats(kvd)).layouts
    return layouts[0].leases if layouts else 0


async def test_a_stopped_engine_keeps_its_slots(tmp_path: Path) -> None:
    """While an engine process is alive but silent, its leases stay: it might still be writing."""
    async with running_kvd(tmp_path, *FLAGS) as kvd:
        engine = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HOLDING_ENGINE, str(kvd.runtime_dir)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert engine.stdout is not None
        await engine.stdout.readline()
        await eventually(lambda: _num_leases(kvd), 2)
        engine.send_signal(signal.SIGSTOP)
        async with attached_engine(kvd.runtime_dir) as other:
            await _store(other, 20)
        assert await _num_leases(kvd) == 2
        engine.kill()
        await engine.wait()
        await eventually(lambda: _num_leases(kvd), 0)


async def test_junk_on_the_data_socket(tmp_path: Path) -> None:
    """A peer that sends junk loses its connection; a forged token attaches nobody."""
    async with running_kvd(tmp_path, *FLAGS) as kvd:
        for junk in (b"junk", b'{"kind": "arena", "arena_id": "mine"}', b"\xff" * 5000):
            with packets.connect(str(kvd.runtime_dir / "data.sock")) as sock:
                welcome, _ = await receive(sock)
                assert isinstance(packets.decode(welcome), packets.Welcome)
                sock.send(junk)
                async with asyncio.timeout(30):
                    while (await receive(sock))[0]:
                        pass
        async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/engine.sock") as channel:
            request = kvd_pb2.AttachRequest(
                data_token="forged",  # noqa: S106  # no secret: it must not work
                layout=layout_message(small_layout()),
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await kvd_pb2_grpc.EngineStub(channel).Attach(request).read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        async with attached_engine(kvd.runtime_dir) as engine:
            assert await engine.store(key_of("a"), _tokens(0)) == 50
