"""A real kvd compacts the rest of discards: the same bytes in fewer blocks, permanently."""

import json

import pytest

from shared.pb.kvd.v1 import kvd_pb2
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import all_clean, eventually, reader_stats, sessions_of
from tests.processes import run_cli
from tests.sparse_sessions import make_sparse, read_rows
from tests.synthetic_engine import attached_engine, key_of

SIZES = {"KVD_DRAM__BYTES": "2MB", "KVD_SSD__BYTES": "8MB", "KVD_SSD__RESERVE_BYTES": "0"}
SETTINGS = SIZES | {"KVD_COMPACTION__REST": "20ms", "KVD_COMPACTION__MIN_BYTES": "0"}
TOKENS = list(range(5000, 5320))  # 20 blocks


async def _info(kvd, name: str) -> kvd_pb2.SessionInfo:
    return next(info for info in await sessions_of(kvd) if info.session.session_id == name)


@pytest.mark.parametrize("keep", ["file", pytest.param("none", marks=pytest.mark.long)])
async def test_a_compacted_session_loads_as_before(tmp_path, keep):
    """It loads from DRAM, after a kill from either tier, and operators see the compacted blocks."""
    kvd = FaultyKvd(tmp_path, keep=keep, **SETTINGS)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("other"), TOKENS[:64])  # shares the first four blocks
        sparse = await make_sparse(engine, "sparse", TOKENS, step=4)

        async def num_blocks() -> int:
            return (await _info(kvd, "sparse")).num_blocks

        await eventually(num_blocks, 4 + 4)
        assert await read_rows(engine, "sparse", sparse.tokens, sparse.lineage) == sparse.rows
        assert (await engine.load(key_of("other"), TOKENS[:64])).num_tokens == 64
        await all_clean(kvd)
        if keep == "file":  # the number is the same in both tiers
            await _check_what_operators_see(kvd)
        await kvd.kill()
        await kvd.start()
        await engine.client.wait_attached(30)
        assert await read_rows(engine, "sparse", sparse.tokens, sparse.lineage) == sparse.rows
    assert await kvd.stop() == 0, kvd.log()[-3000:]


async def _check_what_operators_see(kvd) -> None:
    at = ("--runtime-dir", str(kvd.runtime_dir))
    code, shown, _ = await run_cli("show", "sparse", "--json", *at)
    info = json.loads(shown)["info"]
    assert (code, info["num_tokens"], info["num_blocks"], info["num_spans"]) == (0, 80, 8, 20)
    assert info["waste_bytes"] == 0
    assert "unused rows" in (await run_cli("show", "sparse", *at))[1]
    counters = (await reader_stats(kvd)).layouts[0].counters
    assert (counters["discards"], counters["discarded_tokens"]) == (1, 240)
    assert (counters["compacted_tokens"], counters["compacted_blocks"]) == (64, 4)
    assert (await run_cli("verify", *at))[0] == 0


@pytest.mark.long
async def test_compaction_can_be_switched_off(tmp_path):
    """With max_waste = 1 the session keeps its blocks."""
    kvd = FaultyKvd(tmp_path, **SETTINGS, KVD_COMPACTION__MAX_WASTE="1")
    await kvd.start()
    async with attached_engine(kvd.runtime_dir) as engine:
        sparse = await make_sparse(engine, "sparse", TOKENS, step=4)
        assert await read_rows(engine, "sparse", sparse.tokens) == sparse.rows
        info = await _info(kvd, "sparse")
    assert (info.num_blocks, info.num_spans) == (20, 80)
    assert info.waste_bytes == info.bytes * 3 // 4
    assert await kvd.stop() == 0
