"""A real kvd trusts a lineage, also one that says that no token was discarded."""

from shared.types.lineage import WHOLE
from tests.faulty_kvd import FaultyKvd
from tests.sparse_sessions import read_rows
from tests.synthetic_engine import attached_engine, encode, key_of

SIZES = {"KVD_DRAM__BYTES": "2MB", "KVD_SSD__BYTES": "8MB", "KVD_SSD__RESERVE_BYTES": "0"}
TOKENS = list(range(5000, 5064))
DROPPED = [(0, 16)]


async def test_a_lineage_is_named_as_a_whole_or_not_at_all(tmp_path):
    """A truncated session is not found as one without discards.

    Its discard may be reported again.
    """
    kvd = FaultyKvd(tmp_path, keep="none", **SIZES)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("a"), TOKENS)
        for _ in range(2):
            kept = await engine.client.discard(key_of("a"), encode(TOKENS), DROPPED, lineage=WHOLE)
            assert kept == 48
        after = WHOLE.after(encode(TOKENS), DROPPED)
        for lineage, num_found in ((None, 48), (WHOLE, 0), (after, 48)):
            assert len(await read_rows(engine, "a", TOKENS[16:], lineage)) == num_found
    assert await kvd.stop() == 0, kvd.log()[-3000:]
