"""An engine with KV on pages: sessions share common beginnings, and grow."""

import asyncio

import pytest

from inference_svc.core.ranges import without
from inference_svc.runtime.engine.engine_request import ContextCut
from tests.memory_engine import BLOCK_TOKENS, alone, loaded_model, running_engine

SYSTEM = [20 + number % 300 for number in range(10 * BLOCK_TOKENS)]
PAGES = {"page_tokens": 4, "block_tokens": BLOCK_TOKENS}


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


def used_slots(engine):
    """Count the slots of sequences that are not free."""
    scheduler = engine.scheduler
    held = scheduler.slots.reserved_slots + scheduler.residents.num_slots
    assert held - scheduler.slots.shared_slots == 4000 - scheduler.held_slots.free_slots
    return 4000 - scheduler.held_slots.free_slots


async def test_many_sessions_store_one_prompt_once(model):
    """One of them computed it; the others have only their own tokens."""
    async with running_engine(model, **PAGES) as engine:
        await engine.run([*SYSTEM, 7, 8], session="first")
        before = used_slots(engine)
        prompts = {f"s{number}": [*SYSTEM, 330 + number, 7] for number in range(20)}
        for name, prompt in prompts.items():
            turn = await engine.run(prompt, session=name)
            assert turn.outcome.tier_tokens == {"hbm": len(SYSTEM)}
            assert turn.computed_tokens - turn.loaded_tokens == 2 + 7
            assert turn.sink.token_ids == await alone(model, prompt)
        assert len(engine.scheduler.residents) == 21
        assert used_slots(engine) - before == 20 * 12, "three pages each, beside the shared ones"
        assert engine.loop.gauges()["shared_token_slots"] == 20 * len(SYSTEM)
        await engine.all_released()


async def test_the_session_that_computed_a_prompt_may_go(model):
    """Its pages belong to the others as well."""
    async with running_engine(model, **PAGES) as engine:
        first = await engine.run([*SYSTEM, 7, 8], session="first")
        other = await engine.run([*SYSTEM, 330, 7], session="other")
        await engine.loop.forget(first.key, first.token_ids)
        third = await engine.run([*SYSTEM, 331, 9], session="third")
        assert third.outcome.tier_tokens == {"hbm": len(SYSTEM)}
        following = [*other.token_ids, 40, 41]
        again = await engine.run(following, session="other")
        assert again.outcome.tier_tokens == {"hbm": len(other.token_ids) - 1}
        assert again.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_a_discard_does_not_change_shared_pages(model):
    """Tokens move within copies of them; the other session answers as it would alone."""
    async with running_engine(model, **PAGES) as engine:
        first = await engine.run([*SYSTEM, 7, 8], session="first")
        other = await engine.run([*SYSTEM, 330, 7], session="other")
        history = first.token_ids[:-1]
        await engine.loop.discard(first.key, ContextCut(history, [(5, 40)]))
        left = without(history, [(5, 40)])
        assert engine.scheduler.residents.get(first.key).token_ids == tuple(left)
        turns = {"first": [*left, 50, 51], "other": [*other.token_ids, 40, 41]}
        for name, prompt in turns.items():
            turn = await engine.run(prompt, session=name)
            assert turn.outcome.tier_tokens == {"hbm": len(prompt) - (2 if name == "first" else 3)}
        assert turn.sink.token_ids == await alone(model, turns["other"])
        await engine.all_released()


async def test_a_discard_without_room_for_copies_drops_the_kv(model):
    """It can be loaded; the other session keeps its pages."""
    num_slots = len(SYSTEM) + 40
    async with running_engine(model, kv_slots=num_slots, **PAGES) as engine:
        first = await engine.run([*SYSTEM, 7, 8], session="first")
        other = await engine.run([*SYSTEM, 330, 7], session="other")
        history = first.token_ids[:-1]
        await engine.loop.discard(first.key, ContextCut(history, [(5, 6)]))
        assert engine.scheduler.residents.get(first.key) is None
        assert engine.counters.snapshot()["shifts_failed"] == 1
        following = [*other.token_ids, 40, 41]
        again = await engine.run(following, session="other")
        assert again.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_an_answer_grows_in_place(model):
    """Page by page, without preemption, while there is a free page."""
    async with running_engine(model, answer_tokens=1, **PAGES) as engine:
        turn = await engine.run(range(20, 60), 90)
        assert (turn.num_preemptions, turn.sink.token_ids) == (
            0,
            await alone(model, range(20, 60), 90),
        )
        assert engine.counters.snapshot()["preempted"] == 0
        await engine.all_released()


async def test_answers_without_a_free_page_wait_for_each_other(model):
    """They are preempted, and continue with their rows in memory or from the store."""
    async with running_engine(model, kv_slots=200, answer_tokens=1, **PAGES) as engine:
        prompts = [range(20 + n, 60 + n) for n in range(4)]
        turns = await asyncio.gather(
            *(engine.run(prompt, 60, session=str(n)) for n, prompt in enumerate(prompts))
        )
        assert sum(turn.num_preemptions for turn in turns) > 0
        for turn, prompt in zip(turns, prompts, strict=True):
            assert turn.sink.token_ids == await alone(model, prompt, 60)
        await engine.all_released()


@pytest.mark.parametrize(("page_tokens", "num_kept"), [(4, 64), (5, 60), (20, 60)])
async def test_another_answer_gets_its_own_pages(model, page_tokens, num_kept):
    """The discarded part was shared: a page that others fill is not kept."""
    async with running_engine(model, **PAGES | {"page_tokens": page_tokens}) as engine:
        first = await engine.run([*SYSTEM, 7, 8], session="first")
        other = await engine.run([*SYSTEM, 330, 7], session="other")
        prompt = [*SYSTEM[: 4 * BLOCK_TOKENS + 5], 60, 61]
        changed = await engine.run(prompt, session="first")
        assert changed.outcome.tier_tokens == {"hbm": num_kept}
        assert changed.sink.token_ids == await alone(model, prompt)
        for turn, session in ((other, "other"), (changed, "first")):
            following = [*turn.token_ids, 40, 41]
            again = await engine.run(following, session=session)
            assert again.outcome.tier_tokens == {"hbm": len(turn.token_ids) - 1}
            assert again.sink.token_ids == await alone(model, following)
        assert first.key == changed.key
        await engine.all_released()
