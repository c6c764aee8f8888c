"""Simultaneous sessions with one beginning: one of them computes it for all."""

import asyncio

import pytest

from tests.memory_engine import BLOCK_TOKENS, alone, loaded_model, running_engine
from tests.sampled import sampled_cases

NUM_SESSIONS = 6
SYSTEM = [20 + number % 300 for number in range(10 * BLOCK_TOKENS)]


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


@pytest.mark.parametrize(
    ("write_slots", "page_tokens"), sampled_cases([4000, 100], [4, None], count=2, seed=1)
)
async def test_simultaneous_sessions_compute_one_prompt_once(model, write_slots, page_tokens):
    """The first computes it, while the others wait; each answers as it would alone."""
    limits = {"page_tokens": page_tokens, "write_slots": write_slots, "block_tokens": BLOCK_TOKENS}
    async with running_engine(model, **limits) as engine:
        prompts = [[*SYSTEM, 330 + number, 7] for number in range(NUM_SESSIONS)]
        turns = await asyncio.gather(
            *(engine.run(prompt, session=str(n)) for n, prompt in enumerate(prompts))
        )
        assert [turn.loaded_tokens for turn in turns] == [0] + [len(SYSTEM)] * (NUM_SESSIONS - 1)
        for turn, prompt in zip(turns, prompts, strict=True):
            assert turn.sink.token_ids == await alone(model, prompt)
        if page_tokens:
            assert engine.loop.gauges()["shared_token_slots"] == (NUM_SESSIONS - 1) * len(SYSTEM)
        await engine.all_released()
        assert engine.counters.snapshot()["saves"] == len(prompts)
        assert {len(rows[0]) // 4 for rows in engine.store.rows.values()} == {len(SYSTEM) + 2 + 7}


@pytest.mark.parametrize("page_tokens", [4, None])
async def test_a_shared_prefix_is_saved_once_its_first_session_has_saved_it(model, page_tokens):
    """While that one still answers: others do not fill the write ring until its end."""
    limits = {"page_tokens": page_tokens, "block_tokens": BLOCK_TOKENS}
    async with running_engine(model, **limits) as engine:
        first = asyncio.ensure_future(engine.run([*SYSTEM, 330, 7], 3000, session="first"))
        await asyncio.sleep(0)
        other = await engine.run([*SYSTEM, 331, 7], session="other")
        assert other.loaded_tokens == len(SYSTEM)
        await engine.saves.wait_for_end(other.key)
        assert not first.done()
        assert len(engine.store.rows[other.key][0]) // 4 == len(SYSTEM) + 2 + 7
        first.cancel()
