"""A layout whose files cannot be opened is not created anew: it waits, and its clean sessions

come back with the files. ¶ Each failure is caused while kvd is down, and undone while it is up.
"""

import asyncio
import errno
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvd.tiers.volume_identity import ID_NAME
from shared.kvd_client import data_socket_protocol as packets
from shared.kvd_client.client import KvdClient
from shared.kvd_client.messages import layout_message
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.packets import receive
from shared.process.runtime_dir import DATA_SOCKET, ENGINE_SOCKET
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of
from tests.processes import run_cli
from tests.sampled import sampled
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of, small_layout

LAYOUT = small_layout()
NAME = LAYOUT.fingerprint
NUM_SESSIONS = 12
SIZES = {
    "KVD_DRAM__BYTES": "1MB",
    "KVD_SSD__BYTES": "4MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "100KB",
}

Undo = Callable[[], object]


def _tokens(number: int) -> list[int]:
    """Return fifty tokens of a session that shares no prefix with another."""
    return list(range(1000 * number, 1000 * number + 50))


async def _store(engine: SyntheticEngine, first: int) -> None:
    for number in range(first, first + NUM_SESSIONS):
        assert await engine.store(key_of(f"s{number}"), _tokens(number)) == 50


async def _num_whole(engine: SyntheticEngine, first: int = 0) -> int:
    """Count the sessions from `first` on that are loaded completely; compare every byte."""
    numbers = range(first, first + NUM_SESSIONS)
    loads = [await engine.load(key_of(f"s{number}"), _tokens(number)) for number in numbers]
    return sum(load.num_tokens == 50 for load in loads)


@asynccontextmanager
async def _filled_kvd(
    tmp_path: Path, keep: str = "none", **settings: str
) -> AsyncIterator[FaultyKvd]:
    """Make a kvd that is down, with clean sessions."""
    kvd = FaultyKvd(tmp_path, keep=keep, **SIZES, **settings)
    try:
        await kvd.start()
        async with attached_engine(kvd.runtime_dir) as engine:
            await _store(engine, 0)
            await all_clean(kvd)
        assert await kvd.stop() == 0
        yield kvd
    finally:
        await kvd.kill()


@asynccontextmanager
async def _trying_engine(kvd: FaultyKvd) -> AsyncIterator[SyntheticEngine]:
    """Start an engine that attaches as soon as it can."""
    client = KvdClient(kvd.runtime_dir, LAYOUT, "trying", reconnect_delay_s=0.02)
    running = asyncio.create_task(client.run())
    try:
        yield SyntheticEngine(client, LAYOUT)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _num_unavailable(kvd: FaultyKvd) -> int:
    return len((await reader_stats(kvd)).unavailable)


async def _refusal(kvd: FaultyKvd) -> grpc.aio.AioRpcError:
    """Return the error with which an attach is refused."""
    with packets.connect(str(kvd.runtime_dir / DATA_SOCKET)) as sock:
        welcome = packets.decode((await receive(sock))[0])
        assert isinstance(welcome, packets.Welcome)
        async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir / ENGINE_SOCKET}") as channel:
            request = kvd_pb2.AttachRequest(data_token=welcome.token, layout=layout_message(LAYOUT))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await kvd_pb2_grpc.EngineStub(channel).Attach(request).read()
    return refused.value


# -------------------------------------------------------------------- ways of failing, and back


def _disk_is_late(volumes: Path) -> Undo:
    """Make the directory a link to a disk that is not mounted."""
    disk = volumes.with_name("disk")
    volumes.rename(disk.with_name("unmounted"))
    volumes.symlink_to(disk)
    return lambda: disk.with_name("unmounted").rename(disk)


def _mount_point(volumes: Path) -> Undo:
    """Make the directory empty, like a mount point."""
    return _in_place_of(volumes, Path.mkdir)


def _mount_point_of_one(volumes: Path) -> Undo:
    """Make the layout's own directory empty, like a mount point."""
    return _in_place_of(volumes / NAME, Path.mkdir)


def _other_disk(volumes: Path) -> Undo:
    """Put another volume in its place."""

    def make(directory: Path) -> None:
        directory.mkdir()
        (directory / ID_NAME).write_text("5e" * 16 + "\n")
        (directory / "00000.segment").write_bytes(b"somebody else's")

    return _in_place_of(volumes / NAME, make)


def _no_directory(volumes: Path) -> Undo:
    """Put a file in the place of the directory."""
    return _in_place_of(volumes / NAME, Path.touch)


def _unreadable(volumes: Path) -> Undo:
    """Make listing the directory fail, as with EIO or EACCES: a link that leads nowhere."""
    return _in_place_of(volumes / NAME, lambda path: path.symlink_to(path))


def _damage_id(volumes: Path) -> Undo:
    """Damage the file with the volume's id."""
    return _in_place_of(volumes / NAME / ID_NAME, lambda path: path.write_bytes(b"\xff" * 33))


def _segment_gone(volumes: Path) -> Undo:
    """Remove a segment."""
    return _in_place_of(volumes / NAME / "00001.segment", lambda _: None)


def _segment_cut(volumes: Path) -> Undo:
    """Cut a segment short."""

    def make(path: Path) -> None:
        path.write_bytes(path.with_name("away").read_bytes()[:12345])

    return _in_place_of(volumes / NAME / "00001.segment", make)


def _segment_not_opened(volumes: Path) -> Undo:
    """Make a segment impossible to open."""
    return _in_place_of(volumes / NAME / "00001.segment", lambda path: path.symlink_to(path))


def _in_place_of(path: Path, make: Callable[[Path], object]) -> Undo:
    away = path.with_name("away")
    path.rename(away)
    make(path)

    def undo() -> None:
        if path.is_dir() and not path.is_symlink():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        away.rename(path)

    return undo


WAYS = {
    way.__name__.strip("_"): way
    for way in (
        _disk_is_late,
        _mount_point,
        _mount_point_of_one,
        _other_disk,
        _no_directory,
        _unreadable,
        _damage_id,
        _segment_gone,
        _segment_cut,
        _segment_not_opened,
    )
}
# One case each: the disk, the layout's directory, its id and a segment.
ALWAYS = ("disk_is_late", "other_disk", "damaged_id", "segment_cut")


@pytest.mark.parametrize("way", sampled(list(WAYS), 4, seed=1, always=ALWAYS))
async def test_files_that_appear_later_lose_nothing(tmp_path, outcome, way):
    """Engines are refused until the files are back; then every session is complete, for good."""
    async with _filled_kvd(tmp_path) as kvd:
        undo = WAYS[way](kvd.state_dir / "volumes")
        await kvd.start()
        refused = await _refusal(kvd)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert "kvd reopen" in str(refused.details())
        async with _trying_engine(kvd) as engine:
            await eventually(lambda: _num_unavailable(kvd), 1)
            undo()
            await engine.client.wait_attached(60)
            whole = await _num_whole(engine)
            await _store(engine, 100)
            await all_clean(kvd)
        assert await kvd.stop() == 0
        await kvd.start()
        async with attached_engine(kvd.runtime_dir) as engine:
            found = whole, await _num_whole(engine), await _num_whole(engine, 100)
        outcome(f"unavailable; then {found[0]}, {found[1]} and {found[2]} whole")
        assert found == (NUM_SESSIONS,) * 3


async def test_a_layout_is_retried_without_an_engine(tmp_path):
    """When its files are back it is served again, though no engine asks for it."""
    async with _filled_kvd(tmp_path) as kvd:
        undo = _mount_point(kvd.state_dir / "volumes")
        await kvd.start()
        assert await _num_unavailable(kvd) == 1
        undo()
        await eventually(lambda: _num_unavailable(kvd), 0)
        assert len(await sessions_of(kvd)) == NUM_SESSIONS
        code, events, _ = await run_cli("events", *("--runtime-dir", str(kvd.runtime_dir)))
        assert code == 0
        assert events.index("layout_unavailable") < events.index("layout_available")


async def test_operators_see_an_unavailable_layout(tmp_path):
    """`kvd doctor`, `kvd stats`, `kvd ls`, `kvd flush` and the metrics name what is missing."""
    at = ("--runtime-dir", str(tmp_path / "run"))
    async with _filled_kvd(tmp_path) as kvd:
        _mount_point(kvd.state_dir / "volumes")
        await kvd.start()
        doctor = await run_cli("doctor", *at)
        assert f"layout {NAME[:12]} has been unavailable" in doctor[1]
        assert f"kvd reopen {NAME[:12]}" in doctor[1]
        assert NAME[:12] in (await run_cli("stats", *at))[1]
        for command in (("ls",), ("flush", "--all", "--yes")):
            code, _, stderr = await run_cli(*command, *at)
            assert (code, "1 layouts are unavailable" in stderr) == (0, True)
        code, _, stderr = await run_cli("show", "s0", *at)
        assert (code, "a layout that is unavailable" in stderr) == (3, True)


async def _tiers(engine: SyntheticEngine) -> set[str]:
    """Return the tiers from which the first sessions are loaded completely."""
    tiers: set[str] = set()
    for number in range(NUM_SESSIONS):
        load = await engine.load(key_of(f"s{number}"), _tokens(number))
        assert load.num_tokens == 50
        tiers |= load.tiers
    return tiers


async def test_the_arena_is_kept_while_its_layout_is_unavailable(tmp_path):
    """The arena of an earlier kvd is neither removed nor created anew meanwhile."""
    async with _filled_kvd(tmp_path, keep="file") as kvd:
        undo = _mount_point(kvd.state_dir / "volumes")
        for _ in range(2):
            await kvd.start()
            assert await _num_unavailable(kvd) == 1
            await _refusal(kvd)
            assert await kvd.stop() == 0
        await kvd.start()
        async with _trying_engine(kvd) as engine:
            undo()
            await engine.client.wait_attached(60)
            assert await _tiers(engine) == {"dram"}


async def test_memory_that_cannot_be_adopted_now_is_kept(tmp_path):
    """A machine short of memory or descriptors delays adoption, but loses nothing in DRAM."""
    async with _filled_kvd(tmp_path, keep="file") as kvd:
        kvd.faults = {"fail_at": ("arena_adopted", errno.ENOMEM)}
        await kvd.start()
        async with attached_engine(kvd.runtime_dir) as engine:
            assert "layout_not_restored" in kvd.log()
            assert await _tiers(engine) == {"dram"}


@pytest.mark.parametrize("column", ["message", "extents_per_segment"])
async def test_a_damaged_row_of_the_layout_is_replaced(tmp_path, outcome, column):
    """An attaching engine supplies the layout's message; only the row has the segments' size."""
    async with _filled_kvd(tmp_path) as kvd:
        with sqlite3.connect(kvd.state_dir / "manifest.db") as db:
            value = {"message": b"\xff\xff", "extents_per_segment": 0}[column]
            (good,) = db.execute(f"SELECT {column} FROM layouts").fetchone()  # noqa: S608
            db.execute(f"UPDATE layouts SET {column} = ?", (value,))  # noqa: S608
        db.close()
        await kvd.start()
        assert await _num_unavailable(kvd) == 1
        if column == "extents_per_segment":
            assert (await _refusal(kvd)).code() is grpc.StatusCode.UNAVAILABLE
            assert await kvd.stop() == 0
            with sqlite3.connect(kvd.state_dir / "manifest.db") as db:
                db.execute("UPDATE layouts SET extents_per_segment = ?", (good,))
            db.close()
            await kvd.start()
        for _ in range(2):
            async with attached_engine(kvd.runtime_dir) as engine:
                assert await _num_whole(engine) == NUM_SESSIONS
            assert await kvd.stop() == 0
            await kvd.start()
        assert await _num_unavailable(kvd) == 0
        outcome(f"unavailable; then {NUM_SESSIONS} whole")


# ------------------------------------------------------------------------- an operator decides


async def _reopen(kvd: FaultyKvd, *decision: str) -> int:
    at = ("--runtime-dir", str(kvd.runtime_dir))
    return (await run_cli("reopen", NAME[:8], *decision, *at))[0]


async def test_a_layout_that_is_set_aside_is_kept(tmp_path):
    """Rows and files get another name; the test follows docs/operations.md to bring them back."""
    async with _filled_kvd(tmp_path) as kvd:
        volumes = kvd.state_dir / "volumes"
        undo = _segment_gone(volumes)
        await kvd.start()
        assert await _reopen(kvd) == 69
        assert await _reopen(kvd, "--set-aside", "--yes") == 0
        async with attached_engine(kvd.runtime_dir) as engine:
            assert await _num_whole(engine) == 0
            await _store(engine, 100)
            await all_clean(kvd)
        assert await kvd.stop() == 0
        del undo  # its place is under another name now
        aside = volumes / f"{NAME}.set-aside-1"
        (aside / "away").rename(aside / "00001.segment")
        (volumes / NAME).rename(volumes / f"{NAME}.set-aside-2")
        aside.rename(volumes / NAME)
        with sqlite3.connect(kvd.state_dir / "manifest.db") as db:
            for old, new in ((NAME, f"{NAME}.set-aside-2"), (f"{NAME}.set-aside-1", NAME)):
                db.execute("UPDATE layouts SET fingerprint = ? WHERE fingerprint = ?", (new, old))
        db.close()
        await kvd.start()
        async with attached_engine(kvd.runtime_dir) as engine:
            assert await _num_whole(engine) == NUM_SESSIONS
            assert await _num_whole(engine, 100) == 0


async def test_accepting_a_loss_loses_only_the_missing_segment(tmp_path, outcome):
    """The other segments are served, and the blocks of the missing one forgotten."""
    async with _filled_kvd(tmp_path) as kvd:
        (kvd.state_dir / "volumes" / NAME / "00001.segment").unlink()
        await kvd.start()
        assert await _reopen(kvd, "--accept-loss", "--yes") == 0
        for _ in range(2):
            async with attached_engine(kvd.runtime_dir) as engine:
                num_whole = await _num_whole(engine)
                counters = (await reader_stats(kvd)).layouts[0].counters
            assert 0 < num_whole < NUM_SESSIONS
            assert counters["blocks_corrupt_ssd"] == 0
            assert await kvd.stop() == 0
            await kvd.start()
            assert await _num_unavailable(kvd) == 0
        outcome(f"{num_whole} whole")
