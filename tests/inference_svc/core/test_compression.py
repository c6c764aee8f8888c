"""Which tokens each policy keeps, and which none of them drops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.compression import (
    POLICY_NAMES,
    HeavyHitters,
    SinksRecent,
    SnapKV,
    check_compression,
    make_compression,
    num_kept,
    pool,
)
from inference_svc.core.errors import InvalidCompressionError
from inference_svc.core.ranges import merge_ranges, num_in, without


@st.composite
def contexts(draw):
    """Draw a context's length, scores of its first tokens, and protected ranges in any order."""
    num_tokens = draw(st.integers(1, 80))
    num_scored = draw(st.integers(1, num_tokens))
    scores = draw(st.lists(st.floats(0, 1e6), min_size=num_scored, max_size=num_scored))
    ends = draw(st.lists(st.tuples(st.integers(0, num_tokens), st.integers(0, num_tokens))))
    protected = [(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]]
    return num_tokens, scores, protected


policies = st.builds(
    lambda kind, ratio: kind(ratio),
    st.sampled_from([SinksRecent, SnapKV, HeavyHitters]),
    st.floats(0.01, 1),
)


def positions(ranges):
    return {position for start, end in ranges for position in range(start, end)}


@given(policies, contexts())
def test_drops_are_merged_and_spare_protected_tokens(policy, context):
    """Ranges are sorted, merged and within the context, without any protected token."""
    num_tokens, scores, protected = context
    ranges = policy.drop(num_tokens, scores, protected)
    assert merge_ranges(ranges, num_tokens) == ranges
    assert not positions(ranges) & positions(protected)


@given(policies, contexts())
def test_the_ratio_determines_how_many_tokens_stay(policy, context):
    """Exactly its share of the free tokens, or more where newer ones must stay."""
    num_tokens, scores, protected = context
    num_free = num_tokens - len(positions(protected))
    num_left = num_free - num_in(policy.drop(num_tokens, scores, protected))
    wanted = num_kept(policy.keep_ratio, num_free)
    assert num_left >= wanted
    if policy.needs == "nothing" or (policy.needs == "accumulated" and len(scores) == num_tokens):
        assert num_left == wanted


@given(policies, contexts())
def test_tokens_without_a_score_stay(policy, context):
    """Policies that use scores do not drop tokens that no query has scored."""
    num_tokens, scores, protected = context
    dropped = positions(policy.drop(num_tokens, scores, protected))
    assert policy.needs == "nothing" or all(position < len(scores) for position in dropped)


# Not H2O: two rankings share its budget, and rounding moves a token from one to the other.
@given(policies.filter(lambda policy: policy.name != "h2o"), contexts())
def test_a_larger_ratio_keeps_all_tokens_of_a_smaller_one(policy, context):
    """Policies rank tokens; the ratio only sets the length of the kept part."""
    num_tokens, scores, protected = context
    larger = type(policy)(min(1.0, policy.keep_ratio * 1.5))
    fewer = positions(larger.drop(num_tokens, scores, protected))
    assert fewer <= positions(policy.drop(num_tokens, scores, protected))


@pytest.mark.parametrize("name", ["sinks_recent", "snapkv", "h2o"])
def test_a_ratio_of_one_drops_nothing(name):
    """Everything stays."""
    assert make_compression(name, 1.0).drop(50, [0.0] * 50, []) == ()


def test_sinks_recent_keeps_both_ends():
    """The first four and the newest of ten, six in all."""
    assert SinksRecent(0.6).drop(10, None, []) == ((4, 8),)


def test_protected_sinks_count_as_sinks():
    """A system message at the start leaves the budget to recent tokens."""
    assert SinksRecent(0.5).drop(12, None, [(0, 4)]) == ((4, 8),)


def test_snapkv_keeps_window_answer_and_the_tokens_they_attend_to():
    """The best-scored tokens survive with neighbours; window and answer need no score."""
    scores = [0.0] * 20
    scores[5] = 9.0
    policy = SnapKV(0.5, window_tokens=4, pool_tokens=3)
    kept = without(range(24), policy.drop(24, scores, []))
    assert kept == [4, 5, 6, 15, *range(16, 24)]


def test_snapkv_keeps_its_window_with_any_ratio():
    """A budget smaller than window and answer drops all older tokens, and no more."""
    assert SnapKV(0.05, window_tokens=4).drop(24, [1.0] * 20, []) == ((0, 16),)
    assert SnapKV(0.05, window_tokens=4).drop(3, [1.0] * 3, []) == ()


def test_pooling_spreads_the_best_score():
    """Each token gets the best score within reach."""
    assert pool([0, 0, 5, 0, 0, 1], 3) == [0, 5, 5, 5, 1, 1]


def test_h2o_keeps_heavy_hitters_and_the_latest():
    """They get half of the budget each, though others have more attention than the latest."""
    scores = [0.0, 7.0, 6.0, 0.0, 8.0, 5.0, 2.0, 1.0]
    assert without(range(8), HeavyHitters(0.5).drop(8, scores, [])) == [1, 4, 6, 7]
    assert without(range(8), HeavyHitters(0.5, 0.25).drop(8, scores, [])) == [1, 2, 4, 7]
    assert without(range(8), HeavyHitters(0.5, 0.0).drop(8, scores, [])) == [1, 2, 4, 5]


def test_h2o_counts_tokens_without_a_score_among_the_latest():
    """The answer's last tokens use up the recent half first, then more of the budget."""
    scores = [9.0, 7.0, 6.0, 5.0]
    assert without(range(8), HeavyHitters(0.5).drop(8, scores, [])) == [4, 5, 6, 7]
    assert without(range(8), HeavyHitters(0.75).drop(8, scores, [])) == [0, 1, 4, 5, 6, 7]


# --------------------------------------------------------------------------- the table of policies


def test_every_name_creates_its_policy():
    """Names in the table are those of the policies; "none" is no policy."""
    made = [make_compression(name, 0.5) for name in POLICY_NAMES]
    assert made[0] is None
    assert [policy.name for policy in made[1:]] == list(POLICY_NAMES[1:])
    assert all(policy.keep_ratio == 0.5 for policy in made[1:])


@pytest.mark.parametrize(
    ("name", "keep_ratio", "said"),
    [
        ("zip", 0.5, "no compression policy 'zip': send one of none, sinks_recent, snapkv, h2o"),
        ("h2o", 0.0, "keep_ratio 0 is not in"),
        ("h2o", 1.01, "keep_ratio 1.01 is not in"),
        ("snapkv", float("nan"), "keep_ratio nan is not in"),
    ],
)
def test_bad_values_are_reported(name, keep_ratio, said):
    """The message has the value and the remedy."""
    with pytest.raises(InvalidCompressionError, match=said) as caught:
        make_compression(name, keep_ratio)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["masked", "single", "own"])
def test_policies_with_scores_need_a_model_with_readable_queries(mode):
    """Others are refused when they are chosen; the error names a possible policy."""
    for name in ("snapkv", "h2o"):
        policy = make_compression(name, 0.5)
        check_compression(policy, "ragged")
        check_compression(policy, "gather")
        with pytest.raises(InvalidCompressionError, match="use 'sinks_recent' or 'none'"):
            check_compression(policy, mode)
    check_compression(make_compression("sinks_recent", 0.5), mode)
