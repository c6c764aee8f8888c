"""kvd starts with a smaller SSD tier, and kills itself on the way: the best sessions stay."""

import asyncio
import signal
from collections.abc import Sequence

import pytest

from kvd.core.records.extent_shape import ExtentShape
from kvd.tiers.faults import WritePoint
from shared.pb.kvd.v1 import kvd_pb2
from tests.fault.ledger import Ledger, everything_verifies, nothing_leaks
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import eventually, reader_stats
from tests.sampled import sampled
from tests.synthetic_engine import SyntheticEngine, attached_engine, key_of, small_layout

LAYOUT = small_layout()
EXTENT = ExtentShape(LAYOUT).full_bytes
NUM_TOKENS = 96  # of a session: six whole extents
NAMES = [f"s{number}" for number in range(8)]
USED_LAST = ["s1", "s0"]  # though they were stored first
STAY = ["s6", "s7", *USED_LAST]
LARGE, SMALL = str(48 * EXTENT), str(24 * EXTENT)
SIZES = {
    "KVD_DRAM__BYTES": str(48 * LAYOUT.block_bytes),
    "KVD_SSD__BYTES": LARGE,
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": str(7 * EXTENT),
}
KILLS = [  # points, and the passes of them
    (WritePoint.EXTENT_WRITTEN, 1),
    (WritePoint.EXTENT_WRITTEN, 4),
    (WritePoint.SEGMENT_SYNCED, 1),
    (WritePoint.SEGMENT_SYNCED, 2),
    (WritePoint.INDEX_ROWS, 2),
    (WritePoint.INDEX_COMMITTED, 2),
    (WritePoint.INDEX_COMMITTED, 3),
    (WritePoint.SEGMENT_REMOVED, 1),
    (WritePoint.SEGMENT_REMOVED, 2),
]
KILL_NAMES = {f"{point.value}-{nth}": (point, nth) for point, nth in KILLS}
DIED_S = 30.0


async def fill(kvd: FaultyKvd, engine: SyntheticEngine, names: Sequence[str] = NAMES) -> Ledger:
    """Store sessions until SSD is full, use the first ones again, and stop."""
    ledger = Ledger()
    for name in names:
        await ledger.grow(engine, name, NUM_TOKENS)
    await ledger.settle(kvd)
    for name in USED_LAST:
        await engine.load(key_of(name), ledger.tokens[name])
    assert await kvd.stop() == 0, kvd.log()[-3000:]
    return ledger


async def restart(kvd: FaultyKvd, engine: SyntheticEngine, ssd_bytes: str) -> None:
    """Start it with another size, and attach."""
    kvd.faults = {}
    kvd._environment["KVD_SSD__BYTES"] = ssd_bytes
    await kvd.start()
    await engine.client.wait_attached(DIED_S)


async def die(kvd: FaultyKvd, kill: tuple[WritePoint, int]) -> None:
    """Start it with the smaller size; it kills itself while it shrinks."""
    kvd._environment["KVD_SSD__BYTES"] = SMALL
    kvd.faults = {"kill_at": [kill[0].value, kill[1]]}
    await kvd.spawn()
    async with asyncio.timeout(DIED_S):
        assert await kvd.exit_code() == -signal.SIGKILL, kvd.log()[-3000:]


def file_bytes(kvd: FaultyKvd) -> int:
    return sum(path.stat().st_size for path in kvd.state_dir.glob("volumes/*/*.segment"))


async def has_shrunk(kvd: FaultyKvd) -> None:
    """Wait until nothing lies behind the end, and the files end there."""

    async def surplus_bytes() -> tuple[int, int]:
        layouts = (await reader_stats(kvd)).layouts
        tiers = [tier for layout in layouts for tier in layout.tiers]
        surplus = sum(tier.surplus_bytes for tier in tiers if tier.tier == kvd_pb2.TIER_SSD)
        return surplus, max(0, file_bytes(kvd) - int(SMALL))

    await eventually(surplus_bytes, (0, 0))


async def check_stay(engine: SyntheticEngine, ledger: Ledger) -> None:
    """Check that what eviction ranks highest is complete, to the byte, and the rest is gone."""
    for name in NAMES:
        loaded = await engine.load(key_of(name), ledger.tokens[name])
        assert loaded.num_tokens == (NUM_TOKENS if name in STAY else 0), name


# Files without a key shrink in the tests below.
@pytest.mark.parametrize("is_sealed", [pytest.param(False, marks=pytest.mark.long), True])
async def test_the_sessions_that_were_used_last_stay(tmp_path, is_sealed):
    """They are served while they are moved and afterwards, and the files have the new size."""
    settings = dict(SIZES)
    if is_sealed:
        key_file = tmp_path / "key"
        key_file.write_text("5a" * 32)
        key_file.chmod(0o600)
        settings["KVD_ENCRYPTION__KEY_FILE"] = str(key_file)
    kvd = FaultyKvd(tmp_path, keep="none", **settings)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        ledger = await fill(kvd, engine)
        assert file_bytes(kvd) > int(SMALL)
        await restart(kvd, engine, SMALL)
        await check_stay(engine, ledger)
        await has_shrunk(kvd)
        await check_stay(engine, ledger)
        assert await kvd.stop() == 0
        await restart(kvd, engine, SMALL)
        await check_stay(engine, ledger)
        await everything_verifies(kvd)
        await nothing_leaks(kvd)
    await kvd.stop()


@pytest.mark.parametrize("next_bytes", [SMALL, LARGE], ids=["again", "grown"])
@pytest.mark.parametrize("kill", sampled(list(KILL_NAMES), 4, seed=5))
async def test_killed_while_it_shrinks(tmp_path, kill, next_bytes):
    """The same size continues; the old size keeps everything that had stayed."""
    kvd = FaultyKvd(tmp_path, keep="none", **SIZES)
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        ledger = await fill(kvd, engine)
        await die(kvd, KILL_NAMES[kill])
        await die(kvd, (WritePoint.INDEX_COMMITTED, 1))
        await restart(kvd, engine, next_bytes)
        for name in STAY:
            loaded = await engine.load(key_of(name), ledger.tokens[name])
            assert loaded.num_tokens == NUM_TOKENS, name
        if next_bytes == SMALL:
            await has_shrunk(kvd)
            await check_stay(engine, ledger)
        await everything_verifies(kvd)
        await nothing_leaks(kvd)
    await kvd.stop()


async def test_two_layouts_give_up_the_same_share(tmp_path):
    """Each keeps what was used last in it: together they have the new size."""
    other = small_layout(model="6f" * 16)
    kvd = FaultyKvd(tmp_path, keep="none", **SIZES | {"KVD_SSD__BYTES": str(64 * EXTENT)})
    await kvd.start()
    names = ["s0", "s1", "s2", "s3"]
    theirs = [key_of(name, model=other.model) for name in names]
    async with (
        attached_engine(kvd.runtime_dir, LAYOUT) as engine,
        attached_engine(kvd.runtime_dir, other) as second,
    ):
        for key in theirs:
            assert await second.store(key, context_of(key.session_id)) == NUM_TOKENS
        ledger = await fill(kvd, engine, names)
        await restart(kvd, engine, SMALL)
        await second.client.wait_attached(DIED_S)
        await has_shrunk(kvd)
        ours = await engine.load(key_of("s0"), ledger.tokens["s0"])
        newest = await second.load(theirs[-1], context_of("s3"))
        assert (ours.num_tokens, newest.num_tokens) == (NUM_TOKENS, NUM_TOKENS)
        oldest = await second.load(theirs[0], context_of("s0"))
        assert oldest.num_tokens == 0
        await everything_verifies(kvd)
    await kvd.stop()


def context_of(name: str) -> list[int]:
    first = 1000 * int(name[1:])
    return list(range(first, first + NUM_TOKENS))
