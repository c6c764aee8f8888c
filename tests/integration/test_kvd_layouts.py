"""Several layouts in one kvd: how they share DRAM, and what a restart keeps of it."""

import pytest

from shared.kvd_client.attachment import KvdUnavailableError
from tests.kvd_polling import all_clean
from tests.processes import running_kvd
from tests.synthetic_engine import attached_engine, key_of, small_layout

TOKENS = list(range(100, 150))
MODELS = ("5e" * 16, "6f" * 16)
LAYOUTS = [small_layout(model=model) for model in MODELS]
KEYS = [key_of("s", model=model) for model in MODELS]


async def test_a_layout_without_engines_gives_its_dram_to_another(tmp_path, monkeypatch):
    """Its sessions are on SSD; a layout with an engine keeps its DRAM, and the other is refused."""
    monkeypatch.setenv("KVD_DRAM__TOTAL_BYTES", "1MB")
    async with running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd:
        async with attached_engine(kvd.runtime_dir, LAYOUTS[0]) as engine:
            assert await engine.store(KEYS[0], TOKENS) == 50
            with pytest.raises(KvdUnavailableError, match=r"raise dram\.total_bytes"):
                async with attached_engine(kvd.runtime_dir, LAYOUTS[1], attach_s=2.0):
                    pass
            assert (await engine.load(KEYS[0], TOKENS)).tiers == {"dram"}
        async with attached_engine(kvd.runtime_dir, LAYOUTS[1]) as engine:
            assert await engine.store(KEYS[1], TOKENS) == 50
            assert (await engine.load(KEYS[1], TOKENS)).tiers == {"dram"}
        async with attached_engine(kvd.runtime_dir, LAYOUTS[0]) as engine:
            loaded = await engine.load(KEYS[0], TOKENS)
            assert (loaded.num_tokens, loaded.tiers) == (50, {"ssd"})


async def test_a_smaller_share_of_dram_is_adopted_too(tmp_path, monkeypatch):
    """The second layout has less than dram.bytes, because of the bound, and keeps it."""
    monkeypatch.setenv("KVD_DRAM__TOTAL_BYTES", "1500KB")
    async with running_kvd(tmp_path, "--dram", "1MB", "--ssd", "4MB") as kvd:
        async with (
            attached_engine(kvd.runtime_dir, LAYOUTS[0]) as first,
            attached_engine(kvd.runtime_dir, LAYOUTS[1]) as second,
        ):
            for engine, key in ((first, KEYS[0]), (second, KEYS[1])):
                assert await engine.store(key, TOKENS) == 50
            await all_clean(kvd)
        await kvd.kill()
        await kvd.start()
        assert "arena_discarded" not in kvd.log()
        for layout, key in zip(LAYOUTS, KEYS, strict=True):
            async with attached_engine(kvd.runtime_dir, layout) as engine:
                loaded = await engine.load(key, TOKENS)
                assert (loaded.num_tokens, loaded.tiers) == (50, {"dram"})
