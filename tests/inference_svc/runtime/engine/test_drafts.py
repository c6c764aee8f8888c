"""Drafts, right or wrong, change only the timing of answers and saves, not their contents."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from inference_svc.core.answers import SamplingParams
from inference_svc.core.rates.rates import DecodeTimes
from inference_svc.core.scheduling.request import RequestState
from inference_svc.core.speculation.draft_lengths import Acceptance
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.engine.drafts import TRY_EVERY, Drafter
from tests.memory_engine import BLOCK_TOKENS, alone, loaded_model, running_engine
from tests.recorded_graph import RecordedGraphs
from tests.sampled import sampled_cases

PROMPT = list(range(20, 60))
ANSWER_TOKENS = 60
PLAIN = SamplingParams()
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, logprobs=3)
MEMORY = {
    "contiguous": {},
    "pages": {"page_tokens": 4, "block_tokens": BLOCK_TOKENS},
    "a narrow ring": {"write_slots": 16},
    "nothing saved": {"write_slots": 0},
    "short slots": {"answer_tokens": 7, "kv_slots": 240},
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


class Guesser:
    """Drafts the known answer with some mistakes, in any length.

    Args:
        answers: by request number.
    """

    def __init__(self, answers, seed):
        self._answers = answers
        self._die = random.Random(seed)  # noqa: S311  # test data

    def drafts(self, requests):
        die, found = self._die, {}
        for request in requests:
            if request.state is RequestState.RUNNING and request.is_decoding:
                draft = self._answers[request.number][request.num_sampled :][: die.randrange(9)]
                if draft and die.random() < 0.5:
                    draft[die.randrange(len(draft))] = die.randrange(300)
                found[request.number] = draft
        return found


class Listener:
    """Collects sampled tokens up to a number."""

    def __init__(self, num_tokens):
        self.sampled_tokens = []
        self._num_tokens = num_tokens

    def on_start(self, request):
        pass

    def on_token(self, token):
        self.sampled_tokens.append(token)
        return len(self.sampled_tokens) == self._num_tokens


def make_turn(engine, params, session="s", prompt=PROMPT, end=ANSWER_TOKENS):
    """Make a turn whose client needs only `end` tokens."""
    request = engine.request(prompt, ANSWER_TOKENS, session=session)
    request.sampler, request.sink = Sampler(params), Listener(end)
    return request


async def finish(engine, request):
    await engine.loop.generate(request)
    engine.loop.keep(request, request.token_ids[:-1])
    return request


async def plainly(model, params, prompt=PROMPT, **limits):
    """Return the answer with one token per step, and its tokens in the store."""
    async with running_engine(model, draft_tokens=0, **limits) as engine:
        request = await finish(engine, make_turn(engine, params, prompt=prompt))
        await engine.all_released()
        return request.sink.sampled_tokens, engine.store.rows.get(request.key)


def drafted_by(request):
    return request.num_drafted, request.num_accepted


def ids(tokens):
    return [token.token_id for token in tokens]


def check_same(tokens, expected):
    """Check that tokens are equal, and log-probabilities as equal as in steps of other sizes."""
    assert ids(tokens) == ids(expected)
    for token, other in zip(tokens, expected, strict=True):
        assert [t for t, _ in token.top] == [t for t, _ in other.top]
        assert token.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("params", "memory"),
    sampled_cases([PLAIN, DRAWN, PENALISED], list(MEMORY), count=5, seed=1),
)
async def test_answers_and_saves_are_those_without_drafts(model, params, memory):
    """Three turns beside each other, whose drafts are right, half right, or wrong."""
    limits = MEMORY[memory]
    prompts = {str(number): list(range(20 + number, 60 + number)) for number in range(3)}
    plain = {name: await plainly(model, params, prompt) for name, prompt in prompts.items()}
    async with running_engine(model, **limits) as engine:
        engine.store.saves = bool(limits.get("write_slots", 1))
        requests = {name: make_turn(engine, params, name, its) for name, its in prompts.items()}
        answers = {requests[name].number: ids(tokens) for name, (tokens, _) in plain.items()}
        engine.loop._drafter = Guesser(answers, seed=len(memory))
        await asyncio.gather(*(finish(engine, request) for request in requests.values()))
        await engine.all_released()
        drafted, accepted = map(sum, zip(*map(drafted_by, requests.values()), strict=True))
        assert drafted > accepted > ANSWER_TOKENS / 4
        for name, (tokens, rows) in plain.items():
            check_same(requests[name].sink.sampled_tokens, tokens)
            found = engine.store.rows.get(requests[name].key)
            if found is not None and memory != "a narrow ring":
                assert found[0] == rows[0]
            for ours, others in zip(found[1:] if found else (), rows[1:], strict=False):
                for layer, expected in zip(ours, others, strict=True):
                    torch.testing.assert_close(layer, expected[: len(layer)], atol=1e-4, rtol=1e-4)
        assert engine.store.saves == bool(engine.store.rows)


@pytest.mark.parametrize(
    "end", [1, 9, *(pytest.param(end, marks=pytest.mark.long) for end in (8, 30))]
)
async def test_an_answer_that_ends_within_a_draft_is_unchanged(model, end):
    """So is the next turn, which continues with the resident."""
    tokens, _ = await plainly(model, PLAIN)
    async with running_engine(model) as engine:
        request = make_turn(engine, PLAIN, end=end)
        engine.loop._drafter = Guesser({request.number: ids(tokens)}, seed=end)
        await finish(engine, request)
        assert ids(request.sink.sampled_tokens) == ids(tokens)[:end]
        assert request.token_ids == [*PROMPT, *ids(tokens)[:end]]
        assert (request.num_sampled, request.computed_tokens) == (end, len(PROMPT) + end - 1)
        following = [*request.token_ids, 77, 78]
        engine.loop._drafter = Drafter(DecodeTimes(), most_tokens=0)
        turn = await engine.run(following)
        assert turn.outcome.tier_tokens == {"hbm": len(following) - 3}
        assert turn.sink.token_ids == await alone(model, following)
        await engine.all_released()


async def test_a_window_that_fills_within_a_draft_is_cut_as_without_one(model):
    """Repeatedly."""
    window = 50
    cuts = {"truncate": lambda token_ids: [(0, len(token_ids) // 2)], "window_tokens": window}
    async with running_engine(model, draft_tokens=0) as engine:
        plain = engine.request(PROMPT, 80, **cuts)
        await engine.loop.generate(plain)
        engine.loop.drop(plain)
        await engine.all_released()
    async with running_engine(model) as engine:
        request = engine.request(PROMPT, 80, **cuts)
        engine.loop._drafter = Guesser({request.number: plain.sink.token_ids}, seed=2)
        await engine.loop.generate(request)
        assert request.sink.token_ids == plain.sink.token_ids
        assert request.discards == plain.discards
        assert request.token_ids == plain.token_ids
        assert request.num_accepted > 10
        engine.loop.drop(request)
        await engine.all_released()


async def test_a_repetitive_answer_takes_fewer_steps(model):
    """With drafts by lookup: a step per token would be sixty."""
    biased = replace(PLAIN, logit_bias={50: 90.0, 51: 89.5}, frequency_penalty=0.5)
    tokens, _ = await plainly(model, biased)
    assert set(ids(tokens)) == {50, 51}
    async with running_engine(model) as engine:
        # however long steps take here
        engine.loop._drafter = Drafter(make_rates(0.01), most_tokens=8)
        request = await finish(engine, make_turn(engine, biased))
        counts = engine.counters.snapshot()
        assert ids(request.sink.sampled_tokens) == ids(tokens)
        assert request.num_accepted > ANSWER_TOKENS / 4
        assert counts["steps"] == ANSWER_TOKENS - request.num_accepted
        await engine.all_released()


async def test_a_predicted_answer_takes_few_steps(model):
    """The prediction is wrong in one place, and no word of it is in the prompt."""
    tokens, _ = await plainly(model, PLAIN)
    predicted = ids(tokens)
    predicted[30] = 7
    async with running_engine(model) as engine:
        # however long steps take here
        engine.loop._drafter = Drafter(make_rates(0.01), most_tokens=8)
        request = make_turn(engine, PLAIN)
        request.predicted_ids = predicted
        await finish(engine, request)
        assert ids(request.sink.sampled_tokens) == ids(tokens)
        assert request.num_accepted > ANSWER_TOKENS / 2
        assert request.num_drafted > request.num_accepted
        assert engine.counters.snapshot()["steps"] == ANSWER_TOKENS - request.num_accepted
        await engine.all_released()


async def test_replayed_and_drafted_steps_alternate(model):
    """A step with a draft is computed, others are replayed."""
    tokens, _ = await plainly(model, PLAIN)
    capture = RecordedGraphs()
    async with running_engine(model, capture=capture, **MEMORY["pages"]) as engine:
        request = make_turn(engine, PLAIN)
        engine.loop._drafter = Guesser({request.number: ids(tokens)}, seed=8)
        await finish(engine, request)
        counts = engine.counters.snapshot()
        assert ids(request.sink.sampled_tokens) == ids(tokens)
        assert counts["steps_replayed"] > 0
        assert request.num_accepted > 0
        await engine.all_released()


class OneRequest:
    """A drafter's view of a running answer."""

    state, is_decoding, scores = RequestState.RUNNING, True, None

    def __init__(self, token_ids, number=1):
        self.token_ids, self.number, self.lookup = token_ids, number, None
        self.prompt_tokens, self.predicted_ids = len(token_ids), ()


def test_no_draft_goes_beyond_an_end():
    """Later tokens are never needed, and a grammar ends there."""
    token_ids = [1, 2, 3, 4, 5, 0, 7, 1, 2, 3]
    drafter = Drafter(DecodeTimes(), most_tokens=6, end_ids=frozenset({0}))
    assert drafter.drafts([OneRequest(token_ids)]) == {1: [4, 5]}
    drafter = Drafter(DecodeTimes(), most_tokens=6)
    assert drafter.drafts([OneRequest(token_ids)])[1][:3] == [4, 5, 0]


def test_answers_without_repetition_and_with_scores_have_no_draft():
    drafter = Drafter(DecodeTimes(), most_tokens=6)
    scored = OneRequest([1, 2, 3, 4, 1, 2, 3], number=2)
    scored.scores = object()
    waiting = OneRequest([1, 2, 3, 4, 1, 2, 3], number=3)
    waiting.state = RequestState.WAITING
    assert drafter.drafts([OneRequest(list(range(9))), scored, waiting]) == {}
    assert scored.lookup is None


def make_rates(token_s):
    """Make steps that take a second, and some more for each token."""
    times = DecodeTimes()
    for _ in range(4):
        for num_tokens in (1, 2, 3, 5, 9):
            times.note(num_tokens, 1.0 + num_tokens * token_s, is_replayed=False)
    return times


def test_unprofitable_drafts_are_off_and_retried_now_and_then():
    """Otherwise the cost of steps would never be measured again."""
    request = OneRequest([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert Drafter(make_rates(0.01), most_tokens=4).drafts([request]) == {1: [4, 5, 6, 1]}
    drafter = Drafter(make_rates(50.0), most_tokens=4)
    request.lookup = None
    lengths = [len(drafter.drafts([request]).get(1, ())) for _ in range(2 * TRY_EVERY)]
    assert lengths == ([0] * (TRY_EVERY - 1) + [1]) * 2


def test_an_answer_with_wrong_drafts_gets_none_while_another_does():
    """Each answer learns separately, from unused drafts, too."""
    drafter = Drafter(make_rates(0.3), most_tokens=4)
    right, wrong = OneRequest([1, 2, 3, 4] * 8), OneRequest([1, 2, 3, 4] * 8, number=2)
    drafter.drafts([right, wrong])
    for number in range(40):
        right.token_ids.append(1 + number % 4)
        wrong.token_ids += [1000 + number, 1, 2, 3]
        found = drafter.drafts([right, wrong])
    assert len(found[1]) == 4
    assert 2 not in found


def test_a_new_answer_starts_with_the_engines_estimate():
    drafter = Drafter(make_rates(0.2), most_tokens=4)
    first = OneRequest([1, 2, 3, 4] * 8)
    for number in range(60):
        first.token_ids.append(1 + number % 4)
        drafter.drafts([first])
    second = OneRequest([5, 6, 7, 8] * 8, number=2)
    fresh = Drafter(make_rates(0.2), most_tokens=4)
    fresh_second = OneRequest([5, 6, 7, 8] * 8, number=2)
    assert len(drafter.drafts([second])[2]) > len(fresh.drafts([fresh_second]).get(2, ()))


def test_without_a_limit_nothing_is_drafted():
    request = OneRequest([1, 2, 3, 4, 1, 2, 3])
    assert Drafter(DecodeTimes(), most_tokens=0).drafts([request]) == {}
    assert request.lookup is None
    assert Acceptance().chance(3) == 0.5
