"""A policy is found by its name, or refused in one line that says what to do."""

import pytest

from inference_svc.core.compression.registry import (
    POLICY_NAMES,
    check_compression,
    make_compression,
)
from inference_svc.core.errors import InvalidCompressionError


def test_every_name_makes_its_policy():
    """Names in the table are those of the policies; "none" is no policy."""
    made = [make_compression(name, 0.5) for name in POLICY_NAMES]
    assert made[0] is None
    assert [policy.name for policy in made[1:]] == list(POLICY_NAMES[1:])
    assert all(policy.keep_ratio == 0.5 for policy in made[1:])


@pytest.mark.parametrize(
    ("name", "keep_ratio", "said"),
    [
        ("zip", 0.5, "no compression policy 'zip': name one of none, sinks_recent, snapkv, h2o"),
        ("h2o", 0.0, "keep_ratio 0 is not in"),
        ("h2o", 1.01, "keep_ratio 1.01 is not in"),
        ("snapkv", float("nan"), "keep_ratio nan is not in"),
    ],
)
def test_bad_values_are_named(name, keep_ratio, said):
    """The message has the value and the remedy."""
    with pytest.raises(InvalidCompressionError, match=said) as caught:
        make_compression(name, keep_ratio)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["masked", "single"])
def test_policies_with_scores_need_a_model_that_shows_queries(mode):
    """Refused when it is chosen, with a policy that would do."""
    for name in ("snapkv", "h2o"):
        policy = make_compression(name, 0.5)
        check_compression(policy, "ragged")
        check_compression(policy, "gather")
        with pytest.raises(InvalidCompressionError, match="use 'sinks_recent' or 'none'"):
            check_compression(policy, mode)
    check_compression(make_compression("sinks_recent", 0.5), mode)
