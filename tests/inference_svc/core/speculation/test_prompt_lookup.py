"""The place from which a draft is copied: the one that agrees with most of the newest tokens."""

import random

import pytest

from inference_svc.core.speculation import prompt_lookup
from inference_svc.core.speculation.draft_lengths import Acceptance
from inference_svc.core.speculation.prompt_lookup import (
    GRAM_TOKENS,
    MOST_MATCHED,
    MOST_PLACES,
    PromptLookup,
)


def make_lookup(token_ids, acceptance=None):
    return PromptLookup(list(token_ids), acceptance or Acceptance())


def grown(lookup, *token_ids):
    lookup.advance([0] * lookup._num_context + list(token_ids))
    return lookup


def test_a_repeated_beginning_is_continued():
    lookup = make_lookup([1, 2, 3, 4, 5, 6, 9, 2, 3, 4])
    assert lookup.num_matched == 3
    assert lookup.draft(3) == [5, 6, 9]


@pytest.mark.parametrize("token_ids", [[], [1], [1, 2], [1, 2, 3], [1, 2, 9, 1, 2], range(50)])
def test_without_a_match_there_is_no_draft(token_ids):
    lookup = make_lookup(token_ids)
    assert (lookup.num_matched, lookup.draft(0), lookup.chances(4)) == (0, [], [])


def test_the_place_that_agrees_most_wins_and_of_equals_the_latest():
    three = [2, 3, 4]
    assert make_lookup([8, 1, *three, 50, 7, *three, 60, 8, 1, *three]).draft(1) == [50]
    assert make_lookup([*three, 50, 7, *three, 60, 9, *three]).draft(1) == [60]


def test_a_repeating_text_is_continued_endlessly():
    assert make_lookup([7, 7, 7, 7]).draft(5) == [7] * 5
    assert make_lookup([1, 2, 3, 1, 2, 3]).draft(5) == [1, 2, 3, 1, 2]


def test_a_right_draft_continues_with_growing_certainty():
    lookup = make_lookup([*range(1, 40), 99, 1, 2, 3])
    for token_id in range(4, 30):
        assert lookup.draft(2) == [token_id, token_id + 1]
        matched = lookup.num_matched
        grown(lookup, token_id)
        assert lookup.num_matched == matched + 1
    grown(lookup, 98)
    assert lookup.num_matched == 0


def test_the_answers_own_tokens_are_searched_too():
    lookup = grown(make_lookup(range(5)), 20, 21, 22, 23, 30, 20, 21, 22)
    assert lookup.draft(2) == [23, 30]
    assert grown(lookup, 40, 20, 21, 22).draft(1) == [40]  # the latest of equal ones


def test_several_tokens_at_once_are_added_as_one_by_one():
    die = random.Random(3)  # noqa: S311  # test data
    tokens = [die.randrange(4) for _ in range(400)]
    one, many = make_lookup(tokens[:100]), make_lookup(tokens[:100])
    at = 100
    while at < len(tokens):
        count = die.randrange(1, 7)
        for token_id in tokens[at : at + count]:
            grown(one, token_id)
        grown(many, *tokens[at : at + count])
        at += count
        assert (one.num_matched, one.chances(3)) == (many.num_matched, many.chances(3))
        if one.num_matched:
            assert one.draft(4) == many.draft(4)


def agreeing(tokens, place):
    """Count the tokens before a place that equal those at the end."""
    count = 0
    while count < min(place, MOST_MATCHED) and tokens[place - 1 - count] == tokens[-1 - count]:
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_a_new_lookup_finds_the_best_of_all_places(seed):
    """Compared with a search; places beyond the compared number do not occur."""
    die = random.Random(seed)  # noqa: S311  # test data
    alphabet = die.choice([6, 20, 1000])
    for _ in range(30):
        tokens = [die.randrange(alphabet) for _ in range(die.randrange(3, 120))]
        if die.random() < 0.7:  # its end also occurs elsewhere
            start = die.randrange(len(tokens))
            tokens += tokens[start : start + die.randrange(3, 30)]
        lookup = make_lookup(tokens)
        counts = {place: agreeing(tokens, place) for place in range(1, len(tokens))}
        places = [place for place, count in counts.items() if count >= GRAM_TOKENS]
        if not places:
            assert lookup.num_matched == 0
        elif len(places) <= MOST_PLACES:
            assert lookup.num_matched == max(counts.values())
            best = max(place for place in places if counts[place] == lookup.num_matched)
            assert lookup.draft(1) == [tokens[best]]


def test_unrequested_drafts_are_counted_too():
    acceptance = Acceptance()
    lookup = make_lookup([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], acceptance)
    before = acceptance.chance(3)
    grown(lookup, 4)
    assert acceptance.chance(3) > before
    later = acceptance.chance(4)
    grown(lookup, 77)
    assert acceptance.chance(4) < later
    assert lookup.num_matched == 0


def test_tokens_of_large_vocabularies_are_distinguished():
    big = 2**31
    tokens = [big + 1, big + 2, big + 3, 5, big + 1, big + 2, big + 3]
    assert make_lookup(tokens).draft(1) == [5]
    assert grown(make_lookup(tokens), 5, 9, big + 1, big + 2, big + 3).draft(2) == [5, 9]


def test_a_clients_prediction_is_drafted_from_the_first_token_on():
    """And found again behind unpredicted tokens."""
    context = list(range(100, 120))
    lookup = PromptLookup(context, Acceptance(), [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert lookup.draft(4) == [1, 2, 3, 4]
    context += [1, 2]
    lookup.advance(context)
    assert lookup.draft(3) == [3, 4, 5]
    context += [55, 4]
    lookup.advance(context)
    assert lookup.num_matched == 0
    context += [5, 6]
    lookup.advance(context)
    assert lookup.draft(3) == [7, 8, 9]


def test_only_the_newest_tokens_of_a_very_long_prompt_are_searched(monkeypatch):
    """A million tokens must not delay other requests."""
    monkeypatch.setattr(prompt_lookup, "MOST_TOKENS", 8)
    context = [1, 2, 3, 4, 50, 51, 52, 53, 54, 55, 56]
    lookup = PromptLookup(context, Acceptance())
    context += [1, 2, 3]
    lookup.advance(context)
    assert lookup.num_matched == 0
    context += [53, 54, 55]
    lookup.advance(context)
    assert lookup.draft(2) == [56, 1]
