"""Turns that begin with KV of another session's resident."""

import asyncio
import threading

import pytest

from tests.memory_engine import BLOCK_TOKENS, alone, loaded_model, running_engine

FIRST = list(range(20, 60))  # two and a half blocks
BLOCK = {"block_tokens": BLOCK_TOKENS}


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


@pytest.mark.parametrize(
    ("num_common", "num_shared"),
    [
        (40, 40),  # in the last block, whose keys before RoPE are kept
        (24, 16),  # in an earlier block: the rest of it could not be saved again
        (15, 0),
    ],
)
async def test_a_common_beginning_is_copied(model, num_common, num_shared):
    """Both answer as they would alone, and both sessions' stored KV serves their next turns."""
    async with running_engine(model, **BLOCK) as engine:
        await engine.run(FIRST, session="a")
        prompt = [*FIRST[:num_common], *range(90, 100)]
        other = await engine.run(prompt, session="b")
        assert other.outcome.tokens == num_shared
        assert other.outcome.tier_tokens == ({"hbm": num_shared} if num_shared else {})
        assert other.sink.token_ids == await alone(model, prompt)
        assert engine.counters.snapshot()["prefixes_shared"] == (num_shared > 0)
        await engine.loop.idle.wait()
        for session, tokens in (("a", None), ("b", other.token_ids[:-1])):
            engine.loop.memory.release_resident(engine.request([1], session=session).key)
            if tokens is not None:
                following = [*tokens, *range(110, 120)]
                loaded = await engine.run(following, session=session)
                assert loaded.outcome.tier_tokens == {"dram": len(tokens)}
                assert loaded.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_many_sessions_copy_one_prompt_at_once(model):
    """The source stays."""
    async with running_engine(model, **BLOCK) as engine:
        await engine.run(FIRST, session="a")
        prompts = {f"s{number}": [*FIRST, 90 + number, 7] for number in range(6)}
        turns = await asyncio.gather(
            *(engine.run(prompt, session=name) for name, prompt in prompts.items())
        )
        for turn, prompt in zip(turns, prompts.values(), strict=True):
            assert turn.outcome.tier_tokens == {"hbm": len(FIRST)}
            assert turn.sink.token_ids == await alone(model, prompt)
        again = await engine.run([*FIRST, 5, 6], session="a")
        assert again.outcome.tier_tokens == {"hbm": len(FIRST)}
        await engine.all_released()


async def test_a_session_is_deleted_while_its_prefix_is_copied(model):
    """Its memory is not lent again until the copy has ended."""
    async with running_engine(model, **BLOCK) as engine:
        first = await engine.run(FIRST, session="a")
        await engine.loop.idle.wait()
        may_copy = threading.Event()
        busy = asyncio.create_task(engine.threads[1].run(may_copy.wait))
        prompt = [*FIRST, 90, 91]
        request = engine.request(prompt, session="b")
        is_announced = asyncio.Event()
        request.sink.on_start = lambda _: is_announced.set()
        answer = asyncio.create_task(engine.loop.generate(request))
        await is_announced.wait()
        num_free = engine.pool.num_free
        await engine.loop.forget(first.key, first.token_ids)
        num_freed = engine.pool.num_free - num_free
        may_copy.set()
        assert num_freed < len(FIRST), "only the tail is free"
        await asyncio.gather(busy, answer)
        assert request.outcome.tier_tokens == {"hbm": len(FIRST)}
        assert request.sink.token_ids == await alone(model, prompt)
        engine.loop.keep(request, request.token_ids[:-1])
        await engine.all_released()


async def test_a_turn_cancelled_while_it_copies_frees_everything(model):
    """The source stays."""
    async with running_engine(model, **BLOCK) as engine:
        await engine.run(FIRST, session="a")
        await engine.loop.idle.wait()
        request = engine.request([*FIRST, 90, 91], session="b")
        is_announced = asyncio.Event()
        request.sink.on_start = lambda _: is_announced.set()
        answer = asyncio.create_task(engine.loop.generate(request))
        await is_announced.wait()
        answer.cancel()
        await asyncio.wait([answer])
        again = await engine.run([*FIRST, 5, 6], session="a")
        assert again.outcome.tier_tokens == {"hbm": len(FIRST)}
        await engine.all_released()


async def test_the_save_of_a_shared_prefix_comes_first(model):
    """Before it the store could not chain the later blocks."""
    async with running_engine(model, **BLOCK) as engine:
        engine.store.may_end.clear()
        first = await engine.run(FIRST, session="a")
        other = await engine.run([*FIRST, 90, 91], session="b")
        assert other.outcome.tier_tokens == {"hbm": len(FIRST)}
        engine.store.may_end.set()
        await engine.all_released()
        assert list(engine.store.rows) == [first.key, other.key]
        assert engine.counters.snapshot()["saves"] == 2
