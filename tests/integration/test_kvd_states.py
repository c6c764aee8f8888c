"""States of recurrent layers through a real kvd: gRPC, the arena, SSD, restarts, encryption."""

from pathlib import Path

import pytest

from tests.kvd_polling import all_clean, until_kept
from tests.processes import KvdProcess, running_kvd
from tests.synthetic_engine import attached_engine, key_of, layout_with_states

TOKENS = list(range(100, 150))  # three blocks of 16, and two tokens
SIZES = ("--dram", "1MB", "--ssd", "8MB")
LAYOUT = layout_with_states()
assert LAYOUT.state_slots == 3


async def test_a_state_is_stored_and_loaded(tmp_path: Path) -> None:
    """At any position, by any session with these tokens, and nothing without one."""
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
    """A kvd that has restarted without its memory, with and without keys; layer by layer, too."""
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
    """A kvd that was killed leaves them in its arena; without SSD there is nothing else."""
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


async def test_a_model_that_is_only_recurrent(tmp_path: Path) -> None:
    """Blocks of tokens have no bytes, and states all of theirs; from SSD as well."""
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
