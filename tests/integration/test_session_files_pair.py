"""A session that moves to another kvd, with the real service: its next turn continues there."""

import asyncio

import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.session_key import SessionKey
from tests.following_process import Following, remote_settings, until_there
from tests.inference_processes import InferenceProcess, wait_kvd_state
from tests.kvd_polling import all_clean, counters_of, eventually, sessions_of
from tests.oracle import Oracle
from tests.processes import KvdProcess, run_cli

GREEDY = pb.Sampling(max_tokens=24, ignore_eos=True)
TIERS = ("--dram", "64MB", "--ssd", "64MB")
DOCUMENT = [5 + number * 7 % 400 for number in range(300)]  # more than two blocks of tokens


@pytest.mark.parametrize(
    ("away", "here"),
    [
        (("export", "moved", "{0}/moved.kvd"), ("import", "{0}/moved.kvd")),
        pytest.param(
            ("push", "--all", "--to", "file://{0}/store"),
            ("pull", "moved", "--from", "file://{0}/store"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["file", "store"],
)
async def test_the_next_turn_is_a_hit_on_another_kvd(tiny_model, tmp_path, away, here):
    """All history comes from the file, or the store, and every answer is the stock model's."""
    kvd = KvdProcess(tmp_path / "kvd", TIERS, keep="none")
    other = KvdProcess(tmp_path / "kvd", TIERS, keep="none")
    other.state_dir = tmp_path / "other"  # with its own salts, and nothing stored
    at = ("--runtime-dir", str(kvd.runtime_dir))
    away, here = ([word.format(tmp_path) for word in words] for words in (away, here))
    await kvd.start()
    try:
        async with (
            InferenceProcess(tiny_model, tmp_path, kvd.runtime_dir) as service,
            service.client() as client,
        ):
            await wait_kvd_state(client, "attached")
            for given in (DOCUMENT, "And then? "):
                result = await client.submit(turn_request(given, "moved", sampling=GREEDY))
            usage = result.usage
            stored = usage.history_tokens + usage.new_tokens + usage.output_tokens - 1
            await eventually(lambda: _count_stored_tokens(kvd), [stored])
            await all_clean(kvd)
            assert (await run_cli(*away, *at))[0] == 0
            await kvd.stop()
            await wait_kvd_state(client, "detached")
            await other.start()
            await wait_kvd_state(client, "attached")
            assert await _count_stored_tokens(other) == []
            assert (await run_cli(*here, *at))[0] == 0
            result = await client.submit(turn_request("At last? ", "moved", sampling=GREEDY))
            assert result.usage.history_tokens == result.usage.reused_tokens == stored
            assert dict(result.usage.tier_tokens) == {"dram": stored}
            assert not result.usage.recompute_reason
            session = await client.get_session("moved", with_turns=True)
        turns = [(list(turn.input_ids), list(turn.output_ids)) for turn in session.turn_records]
        verdict = await asyncio.to_thread(Oracle(tiny_model).judge, turns)
        assert len(turns) == 3
        assert verdict.is_identical
    finally:
        await other.stop()
        await kvd.stop()


async def test_the_next_turn_waits_for_a_session_that_is_fetched(tiny_model, tmp_path):
    """It is pushed after its turns, and fetched when the next one arrives elsewhere.

    The engine is idle: without waiting it would begin to compute at once. Fetching is slow.
    """
    store = tmp_path / "store"
    environ = remote_settings(store, rate="1MB")
    kvd = KvdProcess(tmp_path / "kvd", TIERS, keep="none", environ=environ)
    other = KvdProcess(tmp_path / "kvd", TIERS, keep="none", environ=environ)
    other.state_dir = tmp_path / "other"
    following = Following(kvd)
    await kvd.start()
    try:
        following.start()
        async with (
            InferenceProcess(tiny_model, tmp_path, kvd.runtime_dir) as service,
            service.client() as client,
        ):
            await wait_kvd_state(client, "attached")
            usage = (await client.submit(turn_request(DOCUMENT, "moved", sampling=GREEDY))).usage
            stored = usage.new_tokens + usage.output_tokens - 1
            await eventually(lambda: _count_stored_tokens(kvd), [stored])
            [info] = await sessions_of(kvd)
            await until_there(store, SessionKey("default", info.session.model, "moved"), stored)
            await kvd.stop()
            await wait_kvd_state(client, "detached")
            await other.start()
            await wait_kvd_state(client, "attached")
            await following.until_said("kvd_followed", 2)
            number = 0
            while not (await counters_of(other))["fetch_waits_absent"]:  # a follower answers now
                number += 1
                await client.submit(turn_request("New? ", f"new-{number}"))
            again = turn_request("At last? ", "moved", sampling=GREEDY)
            usage = (await client.submit(again)).usage
            assert usage.history_tokens == usage.reused_tokens == stored
            assert (await counters_of(other))["fetch_waits_fetched"] == 1
            session = await client.get_session("moved", with_turns=True)
        turns = [(list(turn.input_ids), list(turn.output_ids)) for turn in session.turn_records]
        verdict = await asyncio.to_thread(Oracle(tiny_model).judge, turns)
        assert verdict.is_identical
    finally:
        await following.end(9)
        await other.stop()
        await kvd.stop()


async def _count_stored_tokens(kvd: KvdProcess) -> list[int]:
    return [info.num_tokens for info in await sessions_of(kvd)]
