"""kvd export and kvd import against real daemons: sessions move completely or not at all."""

import asyncio
import json
import os
import re
import stat
from pathlib import Path

import grpc
import pytest

from kvd.client.operator_client import connect
from kvd.session_files import file_format
from kvd.session_files.file_reader import FileReader
from kvd.session_files.transfers import MOST_TRANSFERS
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import FILES_SOCKET
from shared.types.errors import InvalidInputError
from shared.types.lineage import WHOLE
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import SyntheticEngine, attached_engine, encode, key_of, small_layout

TOKENS = list(range(100, 1150))  # 65 blocks and 10 tokens
SIZES = ("--dram", "1MB", "--ssd", "4MB")


async def _cli(kvd: KvdProcess, *arguments: str) -> tuple[int, str]:
    """Return the exit code, and the output of either stream."""
    code, stdout, stderr = await run_cli(*arguments, "--runtime-dir", str(kvd.runtime_dir))
    return code, stdout + stderr


async def _stored_sessions(kvd: KvdProcess) -> dict[str, int]:
    return {i.session.session_id: i.num_tokens for i in await sessions_of(kvd)}


def _hidden_files(directory: Path) -> list[Path]:
    return list(directory.glob(".*"))


async def _export(kvd: KvdProcess, engine: SyntheticEngine, file: Path) -> bytes:
    """Export a session; return its file."""
    await engine.store(key_of("a"), TOKENS)
    assert (await _cli(kvd, "export", "a", str(file)))[0] == 0
    return await asyncio.to_thread(file.read_bytes)


async def test_a_session_moves_to_another_kvd(tmp_path: Path) -> None:
    """An imported session is served byte for byte, in the order of its tokens."""
    file = tmp_path / "a.kvd"
    async with running_kvd(tmp_path / "1", *SIZES) as kvd, attached_engine(kvd.runtime_dir) as one:
        await _export(kvd, one, file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        remedy = "give another file, or add --force to overwrite it"
        answer = await _cli(kvd, "export", "a", str(file))
        assert answer == (2, f"kvd: the file {file} already exists: {remedy}\n")
    assert not await asyncio.to_thread(_hidden_files, tmp_path)
    async with running_kvd(tmp_path / "2", *SIZES) as kvd:
        code, said = await _cli(kvd, "import", str(file))
        assert (code, "--new-layout" in said) == (5, True)
        async with attached_engine(kvd.runtime_dir) as two:
            assert (await _cli(kvd, "import", str(file)))[0] == 0
            loaded = await two.load(key_of("a"), TOKENS)
            assert (loaded.num_tokens, await _stored_sessions(kvd)) == (1050, {"a": 1050})
            # It continues where it ended, and forks share its blocks.
            await two.store(key_of("a"), [*TOKENS, *range(40)])
            fork = await two.load(key_of("fork"), [*TOKENS[:64], 7])
            assert fork.num_tokens == 64


async def test_export_and_import_without_an_engine(tmp_path: Path) -> None:
    """A restarted kvd exports from SSD, and imports to SSD, without an engine."""
    file = tmp_path / "a.kvd"
    kvd = KvdProcess(tmp_path / "1", SIZES, keep="none")
    await kvd.start()
    async with attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("a"), TOKENS)
    await all_clean(kvd)
    await kvd.stop()
    await kvd.start()
    try:
        assert (await _cli(kvd, "export", "a", str(file)))[0] == 0
    finally:
        await kvd.stop()
    async with running_kvd(tmp_path / "2", *SIZES, keep="none") as kvd:
        assert (await _cli(kvd, "import", str(file), "--new-layout"))[0] == 0
        async with attached_engine(kvd.runtime_dir) as engine:
            assert (await engine.load(key_of("a"), TOKENS)).num_tokens == 1050
        await eventually(lambda: _dirty_bytes(kvd), 0)


async def _dirty_bytes(kvd: KvdProcess) -> int:
    return sum(layout.dirty_bytes for layout in (await reader_stats(kvd)).layouts)


async def test_a_session_larger_than_dram(tmp_path: Path) -> None:
    """It passes through a small DRAM tier, in both directions, and is complete at the end."""
    tokens = list(range(4000))  # 250 blocks of 8 KiB
    file = tmp_path / "a.kvd"
    sizes = ("--dram", "256KB", "--ssd", "8MB")
    async with running_kvd(tmp_path / "1", *sizes) as kvd, attached_engine(kvd.runtime_dir) as one:
        await one.store(key_of("a"), tokens)
        assert (await _cli(kvd, "export", "a", str(file)))[0] == 0
    async with running_kvd(tmp_path / "2", *sizes) as kvd, attached_engine(kvd.runtime_dir) as two:
        code, said = await _cli(kvd, "import", str(file), "--json")
        assert (code, json.loads(said)["num_tokens"]) == (0, 4000)
        assert (await two.load(key_of("a"), tokens)).num_tokens == 4000


async def test_import_under_another_name_and_over_a_session(tmp_path: Path) -> None:
    """An existing session stays unless it is to be replaced; name and tenant may be changed."""
    file = tmp_path / "a.kvd"
    async with running_kvd(tmp_path, *SIZES) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await _export(kvd, engine, file)
        other = [*range(20), *TOKENS]
        await _cli(kvd, "flush", "a", "--yes")
        await engine.store(key_of("a"), other)
        code, said = await _cli(kvd, "import", str(file))
        assert (code, "--replace" in said, await _stored_sessions(kvd)) == (5, True, {"a": 1070})
        assert (await _cli(kvd, "import", str(file), "--session", "b"))[0] == 0
        assert (await _cli(kvd, "import", str(file), "--tenant", "acme"))[0] == 0
        assert (await _cli(kvd, "import", str(file), "--replace"))[0] == 0
        assert (await _cli(kvd, "import", str(file), "--replace"))[0] == 0
        for key in (key_of("a"), key_of("b"), key_of("a", "acme")):
            assert (await engine.load(key, TOKENS)).num_tokens == 1050
        assert (await engine.load(key_of("a"), other)).num_tokens == 0
        assert len(await sessions_of(kvd)) == 3


async def test_a_damaged_file_imports_nothing(tmp_path: Path) -> None:
    """Cut, flipped, longer, of another version or no file at all: one line, and no session."""
    file = tmp_path / "a.kvd"
    async with running_kvd(tmp_path, *SIZES) as kvd, attached_engine(kvd.runtime_dir) as engine:
        good = await _export(kvd, engine, file)
        await _cli(kvd, "flush", "a", "--yes")
        flipped = bytearray(good)
        flipped[len(good) // 2] ^= 1
        for bad, what in (
            (good[: len(good) // 2], "incomplete"),
            (good[:-1], "incomplete"),
            (bytes(flipped), "damaged"),
            (good + b"x", "damaged"),
            (good[:8] + b"\x02" + good[9:], "damaged"),  # it has no state
            (good[:8] + b"\x03" + good[9:], "damaged"),  # nor windows
            (good[:8] + b"\x04" + good[9:], "version 4"),
            (b"SQLite format 3", "not a session file"),
            (b"", "incomplete"),
        ):
            file.write_bytes(bad)
            code, said = await _cli(kvd, "import", str(file))
            assert (code, what in said) == (2, True), said
            assert re.fullmatch(r"kvd: .*\n", said)
        assert await _stored_sessions(kvd) == {}
        file.write_bytes(good)
        file.chmod(0)
        if os.geteuid():
            assert (await _cli(kvd, "import", str(file)))[0] == 2
        assert (await _cli(kvd, "import", str(tmp_path / "none")))[0] == 2
        os.mkfifo(tmp_path / "pipe")
        writer = os.open(tmp_path / "pipe", os.O_RDWR)
        code, said = await _cli(kvd, "import", str(tmp_path / "pipe"))
        os.close(writer)
        assert (code, "is a pipe" in said) == (2, True)


async def test_a_file_of_another_model(tmp_path: Path) -> None:
    """Rows of other models and shapes are refused by name, before any row is sent."""
    file = tmp_path / "a.kvd"
    async with (
        running_kvd(tmp_path / "1", *SIZES) as kvd,
        attached_engine(kvd.runtime_dir, small_layout(3)) as one,
    ):
        await one.store(key_of("a"), TOKENS)
        assert (await _cli(kvd, "export", "a", str(file)))[0] == 0
    async with running_kvd(tmp_path / "2", *SIZES) as kvd, attached_engine(kvd.runtime_dir):
        code, said = await _cli(kvd, "import", str(file))
        assert code == 5
        assert small_layout(3).fingerprint[:12] in said
        assert small_layout().fingerprint[:12] in said
        text = await asyncio.to_thread(file.read_bytes)
        without_rows = text[: text.index(encode(TOKENS[:16]))]
        assert "has layout" in await _refusal(kvd, without_rows)


async def _refusal(kvd: KvdProcess, beginning: bytes) -> str:
    """Return the error of an import whose file is not complete yet."""
    async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/operator.sock") as channel:
        call = kvd_pb2_grpc.OperatorStub(channel).ImportSession(timeout=20)
        await call.write(kvd_pb2.ImportSessionRequest(target=kvd_pb2.ImportTarget()))
        await call.write(kvd_pb2.ImportSessionRequest(data=beginning))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
    return str(refused.value.details())


async def test_an_import_without_room_leaves_nothing(tmp_path: Path) -> None:
    """The error says which setting to raise."""
    file = tmp_path / "a.kvd"
    async with running_kvd(tmp_path / "1", *SIZES) as kvd, attached_engine(kvd.runtime_dir) as one:
        await _export(kvd, one, file)
    sizes = ("--dram", "128KB", "--ssd", "0")
    async with running_kvd(tmp_path / "2", *sizes) as kvd, attached_engine(kvd.runtime_dir) as two:
        await two.store(key_of("old"), TOKENS[:64])
        code, said = await _cli(kvd, "import", str(file))
        assert (code, "tiers" in said) == (6, True), said
        assert "a" not in await _stored_sessions(kvd)
        assert not [name for name in await _stored_sessions(kvd) if name.startswith("import-")]


async def test_a_truncated_session(tmp_path: Path) -> None:
    """Tokens behind a discard move with their lineage, and are found only with it."""
    file = tmp_path / "a.kvd"
    lineage = WHOLE.after(encode(TOKENS), [(8, 500)])
    left = [*TOKENS[:8], *TOKENS[500:]]
    async with running_kvd(tmp_path / "1", *SIZES) as kvd, attached_engine(kvd.runtime_dir) as one:
        await one.store(key_of("a"), TOKENS)
        kept = await one.client.discard(key_of("a"), encode(TOKENS), [(8, 500)], lineage=WHOLE)
        assert kept == len(left)
        assert (await _cli(kvd, "export", "a", str(file)))[0] == 0
    async with running_kvd(tmp_path / "2", *SIZES) as kvd, attached_engine(kvd.runtime_dir) as two:
        assert (await _cli(kvd, "import", str(file)))[0] == 0
        stranger = await two.client.prepare_load(key_of("b"), encode(left), 0, 20.0, lineage=WHOLE)
        grant = await two.client.prepare_load(key_of("a"), encode(left), 0, 20.0, lineage=lineage)
        assert (stranger.end_token, grant.end_token) == (0, len(left))
        await two.client.complete_load(grant)


async def test_discards_that_a_restarted_kvd_does_not_know(tmp_path: Path) -> None:
    """What follows them is not exported unless an engine names them again; --prefix cuts there."""
    kvd = KvdProcess(tmp_path, SIZES)
    left = [*TOKENS[:80], *TOKENS[500:]]
    lineage = WHOLE.after(encode(TOKENS), [(80, 500)])
    await kvd.start()
    try:
        async with attached_engine(kvd.runtime_dir) as engine:
            await engine.store(key_of("a"), TOKENS)
            await engine.client.discard(key_of("a"), encode(TOKENS), [(80, 500)], lineage=WHOLE)
            await all_clean(kvd)
        await kvd.stop()
        await kvd.start()
        code, said = await _cli(kvd, "export", "a", str(tmp_path / "refused"))
        assert (code, "--prefix" in said) == (5, True)
        assert not (tmp_path / "refused").exists()
        prefix = tmp_path / "prefix"
        code, said = await _cli(kvd, "export", "a", str(prefix), "--prefix", "--json")
        assert (code, json.loads(said)["num_tokens"]) == (0, 80)
        async with attached_engine(kvd.runtime_dir) as engine:
            grant = await engine.client.prepare_load(
                key_of("a"), encode(left), 0, 20.0, lineage=lineage
            )
            await engine.client.complete_load(grant)
        code, said = await _cli(kvd, "export", "a", str(tmp_path / "all"), "--json")
        assert (code, json.loads(said)["num_tokens"]) == (0, len(left))
    finally:
        await kvd.stop()


async def test_frames_can_travel_as_messages(tmp_path: Path) -> None:
    """Remote callers and older kvds have no stream; the files are the same, both ways."""
    streamed, sent = tmp_path / "streamed", tmp_path / "sent"
    async with running_kvd(tmp_path, *SIZES) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await _export(kvd, engine, streamed)
        await asyncio.to_thread((kvd.runtime_dir / FILES_SOCKET).unlink)
        await _export(kvd, engine, sent)
        one, two = await asyncio.gather(*(asyncio.to_thread(_rows, f) for f in (streamed, sent)))
        assert one == two
        await _cli(kvd, "flush", "a", "--yes")
        assert (await _cli(kvd, "import", str(streamed)))[0] == 0
        assert (await engine.load(key_of("a"), TOKENS)).num_tokens == len(TOKENS)


def _rows(file: Path) -> list[tuple[int, bytes, bytes]]:
    """Return the contents of a file but for its time."""
    frames = FileReader().feed(file.read_bytes())
    return [(frame.token_offset, frame.token_ids, bytes(frame.rows)) for frame in frames]


async def test_a_caller_that_leaves_an_export_holds_nothing(tmp_path: Path) -> None:
    """It holds no lease and no transfer, however often: the stream ends with its caller."""
    async with running_kvd(tmp_path, *SIZES) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("a"), TOKENS)
        for _ in range(MOST_TRANSFERS + 1):
            await asyncio.to_thread(_begin_export, kvd)
        await eventually(lambda: _leases(kvd), 0)
        assert (await _cli(kvd, "export", "a", str(tmp_path / "a.kvd")))[0] == 0


def _begin_export(kvd: KvdProcess) -> None:
    with connect(kvd.runtime_dir) as client:
        key = kvd_pb2.SessionKey(session_id="a")
        chunks = client.export_chunks(kvd_pb2.ExportSessionRequest(session=key, chunk_bytes=4096))
        for _ in range(3):
            assert next(chunks).data
        chunks.close()


async def _leases(kvd: KvdProcess) -> int:
    (layout,) = (await reader_stats(kvd)).layouts
    return layout.leases


@pytest.mark.parametrize("change", ["damaged", "short"])
async def test_a_refusal_in_the_middle_ends_the_stream(tmp_path: Path, change: str) -> None:
    """A caller that keeps sending learns what was wrong."""
    async with running_kvd(tmp_path, *SIZES) as kvd, attached_engine(kvd.runtime_dir) as engine:
        good = await _export(kvd, engine, tmp_path / "a.kvd")
        await _cli(kvd, "flush", "a", "--yes")
        bad = bytearray(good)
        bad[len(bad) // 4] ^= 1
        pieces = [bad] * 400 if change == "damaged" else [bytearray(good[:-1])]
        with pytest.raises(
            InvalidInputError, match="damaged" if change == "damaged" else "incomplete"
        ):
            await asyncio.to_thread(_import, kvd, pieces)
        assert await _stored_sessions(kvd) == {}


def _import(kvd: KvdProcess, pieces: list[bytearray]) -> None:
    with connect(kvd.runtime_dir) as client:
        client.import_session(kvd_pb2.ImportTarget(), iter(pieces))


async def test_an_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    """A caller that disconnects in the middle of a file leaves no session, no lease and no slot."""
    file = tmp_path / "a.kvd"
    async with running_kvd(tmp_path, *SIZES) as kvd, attached_engine(kvd.runtime_dir) as engine:
        good = await _export(kvd, engine, file)
        await _cli(kvd, "flush", "a", "--yes")
        await asyncio.to_thread(_break_off, kvd, good)
        await eventually(lambda: _stored_sessions(kvd), {})
        (layout,) = (await reader_stats(kvd)).layouts
        assert (layout.leases, layout.tiers[0].used_bytes) == (0, 0)
        assert (await _cli(kvd, "import", str(file)))[0] == 0


def _break_off(kvd: KvdProcess, good: bytes) -> None:
    """Send most of a file, and disconnect."""

    def requests():
        yield kvd_pb2.ImportSessionRequest(target=kvd_pb2.ImportTarget())
        yield kvd_pb2.ImportSessionRequest(data=good[: len(good) * 3 // 4])
        raise ConnectionError("gone")

    with grpc.insecure_channel(f"unix:{kvd.runtime_dir}/operator.sock") as channel:
        stub = kvd_pb2_grpc.OperatorStub(channel)
        try:
            stub.ImportSession(requests(), timeout=20)
        except grpc.RpcError:
            return
        raise AssertionError("it was taken for whole")


def test_the_documented_format_is_current() -> None:
    """The documentation has the versions of the code."""
    text = Path("kvd/FORMATS.md").read_text(encoding="utf-8")
    versions = f"{file_format.VERSION} to {file_format.VERSION_WITH_WINDOWS}"
    assert f"## Session files (versions {versions})" in text
