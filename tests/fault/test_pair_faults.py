"""Token identity while processes die and bytes are damaged: slower at worst, never wrong."""

from contextlib import aclosing

import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2
from tests.pair import SLOT_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEADER_BYTES = 4096  # of an extent
LONG = inference_pb2.Sampling(max_tokens=300, ignore_eos=True)


@pytest.mark.parametrize(("keep", "tier"), [("none", "ssd"), ("file", "dram")])
async def test_kvd_restart_keeps_every_session(pair, oracle, keep, tier):
    """After SIGTERM and SIGKILL of kvd a session's whole history comes from SSD or kept DRAM."""
    async with pair.with_kvd("--dram", "16MB", keep=keep, reads_ahead=False):
        names = ("a", "b", "c")
        for name in names:
            await pair.say(name, 250)
        reused = []
        for end in (pair.kvd.stop, pair.kvd.kill):
            await pair.until_saved()
            await end()
            await pair.kvd.start()
            await pair.until_kvd_is("attached")
            reused += [(await pair.say(name)).usage for name in names]
        verdicts = [await pair.verdict(oracle, name) for name in names]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    for usage in reused:
        assert usage.reused_tokens == usage.history_tokens > 0
        assert dict(usage.tier_tokens) == {tier: usage.reused_tokens}


async def test_engine_restart_keeps_every_session(pair, oracle):
    """After SIGTERM and after SIGKILL of the engine a session's history comes from DRAM."""
    async with pair.with_kvd("--dram", "16MB"):
        await pair.say("a", 250)
        usages = []
        for end in (pair.service.stop, pair.service.kill):
            await pair.until_saved()
            await end()
            await pair.service.start()
            await pair.until_kvd_is("attached")
            usages.append((await pair.say("a")).usage)
        verdict = await pair.verdict(oracle, "a")
    assert verdict.is_identical, verdict
    for usage in usages:
        assert usage.reused_tokens == usage.history_tokens > 0
        assert dict(usage.tier_tokens) == {"dram": usage.reused_tokens}


async def test_kvd_killed_in_the_middle_of_a_turn(pair, oracle):
    """The turn continues; later ones are recomputed and counted; a new kvd is attached."""
    async with pair.with_kvd("--dram", "16MB"):
        await pair.say("a", 250)
        await pair.until_saved()
        request = turn_request(pair.some_tokens(50), pair.name("a"), sampling=LONG)
        async with (
            pair.service.client() as client,
            aclosing(client.stream_turn(request)) as events,
        ):
            async for event in events:
                if event.WhichOneof("event") == "tokens":
                    break
            await pair.kvd.kill()
            kinds = [event.WhichOneof("event") async for event in events]
        alone = await pair.say("a")
        await pair.kvd.start()
        await pair.until_kvd_is("attached")
        back = await pair.say("a")
        await pair.until_saved()
        after = await pair.say("a")
        counters = await pair.counters()
        verdict = await pair.verdict(oracle, "a")
    assert kinds[-1] == "finished"
    assert verdict.is_identical, verdict
    assert alone.usage.recomputed_tokens == alone.usage.history_tokens > 550
    assert alone.usage.recompute_reason
    assert back.usage.reused_tokens > 0  # what was on SSD before the kill
    assert back.usage.recomputed_tokens > 0  # what was computed without kvd
    assert after.usage.recomputed_tokens == 0
    assert counters["load_errors"] >= 1


async def test_dirty_bytes_of_a_killed_kvd_are_counted_misses(pair, oracle):
    """Blocks that were never written to SSD are recomputed after the kill."""
    sizes = ("--dram", "16MB", "--ssd", "0")
    async with pair.with_kvd(*sizes):
        await pair.say("a", 250)
        second = await pair.say("a")
        dirty_bytes = (await pair.stats()).dirty_bytes
        await pair.kvd.kill()
        await pair.kvd.start()
        await pair.until_kvd_is("attached")
        third = await pair.say("a")
        misses = (await pair.stats()).counters["load_misses"]
        verdict = await pair.verdict(oracle, "a")
    assert verdict.is_identical, verdict
    assert dirty_bytes > 0
    assert second.usage.recomputed_tokens == 0
    assert third.usage.reused_tokens == 0
    assert third.usage.recompute_reason == "unknown_session"
    assert misses >= 1


async def test_engine_restarted_while_kvd_is_down(pair, oracle):
    """The transcripts belong to the engine: it recomputes, and attaches when kvd is back."""
    async with pair.with_kvd("--dram", "16MB"):
        await pair.say("a", 250)
        await pair.until_saved()
        await pair.kvd.stop()
        await pair.service.kill()
        await pair.service.start()
        alone = await pair.say("a")
        await pair.kvd.start()
        await pair.until_kvd_is("attached")
        back = await pair.say("a")
        verdict = await pair.verdict(oracle, "a")
    assert verdict.is_identical, verdict
    assert alone.usage.recomputed_tokens == alone.usage.history_tokens > 0
    assert back.usage.reused_tokens > 0


async def test_a_corrupted_block_on_ssd_is_recomputed(pair, oracle):
    """A flipped byte in a segment costs the history from there on, is counted, and is replaced."""
    async with pair.with_kvd("--dram", "16MB"):
        await pair.say("a", 500)
        await pair.until_saved()
        await pair.kvd.stop()
        flip_a_byte_of_block(pair.kvd.state_dir, block_index=1)
        await pair.kvd.start()
        await pair.until_kvd_is("attached")
        hurt = await pair.say("a")
        await pair.until_saved()
        healed = await pair.say("a")
        stats = await pair.stats()
        verdict = await pair.verdict(oracle, "a")
    assert verdict.is_identical, verdict
    assert 0 < hurt.usage.recomputed_tokens < hurt.usage.history_tokens
    assert stats.counters["blocks_corrupt_ssd"] == 1
    assert healed.usage.recomputed_tokens == 0


def flip_a_byte_of_block(state_dir, block_index):
    """Damage the first segment inside the given extent."""
    (segment,) = (state_dir / "volumes").rglob("*.segment")
    with segment.open("r+b") as file:
        file.seek(block_index * (HEADER_BYTES + SLOT_BYTES) + HEADER_BYTES + 1000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0xFF]))
