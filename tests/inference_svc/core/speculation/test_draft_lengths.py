"""The lengths of drafts that maximise a step's tokens per second."""

import random
from itertools import product

import pytest

from inference_svc.core.speculation.draft_lengths import StepCost, draft_lengths


def rate(chances, lengths, cost):
    """Return tokens per second of a step with drafts of these lengths."""
    tokens = sum(1 + sum(its[:length]) for its, length in zip(chances, lengths, strict=True))
    if not any(lengths):
        return tokens / cost.plain
    return tokens / (cost.drafted + cost.token * sum(lengths))


@pytest.mark.parametrize("seed", range(40))
def test_no_other_lengths_yield_more(seed):
    die = random.Random(seed)  # noqa: S311  # test data
    chances = []
    for _ in range(die.randrange(1, 5)):
        its = [die.random()]
        for _ in range(die.randrange(4)):
            its.append(its[-1] * die.choice([1.0, 0.9, die.random()]))
        chances.append(die.choice([its, its, []]))
    plain = die.uniform(0.2, 1.0)
    cost = StepCost(plain, die.choice([plain, 1.0]), die.uniform(0.01, 0.6))
    lengths = draft_lengths(chances, cost)
    assert all(length <= len(its) for length, its in zip(lengths, chances, strict=True))
    best = max(
        rate(chances, others, cost) for others in product(*(range(len(its) + 1) for its in chances))
    )
    assert rate(chances, lengths, cost) == pytest.approx(best)


def test_where_a_token_costs_as_much_as_a_step_nothing_is_drafted():
    assert draft_lengths([[0.99, 0.98], []], StepCost(2.0, 2.0, 1.0)) == [0, 0]


def test_where_memory_determines_the_time_everything_is_drafted():
    assert draft_lengths([[0.9] * 8, [0.5, 0.25]], StepCost(1.0, 1.0, 0.001)) == [8, 2]


def test_keeping_a_graph_is_worth_a_draft():
    chances = [[0.6, 0.36]]
    assert draft_lengths(chances, StepCost(1.0, 1.0, 0.05)) == [2]
    assert draft_lengths(chances, StepCost(0.4, 1.0, 0.05)) == [0]


def test_likely_answers_draft_and_unlikely_ones_do_not():
    assert draft_lengths([[0.95, 0.9, 0.85], [0.1, 0.01]], StepCost(1.0, 1.0, 0.2)) == [3, 0]


def test_without_answers_there_are_no_drafts():
    assert draft_lengths([], StepCost()) == []
