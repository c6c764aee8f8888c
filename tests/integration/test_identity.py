"""Token identity: greedy answers with reuse equal those of recomputation."""

import asyncio

import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2
from tests.pair import BLOCK_TOKENS, SLOT_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_one_session_of_many_turns(pair, oracle):
    """Every turn after the first loads its whole history from DRAM."""
    async with pair.with_kvd("--dram", "16MB"):
        turns = [await pair.say("long") for _ in range(6)]
        verdict = await pair.verdict(oracle, "long")
    assert verdict.is_identical, verdict
    for turn in turns[1:]:
        usage = turn.usage
        assert usage.reused_tokens == usage.history_tokens > 0
        assert (usage.recomputed_tokens, dict(usage.tier_tokens)) == (
            0,
            {"dram": usage.reused_tokens},
        )
        assert usage.load_s > 0
        assert not usage.recompute_reason


async def test_interleaved_sessions(pair, oracle):
    """Sessions that share batches, and kvd, do not affect one another."""
    async with pair.with_kvd("--dram", "16MB"):

        async def talk(session_id):
            return [await pair.say(session_id, 60 + 30 * turn) for turn in range(4)]

        names = [f"talk-{number}" for number in range(5)]
        spoken = await asyncio.gather(*(talk(name) for name in names))
        verdicts = [await pair.verdict(oracle, name) for name in names]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    for turns in spoken:
        assert all(t.usage.reused_tokens == t.usage.history_tokens for t in turns)


async def test_a_fork_reuses_the_blocks_it_shares(pair, oracle):
    """A fork loads its parent's full blocks; afterwards each continues with its own tail."""
    async with pair.with_kvd("--dram", "16MB"):
        for _ in range(3):
            await pair.say("parent", 200)
        async with pair.service.client() as client:
            await client.fork_session(pair.name("parent"), 2, pair.name("fork"))
        forked = await pair.say("fork")
        onward = [await pair.say("parent"), await pair.say("fork")]
        verdicts = [await pair.verdict(oracle, name) for name in ("parent", "fork")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert forked.usage.history_tokens - forked.usage.reused_tokens < BLOCK_TOKENS
    assert all(turn.usage.recomputed_tokens == 0 for turn in onward)


async def test_sessions_with_an_equal_beginning_share_it(pair, oracle):
    """The full blocks of a prompt that another session has computed are loaded at once."""
    async with pair.with_kvd("--dram", "16MB"):
        beginning = pair.some_tokens(300)
        for name in ("one", "two"):
            await pair.submit(turn_request(beginning, pair.name(name), sampling=_greedy(8)))
            await pair.until_saved()
        second = await pair.say("two")
        stats = await pair.stats()
        verdicts = [await pair.verdict(oracle, name) for name in ("one", "two")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    assert second.usage.recomputed_tokens == 0
    assert stats.counters["load_tokens_dram"] >= 2 * BLOCK_TOKENS + second.usage.reused_tokens


async def test_a_repeated_request_is_answered_from_its_record(pair, oracle):
    """A repeat adds no turn and gives the same tokens, also after a restart of the service."""
    async with pair.with_kvd("--dram", "16MB"):
        tokens = pair.some_tokens(40)
        request = turn_request(tokens, pair.name("repeated"), sampling=_greedy(12), request_id="r1")
        results = [await pair.submit(request), await pair.submit(request)]
        await pair.service.kill()
        await pair.service.start()
        async with pair.service.client() as client:
            results.append(await client.submit(request))
            turns = (await client.get_session(pair.name("repeated"))).turns
        verdict = await pair.verdict(oracle, "repeated")
    assert [result.accepted.replayed for result in results] == [False, True, True]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert turns == 1
    assert verdict.is_identical, verdict


async def test_dram_too_small_for_one_session(pair, oracle):
    """Histories larger than DRAM stream through it from SSD."""
    dram_bytes = str(3 * SLOT_BYTES)
    async with pair.with_kvd("--dram", dram_bytes, "--ssd", "64MB"):
        turns = []
        for _ in range(4):
            for name in ("a", "b"):
                turns.append(await pair.say(name, 200))
                await pair.until_saved()
        verdicts = [await pair.verdict(oracle, name) for name in ("a", "b")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    later = [turn.usage for turn in turns[2:]]
    assert all(usage.reused_tokens == usage.history_tokens for usage in later)
    # Blocks that fit may have been read ahead; of the others some come from SSD during the load.
    larger = [usage for usage in later if usage.history_tokens > 3 * BLOCK_TOKENS]
    assert larger
    assert all(usage.tier_tokens["ssd"] > 0 for usage in larger)


async def test_both_tiers_too_small(pair, oracle):
    """Blocks that no tier has are recomputed, usage says so, and the answers stay the same."""
    sizes = ("--dram", str(3 * SLOT_BYTES), "--ssd", str(4 * SLOT_BYTES))
    async with pair.with_kvd(*sizes):
        turns = [await pair.say(name, 200) for _ in range(3) for name in ("a", "b", "c", "d")]
        verdicts = [await pair.verdict(oracle, name) for name in ("a", "b", "c", "d")]
    assert all(verdict.is_identical for verdict in verdicts), verdicts
    missed = [turn.usage for turn in turns if turn.usage.recomputed_tokens]
    assert missed
    assert all(usage.recompute_reason for usage in missed)
    for turn in turns:
        usage = turn.usage
        assert usage.reused_tokens + usage.recomputed_tokens == usage.history_tokens


async def test_a_deleted_session_is_removed_from_kvd(pair, oracle):
    """Its KV is dropped, also that of an active save, but not what a fork shares."""
    async with pair.with_kvd("--dram", "16MB"):
        await pair.say("kept", 300)
        async with pair.service.client() as client:
            await client.fork_session(pair.name("kept"), None, pair.name("gone"))
            await pair.say("gone")
            await client.delete_session(pair.name("gone"))
        stored = await pair.stored_sessions()
        again = await pair.say("kept")
        verdict = await pair.verdict(oracle, "kept")
    assert pair.name("gone") not in stored
    assert again.usage.recomputed_tokens == 0
    assert verdict.is_identical, verdict


def _greedy(max_tokens):
    return inference_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True)
