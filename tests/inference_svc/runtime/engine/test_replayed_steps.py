"""An engine with replayed decode steps answers, saves and loads like one that computes."""

import asyncio

import pytest

from tests.memory_engine import BLOCK_TOKENS, alone, loaded_model, running_engine
from tests.recorded_graph import RecordedGraphs

PAGES = {"page_tokens": 4, "block_tokens": BLOCK_TOKENS}


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


async def test_turns_equal_those_of_an_engine_that_computes(model):
    """Beside each other; and again with the stored results of replayed steps."""
    capture = RecordedGraphs()
    async with running_engine(model, capture=capture, **PAGES) as engine:
        before = capture.num_replayed
        prompts = {str(number): list(range(20 + number, 40 + number)) for number in range(3)}
        turns = await asyncio.gather(
            *(engine.run(prompt, 20, session=name) for name, prompt in prompts.items())
        )
        for turn, prompt in zip(turns, prompts.values(), strict=True):
            assert turn.sink.token_ids == await alone(model, prompt, 20)
        counts = engine.counters.snapshot()
        assert counts["steps_failed"] == 0
        assert counts["steps"] > counts["steps_replayed"] >= 19  # all but those of the prompts
        assert capture.num_replayed == before + counts["steps_replayed"]
        await engine.all_released()  # residents are gone: it is loaded
        following = [*turns[0].token_ids, 60, 61]
        again = await engine.run(following, session="0")
        assert again.outcome.tier_tokens == {"dram": len(following) - 3}
        assert again.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_a_failed_step_is_computed_in_parts_and_replayed_later(model):
    """Requests beside the failing one get their answers."""
    async with running_engine(model, capture=RecordedGraphs(), **PAGES) as engine:
        counts = engine.counters.snapshot
        good, bad = engine.request(range(20, 45), 12), engine.request([13, 14], session="bad")
        results = await asyncio.gather(
            *(engine.loop.generate(each) for each in (good, bad)), return_exceptions=True
        )
        assert [type(result).__name__ for result in results] == ["NoneType", "EngineFailedError"]
        assert good.sink.token_ids == await alone(model, range(20, 45), 12)
        assert counts()["steps_failed"] >= 1
        assert counts()["steps_replayed"] >= 10
        engine.loop.drop(good)
        await engine.all_released()
