"""KV with the last tokens only in layers with a window: the same results in less memory.

Contiguous and on pages; tests of pages alone are in `test_paged_windows.py`.
"""

import pytest
import torch

from inference_svc.core.ranges import kept_runs
from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.kv.layer_groups import HeldWindows
from inference_svc.runtime.kv.layer_tensors import token_items_of
from inference_svc.runtime.kv.windowed_kv import WindowedKv
from inference_svc.runtime.transfer.compaction import compact_in_place
from inference_svc.runtime.transfer.layer_load import copy_layer
from tests.held_windows import (
    CAPACITY,
    KINDS,
    NAMES,
    STEP,
    HoldsAll,
    OnPages,
    SideBySide,
    check_answers,
    token_ids,
)
from tests.sampled import sampled_cases

BOTH = [SideBySide, OnPages]


def components_of(kv, layer_index, first):
    """Return a layer's tokens from the first on, of keys and of values."""
    return [c.read(layer_index, first, kv.num_tokens - first) for c in kv.components]


@pytest.fixture(params=NAMES)
def model(tiny, request):
    return tiny(request.param, has_windows=True)


@pytest.fixture(params=BOTH)
def holding(model, request):
    return request.param(model)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_answers_equal_those_of_kv_that_keeps_all(holding, seed):
    """Chunk by chunk and token by token, wherever the rows are full."""
    check_answers(holding, seed, 1e-5)


def test_a_sequence_takes_the_counted_memory(model):
    """As many as the accounts have room for fit side by side, and none writes to another."""
    num_slots = SideBySide(model).rows.slots_for(CAPACITY)
    assert num_slots < 0.7 * CAPACITY
    pool = SideBySide(model, num_slots=5 * num_slots).pool
    kvs = [pool.new_kv(CAPACITY) for _ in range(5)]
    assert all(isinstance(kv, WindowedKv) for kv in kvs)
    assert (pool.num_outside, pool.num_free) == (0, 0)
    tensors = [layer for kv in kvs for tokens in kv.components for layer in tokens.layers]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
    held = sum(tensor.numel() for kv in kvs[:1] for c in kv.components for tensor in c.layers)
    assert held <= num_slots * token_items_of([layer.shape for layer in model.calibration.layers])
    for kv in kvs:
        pool.release(kv)
    assert pool.num_free == 5 * num_slots


def test_short_sequences_keep_all_tokens(model):
    """Nothing is saved where there are fewer tokens than rows."""
    holding = SideBySide(model)
    kv = holding.new_kv(holding.rows.num_rows)
    assert not isinstance(kv, WindowedKv)
    assert holding.pool.num_free == 1000 - holding.rows.num_rows
    assert isinstance(holding.new_kv(holding.rows.num_rows + 1), WindowedKv)


RANGES = {
    "the oldest": [(0, 50)],
    "behind what models lean on": [(4, 60)],
    "here and there": [(first, first + 2) for first in range(3, 95, 5)],
    "of the window, too": [(10, 40), (103, 105)],
    "nothing before it": [(106, 108)],
}


@pytest.mark.parametrize(
    ("model", "holding", "what"),
    sampled_cases(NAMES, BOTH, list(RANGES), count=27, seed=1),
    indirect=["model", "holding"],
)
def test_a_discard_moves_rows_as_in_kv_that_keeps_all(model, holding, what):
    """Re-embedded, to any row or page of a window, and usable afterwards."""
    ranges, holds_all = RANGES[what], HoldsAll(model)
    kv, whole = holding.new_kv(), model.new_kv(CAPACITY)
    tokens = token_ids(3, 110)
    holding.feed_all(kv, tokens)
    holds_all.feed_all(whole, tokens)
    before = kv.window_from
    assert before > 60
    for each in (kv, whole):
        compact_in_place(each, kept_runs(ranges, 110), model.calibration)
    gone = sum(max(0, min(end, before) - start) for start, end in ranges)
    assert (kv.num_tokens, kv.window_from) == (whole.num_tokens, before - gone)
    for layer_index in range(len(model.calibration.layers)):
        first = kv.keys.first_token(layer_index)
        assert first == (kv.window_from if layer_index in holding.windows.layers else 0)
        ours, theirs = (components_of(each, layer_index, first) for each in (kv, whole))
        for held, all_of_it in zip(ours, theirs, strict=True):
            torch.testing.assert_close(held, all_of_it, rtol=1e-5, atol=3e-6)
    if kv.window_from <= kv.num_tokens - holding.rows.window:
        new = token_ids(4, 9)
        logits, expected = holding.feed(kv, new), holds_all.feed(whole, new)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "source_kind", "target_kind"),
    sampled_cases(NAMES, list(KINDS), list(KINDS), count=27, seed=2),
    indirect=["model"],
)
def test_a_copy_has_the_tokens_that_both_keep(model, source_kind, target_kind):
    """Of a prefix with which another session continues."""
    given, taken, rows = (
        KINDS[source_kind](model),
        KINDS[target_kind](model),
        SideBySide(model).rows,
    )
    source, target, whole = given.new_kv(), taken.new_kv(), model.new_kv(CAPACITY)
    tokens = token_ids(5, 80)
    given.feed_all(source, tokens)
    HoldsAll(model).feed_all(whole, tokens)
    num_common = source.window_from + rows.window + 1 if source.window_from else 70
    target.num_tokens = num_common
    target.begin_at(rows.first_held(source.window_from, num_common, STEP))
    for layer_index in range(len(model.calibration.layers)):
        copy_layer(source, target, layer_index, num_common)
    whole.num_tokens = num_common
    for new in (token_ids(6, STEP), token_ids(7, 1)):
        logits, expected = taken.feed(target, new), HoldsAll(model).feed(whole, new)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "kind", "needs"),
    sampled_cases(NAMES, BOTH, ["window", "accumulated"], count=18, seed=3),
    indirect=["model"],
)
def test_scores_equal_those_of_kv_that_keeps_all(model, kind, needs):
    """Queries that waited for the prompt's last ones see as many keys."""
    tokens, scores = token_ids(8, 90), []
    for held in (kind(model, spare_tokens=11), HoldsAll(model)):
        kv, keeper = held.new_kv(), ScoreKeeper(needs, 11, 90)
        for size in [*[STEP] * 5, 7, 2, 1]:
            held.feed(kv, tokens[kv.num_tokens : kv.num_tokens + size], scores=keeper)
            keeper.commit()
        scores.append(torch.tensor(keeper.scores()))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_freed_rows_are_not_read(model, holding):
    """A bug fails here, and not in an answer."""
    kv = holding.new_kv()
    kv.begin_at(30)
    kv.num_tokens = 40
    windowed = min(holding.windows.layers)
    kv.keys.read(min(set(range(len(model.calibration.layers))) - holding.windows.layers), 0, 40)
    kv.keys.read(windowed, 30, 10)
    with pytest.raises(AssertionError, match="token 29"):
        kv.keys.read(windowed, 29, 10)


def test_kernels_cannot_use_rows(model):
    """They need one place for all layers."""
    holding = SideBySide(model)
    kv, windowed = holding.new_kv(), min(holding.windows.layers)
    with pytest.raises(AssertionError, match="kernel"):
        kv.values.region(windowed)
    with pytest.raises(AssertionError, match="kernel"):
        kv.values.slot_index(windowed, 30, 1)


def test_models_without_windows_keep_all_tokens(tiny):
    """No layer has one, or their KV is stored as a whole."""
    for name, has_windows in (("llama", True), ("gemma3", False), ("mistral", False)):
        calibration = tiny(name, has_windows=has_windows).calibration
        shapes = [layer.shape for layer in calibration.layers]
        layout, steps = calibration.layout, {"step_tokens": STEP, "scored_tokens": STEP}
        assert HeldWindows.of(layout, shapes, **steps) is None
