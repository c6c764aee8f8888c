"""Windows of layers through a real kvd: gRPC, the arena, SSD, restarts, encryption, files."""

import json
from pathlib import Path

import numpy as np
import pytest

from shared.types.lineage import WHOLE
from tests.kvd_polling import all_clean, until_kept
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import attached_engine, encode, key_of, layout_with_windows

TOKENS = list(range(100, 198))  # six blocks of 16, and two tokens
SIZES = ("--dram", "1MB", "--ssd", "8MB")
LAYOUT = layout_with_windows()
assert (LAYOUT.window, LAYOUT.window_slots) == (20, 3)


async def test_windows_are_stored_and_loaded(tmp_path: Path) -> None:
    """They exist for the named ends, for any session with these tokens; nothing without windows."""
    kvd_of = running_kvd(tmp_path, *SIZES)
    async with kvd_of as kvd, attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        assert await engine.store(key_of("a"), TOKENS, states=[48, 98]) == 98
        assert (await engine.load(key_of("a"), TOKENS)).num_tokens == 98
        assert (await engine.load(key_of("a"), [*TOKENS[:50], 7])).num_tokens == 48
        assert (await engine.load(key_of("fork"), [*TOKENS[:60], 7, 8])).num_tokens == 48
        missed = await engine.load(key_of("a"), TOKENS[:30])
        assert (missed.num_tokens, missed.miss_reason) == (0, "no_window")
        assert await engine.store(key_of("a"), [*TOKENS, 1], 96, [99]) == 99
        assert (await engine.load(key_of("a"), [*TOKENS, 1, 2])).num_tokens == 99
        assert (await engine.load(key_of("a"), [*TOKENS, 1], dram_only=True)).num_tokens == 99


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_windows_come_back_from_ssd(tmp_path: Path, is_encrypted: bool) -> None:
    """They survive a restart without memory, with and without keys, and load layer by layer."""
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    key_file.chmod(0o600)
    environ = {"KVD_ENCRYPTION__KEY_FILE": str(key_file)} if is_encrypted else {}
    kvd = KvdProcess(tmp_path, SIZES, keep="none", environ=environ)
    await kvd.start()
    try:
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            await engine.store(key_of("a"), TOKENS, states=[48, 98])
        await all_clean(kvd)
        await kvd.stop()
        await kvd.start()
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            loaded = await engine.load(key_of("a"), TOKENS, accept_pending=True)
            assert (loaded.num_tokens, loaded.tiers) == (98, {"ssd"})
            assert (await engine.load(key_of("b"), TOKENS[:60])).num_tokens == 48
    finally:
        await kvd.stop()


async def test_windows_are_adopted_with_the_memory(tmp_path: Path) -> None:
    """A killed kvd leaves them in its arena; there is no SSD here."""
    kvd = KvdProcess(tmp_path, ("--dram", "1MB", "--ssd", "0"))
    await kvd.start()
    try:
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            await engine.store(key_of("a"), TOKENS, states=[48, 98])
            await until_kept(kvd, "a")
            await kvd.kill()
            await kvd.start()
            await engine.client.wait_attached(30)
            assert (await engine.load(key_of("a"), TOKENS)).num_tokens == 98
    finally:
        await kvd.stop()


async def _cli(kvd: KvdProcess, *arguments: str) -> str:
    code, stdout, stderr = await run_cli(*arguments, "--runtime-dir", str(kvd.runtime_dir))
    assert code == 0, stderr
    return stdout


async def test_a_session_file_has_the_windows_for_its_end(tmp_path: Path) -> None:
    """Another kvd serves it, byte for byte; `kvd show` lists the tokens that have windows."""
    file = str(tmp_path / "a.kvd")
    sizes = ("--dram", "16MB", "--ssd", "32MB")
    async with (
        running_kvd(tmp_path / "1", *sizes) as kvd,
        attached_engine(kvd.runtime_dir, LAYOUT) as engine,
    ):
        await engine.store(key_of("a"), TOKENS, states=[48, 98])
        await all_clean(kvd)
        shown = json.loads(await _cli(kvd, "show", "a", "--json"))
        ranges = [(int(w["token_offset"]), int(w["num_tokens"])) for w in shown["windows"]]
        assert ranges == [(16, 32), (64, 34)]
        assert shown["windows"][0]["tiers"] == ["dram", "ssd"]
        assert "windows, of 66 of 98 tokens" in await _cli(kvd, "show", "a")
        await _cli(kvd, "export", "a", file)
    async with running_kvd(tmp_path / "2", *sizes) as kvd:
        await _cli(kvd, "import", file, "--new-layout")
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            assert (await engine.load(key_of("a"), TOKENS)).num_tokens == 98
        assert "windows, of 34 of 98 tokens" in await _cli(kvd, "show", "a")


@pytest.mark.parametrize(("named", "end"), [((80, 98), 93), ((64, 80), 64)])
async def test_a_truncated_session_is_imported_with_its_windows(
    tmp_path: Path, named: tuple[int, ...], end: int
) -> None:
    """Its blocks begin elsewhere; loads end as near to the end as complete windows exist."""
    file = str(tmp_path / "a.kvd")
    sizes = ("--dram", "16MB", "--ssd", "32MB")
    kept = [*TOKENS[:16], *TOKENS[21:]]
    lineage = WHOLE.after(encode(TOKENS), [(16, 21)])
    async with (
        running_kvd(tmp_path / "1", *sizes) as kvd,
        attached_engine(kvd.runtime_dir, LAYOUT) as engine,
    ):
        await engine.store(key_of("a"), TOKENS, states=named)
        await engine.client.discard(key_of("a"), encode(TOKENS), [(16, 21)], lineage=WHOLE)
        await all_clean(kvd)
        await _cli(kvd, "export", "a", file)
    async with running_kvd(tmp_path / "2", *sizes) as kvd:
        await _cli(kvd, "import", file, "--new-layout")
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            grant = await engine.client.prepare_load(
                key_of("a"), encode(kept), 0, 20.0, lineage=lineage
            )
            assert grant.end_token == end
            for window in grant.windows:
                places = range(window.token_offset, window.token_offset + window.num_tokens)
                before = [at if at < 16 else at + 5 for at in places]
                rows = engine.window_rows(
                    grant.arena, window, window.start, before, [kept[at] for at in places]
                )
                assert all(np.array_equal(there, expected) for there, expected in rows)
            await engine.client.complete_load(grant)
