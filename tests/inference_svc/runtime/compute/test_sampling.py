"""Sampling follows its parameters, and repeats for the same seed and step."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import EngineFailedError
from inference_svc.runtime.compute.sampling import Sampler, draw

LOGITS = torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0, -1.0])


def count_draws(num_draws=400, logits=LOGITS, **values):
    params = {"temperature": 1.0, "seed": 5, **values}
    sampler = Sampler(SamplingParams(**params))
    return Counter(sampler.sample(logits, []).token_id for _ in range(num_draws))


def test_greedy_chooses_the_lowest_of_equal_tokens():
    """Temperature 0 is argmax, ties go to the lowest id, whatever the seed."""
    assert {Sampler(SamplingParams(seed=s)).sample(LOGITS, []).token_id for s in range(9)} == {1}


def test_draws_repeat_with_the_seed():
    """The draw of step i depends on seed and i alone; another seed draws otherwise."""
    runs = []
    for seed in (1, 1, 2):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        runs.append([sampler.sample(LOGITS, []).token_id for _ in range(30)])
    assert runs[0] == runs[1] != runs[2]
    skipping = Sampler(SamplingParams(temperature=1.0, seed=1))
    for _ in range(10):
        skipping.sample(torch.zeros(6), [])
    assert skipping.sample(LOGITS, []).token_id == runs[0][10]


def test_a_seeds_draws_never_change_between_releases():
    """Clients may repeat an answer later."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=7))
    drawn = [sampler.sample(torch.zeros(1000), []).token_id for _ in range(5)]
    assert drawn == [0, 919, 332, 564, 709]


def plain_draw(logits, params, uniform):
    """Compute the formula by sorting all of the vocabulary."""
    order = np.argsort(-logits, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    scaled = logits[order].astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled[0])
    keep = len(order)
    if params.top_p < 1.0:
        cumulated = np.cumsum(weights)
        keep = int(np.searchsorted(cumulated, params.top_p * cumulated[-1], side="left")) + 1
    if params.min_p > 0.0:
        keep = min(keep, int(np.count_nonzero(weights >= params.min_p * weights[0])))
    cumulated = np.cumsum(weights[:keep])
    return int(order[np.searchsorted(cumulated, uniform * cumulated[-1], side="right")])


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 7, 256, 257, 3000, 20_000]),
    st.sampled_from([0.3, 1.0, 4.0, 20.0]),
    st.sampled_from([None, 0, 1]),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.1, 1.0, 2.0]),
            "top_k": st.sampled_from([1, 5, 300, 50_000]),
            "top_p": st.sampled_from([0.1, 0.9, 0.999]),
            "min_p": st.sampled_from([0.001, 0.1, 0.9]),
        },
    ),
    # Nearer to 1 the order of additions decides.
    st.lists(st.floats(0, 1 - 2**-30), min_size=1, max_size=5),
)
def test_draws_equal_the_formulas(seed, vocab_size, spread, digits, filters, uniforms):
    """However many are sorted; with equal logits (rounded) and masked tokens, too."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=spread, size=vocab_size).astype(np.float32)
    if digits is not None:
        logits = logits.round(digits)
        logits[rng.random(vocab_size) < 0.3] = -np.inf
        logits[rng.integers(vocab_size)] = 0.0
    params = SamplingParams(**{"temperature": 1.0, **filters})
    for uniform in uniforms:
        assert draw(logits, params, uniform) == plain_draw(logits, params, uniform)


def test_frequencies_follow_the_probabilities():
    """Draws at temperature 1 have the softmax's frequencies."""
    counts = count_draws(4000)
    expected = torch.softmax(LOGITS.double(), 0)
    for token_id, probability in enumerate(expected.tolist()):
        spread = math.sqrt(probability * (1 - probability) / 4000)
        assert abs(counts[token_id] / 4000 - probability) < 5 * spread


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 100}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"min_p": 0.3}, {1, 3, 4}),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.5}, {1, 3}),
        ({"temperature": 1e-6}, {1, 3}),
        ({"temperature": 100.0}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_filters_leave_the_right_tokens(values, left):
    """Top-k, top-p and min-p keep exactly the specified tokens."""
    assert set(count_draws(**values)) == left


def test_a_penalty_lowers_seen_tokens():
    """With positive or negative logits; each counts once."""
    params = SamplingParams(repetition_penalty=2.0)
    assert Sampler(params).sample(LOGITS, [1, 1, 1]).token_id == 3
    assert Sampler(params).sample(LOGITS, [1, 3]).token_id == 4
    assert Sampler(params).sample(torch.tensor([-1.0, -1.5]), [0]).token_id == 1


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1.0, 2.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e-38])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.9, "logit_bias": {1: 100.0}}])
def test_a_penalty_that_raises_tokens_beyond_any_number(temperature, penalty, more):
    """One of those that were seen and were likely comes."""
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=1, **more)
    sampler = Sampler(params)
    for _ in range(20):
        assert sampler.sample(LOGITS, [2, 4, 5]).token_id in {2, 4}


@pytest.mark.parametrize("temperature", [5e-324, 1e-307, 1e-40])
def test_a_temperature_of_nearly_nothing(temperature):
    """Draws one of the most likely tokens."""
    assert set(count_draws(temperature=temperature, logits=LOGITS * 10)) == {1, 3}


VOCAB = 8
EOS = frozenset({3, VOCAB})  # one of them has no logits
eighths = st.integers(-40, 40).map(lambda n: n / 8)  # sums of these are exact
quarters = st.integers(-8, 8).map(lambda n: n / 4)
rows = st.lists(st.lists(eighths, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=12)
changes = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": quarters,
        "presence_penalty": quarters,
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), eighths, max_size=4),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "ignore_eos": st.booleans(),
    },
)


def as_the_formula_says(row, answer, params):
    """Apply OpenAI's formula to each token; premature end tokens are masked."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    logits = [
        logit
        + params.logit_bias.get(token_id, 0)
        - params.frequency_penalty * answer.count(token_id)
        - params.presence_penalty * (answer.count(token_id) > 0)
        for token_id, logit in enumerate(row)
    ]
    if len(answer) < params.min_tokens:
        logits = [-math.inf if t in ends else logit for t, logit in enumerate(logits)]
    return torch.tensor(logits)


@given(rows, changes, st.sampled_from([0.0, 1.0]), st.sampled_from([{}, {"top_k": 2}]))
def test_every_change_of_logits_equals_the_formulas(given_rows, changed, temperature, filters):
    """The choice is that of a simple sampler from the formula's logits.

    The context loses its tokens now and then: only generated tokens count.
    """
    common = {"temperature": temperature, "seed": 3, **filters}
    params = SamplingParams(**common, **changed)
    sampler, plain = Sampler(params, EOS), Sampler(SamplingParams(**common))
    answer = []
    for row in given_rows:
        expected = plain.sample(as_the_formula_says(row, answer, params), []).token_id
        assert sampler.sample(torch.tensor(row), [5, 5, 7]).token_id == expected
        answer.append(expected)


def test_penalties_count_the_answer_and_not_the_prompt():
    """The frequency penalty counts each repeat; the presence penalty counts once."""
    frequent = Sampler(SamplingParams(frequency_penalty=0.75))
    assert [frequent.sample(LOGITS, [1, 3, 4]).token_id for _ in range(5)] == [1, 3, 1, 3, 4]
    present = Sampler(SamplingParams(presence_penalty=0.75))
    assert [present.sample(LOGITS, [1, 3, 4]).token_id for _ in range(5)] == [1, 3, 1, 1, 1]


def test_a_bias_stays_while_penalties_grow():
    """The favoured token loses its penalties, and no more."""
    sampler = Sampler(SamplingParams(frequency_penalty=0.75, logit_bias={5: 6.0}))
    assert [sampler.sample(LOGITS, []).token_id for _ in range(6)] == [5, 5, 5, 1, 3, 5]


def test_penalties_come_after_the_repetition_penalty():
    """2 * -1 - 0.5 is less than -2.25; the bias is not multiplied either."""
    logits = torch.tensor([-1.0, -2.25])
    both = {"repetition_penalty": 2.0, "logit_bias": {0: -0.5}}
    assert Sampler(SamplingParams(**both)).sample(logits, [0]).token_id == 1
    both["logit_bias"] = {0: -0.125}
    assert Sampler(SamplingParams(**both)).sample(logits, [0]).token_id == 0


def test_the_row_of_logits_is_not_changed():
    """It belongs to the runner."""
    logits = LOGITS.clone()
    params = SamplingParams(
        repetition_penalty=2.0, logit_bias={1: 5.0}, min_tokens=1, stop_token_ids=(2,)
    )
    Sampler(params).sample(logits, [1])
    assert torch.equal(logits, LOGITS)


def test_logprobs_are_the_models():
    """Log-probabilities are the plain softmax's, whatever the turn changes."""
    params = SamplingParams(
        temperature=0.5,
        repetition_penalty=3.0,
        presence_penalty=1.0,
        logit_bias={0: 50.0, 1: -50.0},
        min_tokens=1,
        stop_token_ids=(3,),
        logprobs=3,
    )
    sampled = Sampler(params).sample(LOGITS, [1])
    assert sampled.token_id == 0
    expected = torch.log_softmax(LOGITS.double(), 0)
    assert sampled.logprob == pytest.approx(float(expected[sampled.token_id]))
    assert [token_id for token_id, _ in sampled.top] == [1, 3, 4]
    assert [value for _, value in sampled.top] == pytest.approx(expected[[1, 3, 4]].tolist())
    assert Sampler(SamplingParams()).sample(LOGITS, []).logprob is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_the_turn(bad):
    """An overflowed model is an error, and is not sampled from."""
    logits = LOGITS.clone()
    logits[4] = bad
    with pytest.raises(EngineFailedError, match="infinite or not numbers"):
        Sampler(SamplingParams()).sample(logits, [])
