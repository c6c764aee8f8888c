"""The tokens kept behind edits: equal ones, in order, as many as possible, never twice."""

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
    """Make a conversation whose messages have these tokens, all computed."""
    ids = tuple(token for body in bodies for token in (OPENING, *body))
    return Context(ids, len(ids), lineage=lineage, framed=b"\1" * len(ids), **fields)


def weight_of_best(old, new) -> int:
    """Return the weight of the heaviest common subsequence of messages, by the textbook's table."""
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
    """Behind the common beginning; tokens of a message that lies partly in it count, too."""
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
def test_kept_tokens_lie_behind_the_exact_beginning(old, new, policy, least, clean, uncomputed):
    """They are computed and numerous enough, with a token before and behind them."""
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


def test_clearing_a_tool_result_keeps_the_messages_behind_it():
    """One tool result of an agent's conversation becomes a placeholder."""
    old = [[1, 1], [2, 2], [3] * 9, [4] * 5, [5] * 5]
    new = [[1, 1], [2, 2], [0], [4] * 5, [5] * 5, [6]]
    before, after = context(old), context(new)
    assert exact_tokens(before, after) == 7, "up to the result's opening token"
    assert runs_to_keep(before, after, FRAMES, KEEP, 4) == [KeptRun(8, 16, 12)]
    assert runs_to_keep(before, after, FRAMES, HEAL, 4) == [KeptRun(10, 18, 10, 2)]
    assert runs_to_keep(before, after, FRAMES, EditPolicy(), 1) == []


def test_only_the_largest_runs_are_kept():
    """Each costs a call to kvd."""
    kept = [[1, 2] * (n + 1) for n in range(MOST_RUNS + 2)]
    old = [part for n, body in enumerate(kept) for part in ([3, n % 3], body)]
    new = [part for n, body in enumerate(kept) for part in ([4, n % 3], body)]
    runs = runs_to_keep(context(old), context([*new, [0]]), FRAMES, KEEP, 1)
    assert [run.num_tokens for run in runs] == [1 + len(body) for body in kept[-MOST_RUNS:]]


def test_the_common_beginning_of_truncated_contexts_is_kept():
    """Behind a discard equal tokens may have other KV; there is no seam to heal."""
    old = context([[1] * 5, [2] * 5, [3] * 5], Lineage(b"x" * 16, 6))
    new = context([[1] * 5, [2] * 5, [0]])
    assert runs_to_keep(old, new, FRAMES, HEAL, 1) == [KeptRun(6, 6, 7)]


def test_a_conversation_without_messages_keeps_nothing_behind_its_edit():
    text = replace(context([[1] * 5, [2] * 5]), framed=bytes(12))
    other = replace(context([[0] * 5, [2] * 5]), framed=bytes(12))
    assert runs_to_keep(text, other, FRAMES, KEEP, 1) == []


def test_the_rest_of_kept_tokens_is_counted():
    grafts = [Graft(4, 10, "a", 0, 0, WHOLE), Graft(20, 5, "a", 30, 2, WHOLE)]
    assert [kept_among(grafts, n) for n in (0, 4, 9, 14, 20, 22, 99)] == [0, 0, 5, 10, 10, 12, 15]


@pytest.mark.parametrize(
    ("text", "policy"),
    [("exact", EditPolicy()), ("keep", KEEP), ("heal:2", HEAL)],
)
def test_valid_policies(text, policy):
    assert edit_policy(text) == policy


@pytest.mark.parametrize("text", ["", "heal", "heal:0", "heal:-1", "heal:4097", "keep:3", "Keep"])
def test_an_invalid_policy_is_refused_with_the_valid_ones(text):
    with pytest.raises(ValueError, match='"heal:k"'):
        edit_policy(text)
