"""Turns with changed sampling are not affected by preemption, overflow or other turns."""

import asyncio
import re
from dataclasses import replace

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.grammar import Grammar, GrammarKind
from inference_svc.core.turn_record import Tokens
from tests.memory_engine import loaded_model
from tests.turn_service import KEY, LIMITS, first_token, make_turn, serving, token_ids_of

PENALISED = SamplingParams(
    frequency_penalty=1.5, presence_penalty=0.5, logprobs=20, max_tokens=120, ignore_eos=True
)


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


def tokens_of(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.tokens]


def choices_that_are_off(tokens, num_remembered=None):
    """Count tokens that are not the best of their step's most likely ones, by the formula.

    Args:
        num_remembered: let the penalties count only so many tokens of the answer.
    """
    num_off = 0
    for number, token in enumerate(tokens):
        first = 0 if num_remembered is None else max(0, number - num_remembered)
        counts = [one.token_id for one in tokens[first:number]]
        scores = {
            token_id: logprob
            - PENALISED.frequency_penalty * counts.count(token_id)
            - PENALISED.presence_penalty * (token_id in counts)
            for token_id, logprob in (*token.top, (token.token_id, token.logprob))
        }
        num_off += scores[token.token_id] < max(scores.values()) - 1e-4
    return num_off


async def test_tokens_dropped_from_the_context_are_still_penalised(model, tmp_path):
    """They are in the answer, which has outgrown its window."""
    async with serving(model, tmp_path, replace(LIMITS, window_tokens=64)) as service:
        events = await service.run(range(20, 60), sampling=PENALISED)
    usage = events[-1].usage
    assert usage.dropped_tokens > 40  # tokens of the answer among them
    tokens = tokens_of(events)
    assert (len(tokens), choices_that_are_off(tokens)) == (120, 0)
    assert choices_that_are_off(tokens, num_remembered=64) > 0


async def test_a_preempted_turn_keeps_its_counts(model, tmp_path):
    """As if nobody had come."""
    async with serving(model, tmp_path, max_running=1, answer_tokens=200) as service:
        low = await service.turns.submit(make_turn(range(20, 60), sampling=PENALISED))
        others = await first_token(low)
        high = KEY._replace(session_id="high")
        await service.run(range(30, 70), 4, key=high, priority=1)
        last = [event async for event in others][-1]
        assert last.usage.preemptions == 1
        tokens = tokens_of(low._events)
        assert (len(tokens), choices_that_are_off(tokens)) == (120, 0)


async def test_turns_of_one_batch_are_sampled_independently(model, tmp_path):
    """As each of them is alone."""
    kinds = [
        {},
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0, "temperature": 1.0, "seed": 3},
        {"logit_bias": {7: 100.0, 8: 99.5}, "presence_penalty": 1.0},
        {"repetition_penalty": 1.5, "frequency_penalty": -0.5},
        {"min_tokens": 9, "stop_token_ids": tuple(range(60)), "temperature": 1.0, "seed": 4},
    ]

    async def run(service, number, kind, name):
        return await service.run(
            range(20 + number, 50 + number),
            key=KEY._replace(session_id=f"{name}-{number}"),
            sampling=SamplingParams(max_tokens=12, **kind),
        )

    async with serving(model, tmp_path, max_running=len(kinds)) as service:
        alone = [await run(service, n, kind, "alone") for n, kind in enumerate(kinds)]
        batch = await asyncio.gather(
            *(run(service, n, kind, "batch") for n, kind in enumerate(kinds))
        )
    answers = [token_ids_of(events) for events in alone]
    assert [token_ids_of(events) for events in batch] == answers
    assert set(answers[3][:2]) == {7, 8}
    assert not set(answers[5][:9]) & set(range(60))


async def test_a_premature_end_is_delayed(model, tmp_path):
    """An end-of-turn token or a stop token; it is part of later turns' history."""
    limits = replace(LIMITS, eos_ids=frozenset({5}))
    always = {"logit_bias": {5: 100.0, 6: 50.0}, "max_tokens": 8}
    async with serving(model, tmp_path, limits) as service:

        async def answer(**given):
            events = await service.run([20, 21], sampling=SamplingParams(**always, **given))
            return token_ids_of(events), events[-1].finish_reason

        assert await answer() == ([5], "stop")
        assert await answer(min_tokens=3) == ([6, 6, 6, 5], "stop")
        assert await answer(min_tokens=8) == ([6] * 8, "length")
        assert await answer(ignore_eos=True, min_tokens=3) == ([5] * 8, "length")
        assert await answer(ignore_eos=True, stop_token_ids=(5,)) == ([5], "stop")
        (first, *rest), _ = await answer(min_tokens=1, stop_token_ids=(6,))
        assert (first in {5, 6}, rest) == (False, [5])
        context = (await service.transcript()).context.token_ids
        assert context[:10] == (20, 21, 5, 20, 21, 6, 6, 6, 5, 20)


@pytest.mark.parametrize("window_tokens", [200, 64])
async def test_an_answer_with_a_grammar_may_outgrow_its_window(model, tmp_path, window_tokens):
    """Dropped tokens still count: the whole answer is valid, to its end."""
    end_id = model[0].tokenizer.convert_tokens_to_ids("z")
    limits = replace(LIMITS, window_tokens=window_tokens, eos_ids=frozenset({end_id}))
    grammar = Grammar(GrammarKind.REGEX, "([ab]c){40}d")
    sampling = SamplingParams(max_tokens=120, grammar=grammar)
    async with serving(model, tmp_path, limits) as service:
        events = await service.run(range(20, 60), sampling=sampling)
    assert re.fullmatch(grammar.source + "z?", events[-1].text)
    assert events[-1].finish_reason == "stop"
    assert (events[-1].usage.dropped_tokens > 0) == (window_tokens == 64)
