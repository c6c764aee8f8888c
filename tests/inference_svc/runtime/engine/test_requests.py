"""Turns with little room in the write ring: the same answers, and the same stored KV."""

import asyncio

import pytest

from inference_svc.core.scheduling import write_slots as ring_account
from inference_svc.runtime.engine.loads import PreloadPolicy
from shared.types.units import NS_PER_S
from tests.memory_engine import BLOCK_TOKENS, Sink, alone, loaded_model, running_engine


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


@pytest.mark.parametrize(
    "write_slots", [1, 4000, *(pytest.param(n, marks=pytest.mark.long) for n in (5, 16, 40))]
)
async def test_a_ring_of_any_size_stores_all_computed_tokens(model, monkeypatch, write_slots):
    """Turns beside each other, and again over their stored history."""
    monkeypatch.setattr(ring_account, "STALL_LIMIT_NS", 60 * NS_PER_S)  # a busy machine stalls
    async with running_engine(model, write_slots=write_slots, keeps_residents=False) as engine:
        prompts = [list(range(20 + n, 90 + 7 * n)) for n in range(3)]
        turns = await asyncio.gather(
            *(engine.run(prompt, session=str(n)) for n, prompt in enumerate(prompts))
        )
        await engine.loop.idle.wait()
        for number, (prompt, turn) in enumerate(zip(prompts, turns, strict=True)):
            assert turn.sink.token_ids == await alone(model, prompt)
            following = [*turn.token_ids, 99, 98]
            again = await engine.run(following, session=str(number))
            assert again.outcome.tokens == len(turn.token_ids) - 1
            assert again.sink.token_ids == await alone(model, following)
        counts = engine.counters.snapshot()
        assert not counts["save_dropped"] + counts["saves_refused"]
        assert write_slots > BLOCK_TOKENS or counts["saves_cut_short"]
        assert write_slots < 4000 or not counts["write_stalls"]
        await engine.all_released()


@pytest.mark.parametrize("write_slots", [5, 40])
async def test_residents_continue_with_little_room(model, write_slots):
    """Resident and stored tokens are equal."""
    async with running_engine(model, write_slots=write_slots) as engine:
        first = await engine.run(range(20, 60))
        following = [*first.token_ids, *range(70, 95)]
        second = await engine.run(following)
        assert second.outcome.tier_tokens == {"hbm": 47}
        assert second.sink.token_ids == await alone(model, following)
        await engine.loop.idle.wait()
        engine.loop.memory.release_resident(first.key)
        third = await engine.run([*second.token_ids, 97])
        assert third.outcome.tier_tokens == {"dram": len(second.token_ids) - 1}
        assert third.sink.token_ids == await alone(model, [*second.token_ids, 97])
        await engine.all_released()


async def test_a_stalled_store_delays_turns_only_briefly(model):
    """The turn continues, and is not saved."""
    async with running_engine(model, write_slots=16, keeps_residents=False) as engine:
        engine.store.may_end.clear()
        turn = await engine.run(range(20, 90))
        assert turn.sink.token_ids == await alone(model, range(20, 90))
        counts = engine.counters.snapshot()
        assert counts["save_dropped"] == 1
        assert counts["write_stalls"] > 0
        assert engine.loop.gauges()["write_stall_s"] >= 1
        engine.store.may_end.set()
        await engine.all_released()


async def test_an_unsaved_turn_still_gets_its_history(model):
    """Its load begins when it is in the batch, after its buffer was freed."""
    preload = PreloadPolicy(buffer_layers=0)
    async with running_engine(model, preload, write_slots=40, keeps_residents=False) as engine:
        first = await engine.run(range(20, 60))
        await engine.loop.idle.wait()
        slots = engine.scheduler.write_slots
        held = []
        following = [*first.token_ids, *range(80, 90)]
        turn = engine.request(following)
        turn.sink.on_start = lambda _: held.extend(slots.take(slots.num_free))
        await engine.loop.generate(turn)
        assert turn.write_buffer is None
        engine.loop.keep(turn, turn.token_ids[:-1])
        assert turn.sink.token_ids == await alone(model, following)
        assert turn.outcome.tokens == 47
        counts = engine.counters.snapshot()
        assert (counts["save_dropped"], counts["steps_failed"]) == (1, 0)
        await engine.loop.idle.wait()
        slots.release(held)
        await engine.all_released()


async def test_a_refusing_store_delays_no_turn(model):
    """There is nothing to wait for: the turn is not saved from the first refusal on."""
    async with running_engine(model, write_slots=16, keeps_residents=False) as engine:
        engine.store.save = refuse
        turn = await engine.run(range(20, 90))
        assert turn.sink.token_ids == await alone(model, range(20, 90))
        assert engine.counters.snapshot()["save_dropped"] == 1
        assert engine.loop.gauges()["write_stall_s"] < 1
        await engine.all_released()


async def refuse(**_asked):
    """Answer as a store without room."""
    return "no_space"


async def test_a_preempted_turn_and_its_successor_share_the_ring(model):
    """The preempted one's tokens so far are stored, beside those of the turn in its place."""
    async with running_engine(model, write_slots=24, max_running=1, answer_tokens=200) as engine:
        low = engine.request(range(20, 60), 60, session="low")
        answer = asyncio.create_task(engine.loop.generate(low))
        await low.sink.has_token.wait()
        high = await engine.run(range(30, 70), 4, session="high", priority=1)
        await answer
        engine.loop.keep(low, low.token_ids[:-1])
        assert low.sink.token_ids == await alone(model, range(20, 60), 60)
        assert high.sink.token_ids == await alone(model, range(30, 70), 4)
        await engine.all_released()


class WhereBlocksBegin(Sink):
    """Keeps where the blocks that are stored begin, as the scheduler and the save have it."""

    def on_start(self, request):
        super().on_start(request)
        self.begins = request.boundary, request.write_buffer.first_token
        self.whole_until = request.whole_until


@pytest.mark.parametrize("keeps_residents", [True, False])
@pytest.mark.parametrize("write_slots", [20, 4000])
async def test_blocks_begin_where_the_save_begins(model, keeps_residents, write_slots):
    """In a tight ring that is behind a partial block, and others share what ends before that."""
    async with running_engine(
        model,
        write_slots=write_slots,
        keeps_residents=keeps_residents,
        block_tokens=BLOCK_TOKENS,
    ) as engine:
        first = await engine.run(range(20, 60))
        await engine.loop.idle.wait()
        following = engine.request([*first.token_ids, 99])
        following.sink = WhereBlocksBegin(8)
        await engine.loop.generate(following)
        num_stored = len(first.token_ids) - 1
        begin = num_stored if write_slots == 20 else num_stored // BLOCK_TOKENS * BLOCK_TOKENS
        first_of_block = num_stored // BLOCK_TOKENS * BLOCK_TOKENS
        assert following.sink.begins == (first_of_block, begin)
        assert following.sink.whole_until == (first_of_block if write_slots == 20 else None)
        engine.loop.drop(following)
        await engine.all_released()


async def test_blocks_that_are_cut_short_are_not_built_on(model, monkeypatch):
    """Another session begins where the last full block before them ends: here at its beginning."""
    monkeypatch.setattr(ring_account, "STALL_LIMIT_NS", 60 * NS_PER_S)  # a busy machine stalls
    limits = {"write_slots": 5, "answer_tokens": 200, "block_tokens": BLOCK_TOKENS}
    async with running_engine(model, **limits) as engine:
        leader = engine.request(range(20, 60), 100, session="leader")
        answer = asyncio.create_task(engine.loop.generate(leader))
        await leader.sink.has_token.wait()
        assert engine.counters.snapshot()["saves_cut_short"]
        other = engine.request([*range(20, 60), 99], 2, session="other")
        other.sink = WhereBlocksBegin(2)
        await engine.loop.generate(other)
        assert not answer.done()
        assert other.sink.begins == (0, 0)
        await answer
        for request in (leader, other):
            engine.loop.drop(request)
        await engine.all_released()
