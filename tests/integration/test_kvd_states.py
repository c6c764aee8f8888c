"""States of recurrent layers through a real kvd: gRPC, the arena, SSD, restarts, encryption."""

import json
from pathlib import Path

import pytest

from tests.kvd_polling import all_clean, until_kept
from tests.processes import KvdProcess, run_cli, running_kvd
from tests.synthetic_engine import attached_engine, key_of, layout_with_states

TOKENS = list(range(100, 150))  # three blocks of 16, and two tokens
SIZES = ("--dram", "1MB", "--ssd", "8MB")
LAYOUT = layout_with_states()
assert LAYOUT.state_slots == 3


async def test_a_state_is_stored_and_loaded(tmp_path: Path) -> None:
    """It can be loaded at any position, by any session with these tokens.

    Nothing without a state.
    """
    kvd_of = running_kvd(tmp_path, *SIZES)
    async with kvd_of as kvd, attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        assert await engine.store(key_of("a"), TOKENS, states=[20, 50]) == 50
        assert (await engine.load(key_of("a"), TOKENS)).position == 50
        assert (await engine.load(key_of("a"), [*TOKENS[:30], 7])).position == 20
        assert (await engine.load(key_of("fork"), [*TOKENS[:20], 7, 8])).position == 20
        missed = await engine.load(key_of("a"), TOKENS[:19])
        assert (missed.num_tokens, missed.miss_reason) == (0, "no_state")
        assert await engine.store(key_of("a"), [*TOKENS, 1], 48, [51]) == 51
        assert (await engine.load(key_of("a"), [*TOKENS, 1, 2])).position == 51
        assert (await engine.load(key_of("a"), TOKENS, dram_only=True)).position == 50


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_states_come_back_from_ssd(tmp_path: Path, is_encrypted: bool) -> None:
    """They survive a restart without memory, with and without keys, and load layer by layer."""
    key_file = tmp_path / "key"
    key_file.write_text("ab" * 32)
    key_file.chmod(0o600)
    environ = {"KVD_ENCRYPTION__KEY_FILE": str(key_file)} if is_encrypted else {}
    kvd = KvdProcess(tmp_path, SIZES, keep="none", environ=environ)
    await kvd.start()
    try:
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            await engine.store(key_of("a"), TOKENS, states=[20, 50])
        await all_clean(kvd)
        await kvd.stop()
        await kvd.start()
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            loaded = await engine.load(key_of("a"), TOKENS, accept_pending=True)
            assert (loaded.position, loaded.tiers) == (50, {"ssd"})
            assert (await engine.load(key_of("b"), TOKENS[:40])).position == 20
    finally:
        await kvd.stop()


async def test_states_are_adopted_with_the_memory(tmp_path: Path) -> None:
    """A killed kvd leaves them in its arena; there is no SSD here."""
    kvd = KvdProcess(tmp_path, ("--dram", "1MB", "--ssd", "0"))
    await kvd.start()
    try:
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            await engine.store(key_of("a"), TOKENS, states=[20, 50])
            await until_kept(kvd, "a")
            await kvd.kill()
            await kvd.start()
            await engine.client.wait_attached(30)
            assert (await engine.load(key_of("a"), TOKENS)).position == 50
    finally:
        await kvd.stop()


async def _cli(kvd: KvdProcess, *arguments: str) -> str:
    code, stdout, stderr = await run_cli(*arguments, "--runtime-dir", str(kvd.runtime_dir))
    assert code == 0, stderr
    return stdout


@pytest.mark.parametrize("num_layers", [0, 2])
async def test_a_session_file_has_the_newest_state(tmp_path: Path, num_layers: int) -> None:
    """Another kvd serves it, byte for byte; `kvd show` lists the states of both."""
    layout, file = layout_with_states(num_layers), str(tmp_path / "a.kvd")
    sizes = ("--dram", "16MB", "--ssd", "32MB")
    async with (
        running_kvd(tmp_path / "1", *sizes) as kvd,
        attached_engine(kvd.runtime_dir, layout) as engine,
    ):
        await engine.store(key_of("a"), TOKENS, states=[20, 49])
        await all_clean(kvd)
        shown = json.loads(await _cli(kvd, "show", "a", "--json"))
        assert [state["position"] for state in shown["states"]] == [20, 49]
        assert shown["states"][0]["tiers"] == ["dram", "ssd"]
        await _cli(kvd, "export", "a", file)
    async with running_kvd(tmp_path / "2", *sizes) as kvd:
        await _cli(kvd, "import", file, "--new-layout")
        async with attached_engine(kvd.runtime_dir, layout) as engine:
            assert (await engine.load(key_of("a"), TOKENS)).position == 49
        assert "49" in await _cli(kvd, "show", "a")


async def test_a_purely_recurrent_model(tmp_path: Path) -> None:
    """Blocks of tokens are empty, and states have all bytes; they are loaded from SSD as well."""
    layout = layout_with_states(num_layers=0)
    assert (layout.block_bytes, layout.state_slots) == (1 << 20, 2)
    kvd = KvdProcess(tmp_path, ("--dram", "16MB", "--ssd", "32MB"), keep="none")
    await kvd.start()
    try:
        async with attached_engine(kvd.runtime_dir, layout) as engine:
            assert await engine.store(key_of("a"), TOKENS, states=[33, 50]) == 50
            assert (await engine.load(key_of("a"), TOKENS)).position == 50
        await all_clean(kvd)
        await kvd.stop()
        await kvd.start()
        async with attached_engine(kvd.runtime_dir, layout) as engine:
            assert (await engine.load(key_of("a"), TOKENS)).position == 50
            assert (await engine.load(key_of("b"), TOKENS[:40])).position == 33
    finally:
        await kvd.stop()
