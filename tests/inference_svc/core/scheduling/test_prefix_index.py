"""PrefixIndex compared with a search of every sequence."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.scheduling.prefix_index import PrefixIndex, common_prefix


def anybody(_key):
    """Accept any sequence."""
    return True


def longest_by_hand(sequences, scope, token_ids, usable):
    """Return the longest common prefix with a usable sequence of the scope, by search."""
    lengths = [
        common_prefix(ids, token_ids)
        for key, (ours, ids) in sequences.items()
        if ours == scope and key in usable
    ]
    return max(lengths, default=0)


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), TOKENS), max_size=20),
    TOKENS,
    st.sets(st.integers(0, 5)),
)
def test_it_finds_what_a_search_finds(changes, wanted, usable):
    """After any changes; few different tokens, so that prefixes are shared and split."""
    index, sequences = PrefixIndex(), {}
    for key, scope, ids in changes:
        if key in sequences:
            index.take(key)
            del sequences[key]
        else:
            index.put(key, scope, ids)
            sequences[key] = scope, ids
        index.check()
        assert len(index) == len(sequences)
        found = index.longest(scope, wanted, usable.__contains__)
        expected = longest_by_hand(sequences, scope, wanted, usable)
        if found is None:
            assert expected == 0
        else:
            holder, length = found
            assert length == expected > 0
            assert holder in usable
            assert common_prefix(sequences[holder][1], wanted) == length
            assert sequences[holder][0] == scope


def test_of_equal_matches_the_first_is_found():
    """So the answer is deterministic."""
    index = PrefixIndex()
    for key in "cab":
        index.put(key, None, [1, 2, 3])
    assert index.longest(None, [1, 2, 3, 4], anybody) == ("c", 3)
    assert index.longest(None, [1, 2, 9], {"b", "a"}.__contains__) == ("a", 2)


def test_a_key_has_one_sequence():
    """A second one violates an invariant; a missing one cannot be removed."""
    index = PrefixIndex()
    index.put("a", None, [1])
    with pytest.raises(AssertionError, match="has a sequence"):
        index.put("a", None, [2])
    index.take("a")
    with pytest.raises(KeyError):
        index.take("a")


def test_a_tree_has_at_most_two_nodes_per_sequence():
    """However long they are, and whatever was removed meanwhile."""
    random, index = Random(7), PrefixIndex()  # noqa: S311  # test data
    shared = [random.randrange(50_000) for _ in range(2_000)]
    for key in range(60):
        length = random.randrange(2_000)
        index.put(key, "tenant", shared[:length] + [random.randrange(50_000) for _ in range(50)])
    for key in range(0, 60, 2):
        index.take(key)
    index.check()
    nodes, num_nodes = [index._roots["tenant"]], 0
    while nodes:
        num_nodes += 1
        nodes += nodes.pop().children.values()
    assert num_nodes <= 2 * 30 + 1
