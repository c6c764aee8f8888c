"""Tokens that turns drop: when their window is full, and by compression at their end."""

from dataclasses import replace

import pytest

from inference_svc.core.compression import make_compression
from inference_svc.core.truncation import OverflowPolicy
from tests.memory_engine import loaded_model
from tests.turn_service import KEY, LIMITS, make_turn, serving, token_ids_of


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


async def test_a_full_window_drops_tokens_before_a_turn(model, tmp_path):
    """The discard is counted and recorded, and the turn continues with the rest."""
    limits = replace(LIMITS, window_tokens=64)
    async with serving(model, tmp_path, limits) as service:
        first = await service.run(range(20, 60))
        usage = (await service.run(range(70, 90)))[-1].usage
        context = [*range(20, 60), *token_ids_of(first)]
        (discard,) = (await service.transcript()).turns[1].discards
        ((start, end),) = discard.ranges
        assert (discard.reason, start, usage.dropped_tokens) == ("overflow", 0, end)
        assert usage.history_tokens == usage.reused_tokens == 47 - end
        assert usage.new_tokens == 21
        assert (await service.transcript()).context.token_ids[:20] == (*context[end:], 70)[:20]
        assert await service.counts("overflows", "dropped_tokens", "shifts") == (1, end, 1)


async def test_an_answer_that_fills_the_window_drops_tokens_and_continues(model, tmp_path):
    """Unless nothing may be dropped: then it ends where the window does."""
    limits = replace(LIMITS, window_tokens=64)
    async with serving(model, tmp_path, limits) as service:
        usage = (await service.run(range(20, 60), 60))[-1].usage
        assert usage.output_tokens == 60
        assert usage.dropped_tokens > 0
        overflows, dropped = await service.counts("overflows", "dropped_tokens")
        assert (overflows, dropped) == (
            len((await service.transcript()).turns[0].discards),
            usage.dropped_tokens,
        )
        rigid = make_turn(
            range(20, 60),
            60,
            key=KEY._replace(session_id="rigid"),
            overflow=OverflowPolicy("reject"),
            has_max_tokens=False,
        )
        turn = await service.turns.submit(rigid)
        last = [event async for event in turn.follow()][-1]
        assert (last.finish_reason, last.usage.output_tokens) == ("length", 24)


@pytest.mark.parametrize("name", ["sinks_recent", "snapkv", "h2o"])
async def test_a_compression_policy_drops_tokens_after_the_turn(model, tmp_path, name):
    """The discard is recorded and counted, and the rest is the next turn's history."""
    async with serving(model, tmp_path) as service:
        events = await service.run(range(20, 100), compression=make_compression(name, 0.5))
        usage = events[-1].usage
        (discard,) = (await service.transcript()).turns[0].discards
        assert (discard.reason, discard.after_tokens) == (f"compression:{name}", 88)
        assert 35 <= usage.compressed_tokens <= 44
        context = (await service.transcript()).context
        assert len(context.token_ids) == 88 - usage.compressed_tokens
        assert context.token_ids[-8:] == tuple(token_ids_of(events))
        assert await service.counts("compressed_tokens", "overflows") == (
            usage.compressed_tokens,
            0,
        )
        following = (await service.run([50]))[-1].usage
        assert following.history_tokens == 87 - usage.compressed_tokens
        assert following.reused_tokens == following.history_tokens
        assert following.compressed_tokens == 0


async def test_protected_tokens_survive_every_policy(model, tmp_path):
    """The sinks of the turn's window."""
    async with serving(model, tmp_path) as service:
        compression = make_compression("snapkv", 0.1)
        overflow = OverflowPolicy(sink_tokens=20)
        await service.run(range(20, 100), compression=compression, overflow=overflow)
        assert (await service.transcript()).context.token_ids[:20] == tuple(range(20, 40))


@pytest.mark.parametrize(
    ("num_tokens", "is_final", "is_compressed"),
    [(22, False, True), (21, False, False), (60, True, False)],
)
async def test_short_contexts_and_final_turns_are_not_compressed(
    model, tmp_path, num_tokens, is_final, is_compressed
):
    """It does not pay; with its answer of 8 tokens the first one has just enough."""
    async with serving(model, tmp_path) as service:
        compression = make_compression("sinks_recent", 0.5)
        fields = {"compression": compression, "is_final": is_final}
        usage = (await service.run(range(20, 20 + num_tokens), **fields))[-1].usage
        assert (usage.compressed_tokens > 0) == is_compressed
        assert ((await service.transcript()).turns[0].discards != ()) == is_compressed
