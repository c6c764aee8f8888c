"""Tokens that clients and policies discard in the live pair, and turns cancelled around it."""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial

import grpc
import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc
from shared.process.runtime_dir import channel_options
from shared.types.errors import ConflictError
from tests.integration.overflowing import DRAM, check_all_reused, identical
from tests.pair import Pair, until

NUM_LEAVING = 12  # clients that disconnect in the middle


async def is_cut(pair, session_id, num_tokens):
    """Return whether kvd has fewer tokens of a session than given."""
    return (await pair.stored(session_id)).num_tokens < num_tokens


@asynccontextmanager
async def begin_turn(pair, request, until="tokens"):
    """Submit a turn and follow it until it answers, or at least waits; cancel it at the end."""
    async with (
        pair.service.client() as client,
        aclosing(client.stream_turn(request)) as events,
    ):
        async for event in events:
            if event.WhichOneof("event") == until:
                break
        yield client


async def test_a_cancelled_turn_does_not_change_the_session(narrow, judge):
    """The next turn has the whole context again, recomputed."""
    async with narrow.with_kvd(*DRAM):
        for _ in range(3):
            await narrow.say("undone", 140)
        before = await narrow.session("undone")
        request = turn_request(
            narrow.some_tokens(100),
            narrow.name("undone"),
            sampling=pb.Sampling(max_tokens=4000, ignore_eos=True),
        )
        async with begin_turn(narrow, request):
            pass
        after = await narrow.say("undone", 20, wait=True)
        session = await narrow.session("undone")
        again = await narrow.say("undone")
        await identical(narrow, judge, "undone")
    assert session.turns == before.turns + 1
    assert list(session.context_ids[: before.context_tokens]) == list(before.context_ids)
    assert after.usage.history_tokens == before.context_tokens - 1
    assert again.usage.recomputed_tokens == 0


@pytest.mark.parametrize("tier", [pytest.param("dram", marks=pytest.mark.long), "hbm"])
async def test_blocks_of_a_cancelled_turn_are_not_used_for_equal_tokens(
    narrow, resident, judge, tier
):
    """They have the tokens of the next turn's context, but rows of another context."""
    pair = resident if tier == "hbm" else narrow
    period, name = pair.some_tokens(7), "periodic"
    async with pair.with_kvd(*DRAM):
        first = turn_request(period * 60, pair.name(name), sampling=pb.Sampling(max_tokens=1))
        await pair.submit(first)
        await pair.until_saved()  # blocks that are being written outlive the cut for that long
        before = await pair.session(name)
        cut = turn_request(
            pair.some_tokens(100),
            pair.name(name),
            sampling=pb.Sampling(max_tokens=4000, ignore_eos=True),
            overflow=pb.Overflow(ratio=20 * len(period) / before.context_tokens),
        )
        async with begin_turn(pair, cut):
            pass
        after = await pair.say(name, 20, max_tokens=24, wait=True)
        await identical(pair, judge, name)
    assert after.usage.history_tokens == len(period) * 60
    assert after.usage.reused_tokens == 0


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.long), ("--residents",)])
async def test_a_turn_cancelled_while_it_waits_can_be_retried(
    model_dir, judge, tmp_path_factory, flags
):
    """The tokens that it dropped are gone; the retry finds the rest and drops the same."""
    directory = tmp_path_factory.mktemp("one-by-one")
    (directory / "settings.toml").write_text("[scheduler]\nmax_running = 1\nmax_loading = 1\n")
    pair = Pair(model_dir, directory, "--config", str(directory / "settings.toml"), *flags)

    def long_turn(name):
        sampling = pb.Sampling(max_tokens=4000, ignore_eos=True)
        return turn_request(pair.some_tokens(20), pair.name(name), sampling=sampling)

    async with pair.service, pair.with_kvd(*DRAM):
        for _ in range(2):
            await pair.say("of", 200)
        await pair.until_saved()
        before = (await pair.stored("of")).num_tokens
        wanted = turn_request(
            pair.some_tokens(150), pair.name("of"), sampling=pb.Sampling(max_tokens=16), wait=True
        )
        async with (
            begin_turn(pair, long_turn("runs")),
            begin_turn(pair, long_turn("is-next"), until="started"),
            begin_turn(pair, wanted, until="accepted"),
        ):
            await until(partial(is_cut, pair, "of", before))
        retry = await pair.submit(wanted)
        await identical(pair, judge, "of")
    assert retry.usage.dropped_tokens > 0
    check_all_reused(retry, "hbm" if flags else "dram")


async def test_forks_from_before_and_after_a_discard(narrow, judge):
    """Each continues with the context of its turn, and does not affect the others."""
    async with narrow.with_kvd(*DRAM):
        turns = [await narrow.say("parent", 160) for _ in range(3)]
        (cut,) = {turn.accepted.turn for turn in turns if turn.usage.dropped_tokens}
        async with narrow.service.client() as client:
            parent = narrow.name("parent")
            await client.fork_session(parent, cut, narrow.name("before"))
            await client.fork_session(parent, cut + 1, narrow.name("after"))
        for _ in range(2):
            for name in ("before", "after", "parent"):
                await narrow.say(name, 120)
        sessions = [await narrow.session(name) for name in ("before", "after", "parent")]
        await identical(narrow, judge, "before", "after", "parent")
    assert len(sessions[0].discards) < len(sessions[1].discards) <= len(sessions[2].discards)


@pytest.mark.parametrize("tier", ["dram", pytest.param("hbm", marks=pytest.mark.long)])
async def test_a_client_may_drop_any_tokens(narrow, resident, judge, tier):
    """Ranges and positions of the context are accepted.

    The next turn reuses the rest, in forks too.
    """
    pair = resident if tier == "hbm" else narrow
    async with pair.with_kvd(*DRAM):
        for _ in range(2):
            await pair.say("tdl")
        before = await pair.session("tdl")
        name = pair.name("tdl")
        async with pair.service.client() as client:
            lost = await client.discard(
                name, [(200, 230), (10, 20), (15, 40)], [50, 52, 53], expected_turn=2
            )
            middle = await pair.session("tdl")
            more = await client.discard(name, [(0, 5)], expected_context_tokens=lost.context_tokens)
            await client.fork_session(name, None, pair.name("fork"))
        turns = [await pair.say("tdl"), await pair.say("fork", 60)]
        await identical(pair, judge, "tdl", "fork")
    gone = {*range(10, 40), 50, 52, 53, *range(200, 230)}
    left = [token for at, token in enumerate(before.context_ids) if at not in gone]
    assert list(middle.context_ids) == left
    assert (lost.dropped_tokens, lost.context_tokens) == (len(gone), len(left))
    assert (more.dropped_tokens, more.context_tokens) == (5, len(left) - 5)
    assert turns[0].usage.history_tokens == len(left) - 5 - 1
    check_all_reused(turns[0], tier)


async def test_a_busy_session_is_not_cut(narrow):
    """An active turn would lose rows that it reads."""
    async with narrow.with_kvd(*DRAM):
        name = narrow.name("busy")
        request = turn_request(
            narrow.some_tokens(20), name, sampling=pb.Sampling(max_tokens=400, ignore_eos=True)
        )
        async with begin_turn(narrow, request) as client:
            with pytest.raises(ConflictError) as busy:
                await client.discard(name, [(0, 5)])
    assert busy.value.reason == "session_busy"


async def submit_when_free(pair, name):
    """Submit a turn as soon as no call is changing the session."""
    while True:
        with suppress(ConflictError):
            return await pair.say(name, 5, max_tokens=2)


@pytest.mark.long
async def test_a_discard_whose_client_disconnects_is_not_left_half_done(model_dir, tmp_path):
    """Whenever the client disconnects, the next turn sees the state on disk."""
    pair = Pair(model_dir, tmp_path, "--mode", "recompute")
    async with pair.service:
        async with grpc.aio.insecure_channel(
            pair.service.address, options=channel_options()
        ) as channel:
            stub, whole_s = inference_pb2_grpc.InferenceStub(channel), 0.0
            for number in range(NUM_LEAVING):
                name = pair.name(f"left{number}")
                await pair.say(f"left{number}", 30, max_tokens=2)
                gone = [pb.TokenRange(start=0, end=10)]
                begun_s = time.perf_counter()
                call = stub.Discard(pb.DiscardRequest(session_id=name, ranges=gone))
                # the first discard is timed, the others are interrupted within that time
                if number:
                    await asyncio.sleep(whole_s * number / NUM_LEAVING)
                    call.cancel()
                with suppress(asyncio.CancelledError):
                    await call
                    whole_s = whole_s or time.perf_counter() - begun_s
                await submit_when_free(pair, f"left{number}")
        before = [await pair.session(f"left{number}") for number in range(NUM_LEAVING)]
        await pair.service.stop()
        await pair.service.start()
        after = [await pair.session(f"left{number}") for number in range(NUM_LEAVING)]
    assert before == after
    assert any(session.discards for session in after)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("sinks_recent", marks=pytest.mark.long),
        "snapkv",
        pytest.param("h2o", marks=pytest.mark.long),
    ],
)
async def test_a_compressed_session_continues_with_the_kept_tokens(narrow, judge, policy):
    """Each turn drops the requested part; the next one reuses all of the rest."""
    async with narrow.with_kvd(*DRAM):
        wanted = pb.Compression(policy=policy, keep_ratio=0.5)
        turns = [await narrow.say("less", 240, compression=wanted) for _ in range(3)]
        session = await narrow.session("less")
        await identical(narrow, judge, "less")
    assert turns[0].usage.compressed_tokens == (240 + 15) // 2
    assert session.context_tokens < 240
    assert {discard.reason for discard in session.discards} == {f"compression:{policy}"}
    for turn in turns[1:]:
        check_all_reused(turn, "dram")
    assert len({turn.usage.compressed_tokens for turn in turns}) > 1
