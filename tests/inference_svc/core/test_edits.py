"""What is kept behind edits: equal tokens, in order, as many as there can be, never twice."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.context import Context
from inference_svc.core.edits import (
    MOST_RUNS,
    EditMode,
    EditPolicy,
    KeptRun,
    common_runs,
    edit_policy,
    exact_tokens,
    runs_to_keep,
)
from inference_svc.core.scheduling.prefix_index import common_prefix
from inference_svc.core.truncation import FrameTokens
from inference_svc.core.turn_record import Graft, kept_among
from shared.types.lineage import WHOLE, Lineage

OPENING = 9
FRAMES = FrameTokens(frozenset({OPENING}), frozenset())
KEEP, HEAL = EditPolicy(EditMode.KEEP), EditPolicy(EditMode.HEAL, 2)
BODY = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
CHAT = st.lists(BODY, min_size=1, max_size=7)


def context(bodies, lineage=WHOLE, **fields) -> Context:
    """A conversation whose messages say these tokens, all computed."""
    ids = tuple(token for body in bodies for token in (OPENING, *body))
    return Context(ids, len(ids), lineage=lineage, framed=b"\1" * len(ids), **fields)


def weight_of_best(old, new) -> int:
    """Tokens of the heaviest common subsequence of messages, by the textbook's table."""
    table = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i, left in enumerate(old):
        for j, right in enumerate(new):
            both = table[i][j] + 1 + len(left) if left == right else 0
            table[i + 1][j + 1] = max(table[i][j + 1], table[i + 1][j], both)
    return table[-1][-1]


@given(old=CHAT, new=CHAT)
def test_runs_are_equal_tokens_in_order_and_disjoint(old, new):
    before, after = context(old), context(new)
    runs = common_runs(before, after, FRAMES)
    for run in runs:
        assert run.num_tokens > 0
        theirs = before.token_ids[run.source_start : run.source_end]
        assert after.token_ids[run.start : run.end] == theirs
    for first, second in pairwise(runs):
        assert first.end <= second.start
        assert first.source_end <= second.source_start


@given(old=CHAT, new=CHAT)
def test_they_have_as_many_tokens_as_whole_messages_in_order_can(old, new):
    """Behind what both begin with; the tokens of a message that both begin with count, too."""
    before, after = context(old), context(new)
    num_common = common_prefix(old, new)
    least = weight_of_best(old[num_common:], new[num_common:])
    least += sum(1 + len(body) for body in old[:num_common])
    assert sum(run.num_tokens for run in common_runs(before, after, FRAMES)) >= least


@given(
    old=CHAT,
    new=CHAT,
    policy=st.sampled_from([KEEP, HEAL]),
    least=st.integers(1, 6),
    clean=st.integers(0, 12),
    uncomputed=st.integers(0, 3),
)
def test_what_is_kept_lies_behind_what_is_exact(old, new, policy, least, clean, uncomputed):
    """It has been computed, is long enough, and leaves a token before it and one behind it."""
    before, after = context(old, Lineage(b"x" * 16, clean)), context(new)
    before = replace(before, computed_tokens=max(0, before.computed_tokens - uncomputed))
    runs = runs_to_keep(before, after, FRAMES, policy, least)
    assert len(runs) <= MOST_RUNS
    end = 0
    for run in runs:
        assert run.start - run.healed_tokens >= max(1, end, exact_tokens(before, after))
        assert run.num_tokens >= least
        assert run.source_end <= before.computed_tokens
        theirs = before.token_ids[run.source_start - run.healed_tokens : run.source_end]
        assert after.token_ids[run.start - run.healed_tokens : run.end] == theirs
        end = run.end
    assert end < len(after.token_ids)


def test_a_result_that_was_cleared_leaves_what_follows_it():
    """Of an agent's conversation: one tool result becomes a placeholder."""
    old = [[1, 1], [2, 2], [3] * 9, [4] * 5, [5] * 5]
    new = [[1, 1], [2, 2], [0], [4] * 5, [5] * 5, [6]]
    before, after = context(old), context(new)
    assert exact_tokens(before, after) == 7, "up to the result's opening token"
    assert runs_to_keep(before, after, FRAMES, KEEP, 4) == [KeptRun(8, 16, 12)]
    assert runs_to_keep(before, after, FRAMES, HEAL, 4) == [KeptRun(10, 18, 10, 2)]
    assert runs_to_keep(before, after, FRAMES, EditPolicy(), 1) == []


def test_only_the_largest_runs_are_kept():
    """Each costs a pass through the queue."""
    kept = [[1, 2] * (n + 1) for n in range(MOST_RUNS + 2)]
    old = [part for n, body in enumerate(kept) for part in ([3, n % 3], body)]
    new = [part for n, body in enumerate(kept) for part in ([4, n % 3], body)]
    runs = runs_to_keep(context(old), context([*new, [0]]), FRAMES, KEEP, 1)
    assert [run.num_tokens for run in runs] == [1 + len(body) for body in kept[-MOST_RUNS:]]


def test_what_two_truncated_contexts_begin_with_is_kept_not_shared():
    """Behind a discard equal tokens may have other KV; there is no seam to heal."""
    old = context([[1] * 5, [2] * 5, [3] * 5], Lineage(b"x" * 16, 6))
    new = context([[1] * 5, [2] * 5, [0]])
    assert runs_to_keep(old, new, FRAMES, HEAL, 1) == [KeptRun(6, 6, 7)]


def test_a_conversation_without_messages_keeps_nothing_behind_its_edit():
    text = replace(context([[1] * 5, [2] * 5]), framed=bytes(12))
    other = replace(context([[0] * 5, [2] * 5]), framed=bytes(12))
    assert runs_to_keep(text, other, FRAMES, KEEP, 1) == []


def test_what_is_left_of_kept_tokens_is_counted():
    grafts = [Graft(4, 10, "a", 0, 0, WHOLE), Graft(20, 5, "a", 30, 2, WHOLE)]
    assert [kept_among(grafts, n) for n in (0, 4, 9, 14, 20, 22, 99)] == [0, 0, 5, 10, 10, 12, 15]


@pytest.mark.parametrize(
    ("text", "policy"),
    [("exact", EditPolicy()), ("keep", KEEP), ("heal:2", HEAL)],
)
def test_a_policy_is_read(text, policy):
    assert edit_policy(text) == policy


@pytest.mark.parametrize("text", ["", "heal", "heal:0", "heal:-1", "heal:4097", "keep:3", "Keep"])
def test_another_is_refused_and_all_are_named(text):
    with pytest.raises(ValueError, match='"heal:k"'):
        edit_policy(text)
