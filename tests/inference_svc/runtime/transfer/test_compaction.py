"""Tokens compacted in place equal those that a load would embed at their new positions."""

import dataclasses

import pytest
import torch

from inference_svc.core.ranges import kept_runs, num_in
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.positions.recipes import PostRotary
from inference_svc.runtime.transfer import compaction
from inference_svc.runtime.transfer.compaction import (
    MOST_GAP,
    Compaction,
    Compactor,
    _pieces,
    can_compact,
    compact_in_place,
    num_left,
)
from inference_svc.runtime.worker_thread import WorkerThread
from tests.sampled import sampled_cases

NUM_TOKENS = 120
TOKENS = [3 + index * 7 % 90 for index in range(NUM_TOKENS)]
SCATTERED = tuple((first, first + 1) for first in range(5, 110, 3))
RANGES = {
    "the oldest half": ((0, 60),),
    "behind the first four": ((4, 64),),
    "some here and there": SCATTERED,
    "a few runs": ((1, 2), (10, 40), (41, 90), (119, 120)),
    "the newest": ((100, 120),),
    "all but the last": ((0, 119),),
    "none": (),
}
MODELS = [
    "llama",  # halves
    "llama3",  # scaled
    "gpt-neox",  # partial
    "cohere",  # interleaved
    "gemma3",  # two rotary embeddings
    "smollm3",  # layers without positions
    "llama-yarn",  # attention scaling
    "deepseek-v3",  # MLA
    "deepseek-v32",  # and index keys
    "hunyuan",  # a norm with weights behind RoPE
    "llama4",  # one without, and layers without positions
]


def compute_kv(model):
    """Compute a sequence's KV after RoPE, and a buffer with the rows before it."""
    kv, buffer = model.new_kv(NUM_TOKENS + 30), model.new_buffer(NUM_TOKENS)
    model.runner.step([Chunk(kv, TOKENS, False, buffer)])
    return kv, buffer


def kept_rows(rows, ranges):
    """Return the remaining rows of [tokens, heads, dim]."""
    return torch.cat([rows[start:end] for start, end in kept_runs(ranges, NUM_TOKENS)])


def rows_of_load(model, buffer, ranges):
    """Return for each layer the rows that a load would make of the remaining ones."""
    return [
        [
            recipe.embed(kept_rows(rows[layer_index], ranges), 0)
            for recipe, rows in zip(layer.components, buffer.components, strict=True)
        ]
        for layer_index, layer in enumerate(model.calibration.layers)
    ]


def in_kv(kv, layer_index):
    """Return the sequence KV's used rows, component by component, [tokens, heads, dim]."""
    return [rows[layer_index][0, :, : kv.num_tokens].transpose(0, 1) for rows in kv.components]


@pytest.mark.parametrize(("name", "what"), sampled_cases(MODELS, list(RANGES), count=20, seed=1))
def test_compacted_rows_equal_those_of_a_load(tiny, name, what):
    """Up to the last bit: keys are unrotated first."""
    model, ranges = tiny(name), RANGES[what]
    kv, buffer = compute_kv(model)
    expected = rows_of_load(model, buffer, ranges)
    compact_in_place(kv, kept_runs(ranges, NUM_TOKENS), model.calibration)
    assert kv.num_tokens == NUM_TOKENS - num_in(ranges)
    for layer_index, components in enumerate(expected):
        for compacted, rows in zip(in_kv(kv, layer_index), components, strict=True):
            torch.testing.assert_close(compacted, rows, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("piece_rows", [1, 7, 16, 1000])
def test_the_result_does_not_depend_on_the_pieces(tiny, monkeypatch, piece_rows):
    """A piece never reads rows that an earlier one has overwritten."""
    model = tiny("llama")
    heads, dim = model.calibration.layers[0].shape.key
    for ranges in RANGES.values():
        kv, buffer = compute_kv(model)
        expected = rows_of_load(model, buffer, ranges)
        monkeypatch.setattr(compaction, "PIECE_ITEMS", piece_rows * heads * dim)
        compact_in_place(kv, kept_runs(ranges, NUM_TOKENS), model.calibration)
        for layer_index, (keys, values) in enumerate(expected):
            compacted_keys, compacted_values = in_kv(kv, layer_index)
            torch.testing.assert_close(compacted_keys, keys, rtol=1e-5, atol=3e-6)
            assert torch.equal(compacted_values, values)


def test_rows_in_bfloat16_are_rounded_once(tiny):
    """Not to pre-RoPE keys in between: as near to the exact key as the dtype allows."""
    model = tiny("llama", torch.bfloat16)
    kv, _ = compute_kv(model)
    ranges = RANGES["some here and there"]
    rotary = model.calibration.layers[0].key.rotary
    before = in_kv(kv, 0)[0].float()
    free = torch.empty_like(before)
    rotary.unrotate_into(before, 0, free)
    exact = kept_rows(free, ranges)
    wide = torch.empty_like(exact)
    rotary.with_dtypes(torch.bfloat16, torch.float32).rotate_into(exact, 0, wide)
    compact_in_place(kv, kept_runs(ranges, NUM_TOKENS), model.calibration)
    torch.testing.assert_close(in_kv(kv, 0)[0], wide.bfloat16(), rtol=0.008, atol=1e-6)


def test_answers_continue_equally_behind_compacted_and_loaded_rows(tiny):
    """What attends to them attends to the same."""
    model = tiny("llama")
    ranges = RANGES["behind the first four"]
    kv, buffer = compute_kv(model)
    other = model.new_kv(NUM_TOKENS)
    for layer_index, (keys, values) in enumerate(rows_of_load(model, buffer, ranges)):
        other.keys[layer_index][0, :, : len(keys)] = keys.transpose(0, 1)
        other.values[layer_index][0, :, : len(values)] = values.transpose(0, 1)
    other.num_tokens = NUM_TOKENS - num_in(ranges)
    compact_in_place(kv, kept_runs(ranges, NUM_TOKENS), model.calibration)
    logits = model.runner.step([Chunk(kv, [5, 6, 7], True), Chunk(other, [5, 6, 7], True)])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_coupled_rows_do_not_move(tiny):
    """Only those before the first dropped one are valid."""
    model = tiny("llama")
    coupled = dataclasses.replace(model.calibration, positions="coupled")
    kv, _ = compute_kv(model)
    before = in_kv(kv, 0)[0].clone()
    kept = kept_runs(((50, 60),), NUM_TOKENS)
    assert num_left(kept, coupled) == 50
    compact_in_place(kv, kept, coupled)
    assert kv.num_tokens == 50
    assert torch.equal(in_kv(kv, 0)[0], before[:50])
    compact_in_place(kv, kept_runs(((0, 1),), 50), coupled)
    assert kv.num_tokens == 0


def test_naive_rows_move_unchanged(tiny):
    """With the embedding of their old positions."""
    model = tiny("llama")
    naive = dataclasses.replace(model.calibration, positions="naive")
    kv, _ = compute_kv(model)
    before = in_kv(kv, 1)[0].clone()
    ranges = RANGES["some here and there"]
    compact_in_place(kv, kept_runs(ranges, NUM_TOKENS), naive)
    assert torch.equal(in_kv(kv, 1)[0], kept_rows(before, ranges))


async def test_rows_that_cannot_be_re_embedded_are_dropped(tiny):
    """A norm behind RoPE cannot be inverted: no row is kept, and the KV does not change."""
    model = tiny("llama")
    first, *others = model.calibration.layers
    normed = dataclasses.replace(first.key, post=PostRotary(torch.nn.LayerNorm(8)))
    layers = (dataclasses.replace(first, key=normed), *others)
    calibration = dataclasses.replace(model.calibration, layers=layers)
    assert can_compact(model.calibration)
    assert not can_compact(calibration)
    assert can_compact(dataclasses.replace(calibration, positions="coupled")), "nothing moves"
    kv, _ = compute_kv(model)
    thread = WorkerThread("compact")
    try:
        assert await Compactor(calibration, thread).compact(kv, [(0, 5)]) == 0
        assert kv.num_tokens == NUM_TOKENS
        assert await Compactor(model.calibration, thread).compact(kv, [(7, 12)]) == 5
    finally:
        thread.close()


@pytest.mark.parametrize("max_tokens", [3, 100])
def test_tokens_in_their_places_are_not_touched(max_tokens):
    """Moving them would cost time, and keys their last bit."""
    kept = [(0, 10), (12, 15)]
    (piece,) = _pieces(kept, max_tokens, torch.device("cpu"))
    assert piece[:4] == (12, 3, 10, 3)
    assert piece.chosen is None
    assert not list(_pieces(kept[:1], max_tokens, torch.device("cpu")))


@pytest.mark.parametrize(
    ("kept", "max_tokens", "expected"),
    [
        ([(0, 2), (4, 6), (8, 10)], 6, [(4, 6, 2, 4)]),
        ([(0, 2), (4, 6), (9, 11)], 6, [(4, 2, 2, 2), (9, 2, 4, 2)]),
        ([(0, 2), (4, 6), (8, 10), (11, 12)], 6, [(4, 6, 2, 4), (11, 1, 6, 1)]),
        ([(0, 1), (2, 3), (3 + MOST_GAP, 4 + MOST_GAP)], 1000, [(2, MOST_GAP + 2, 1, 2)]),
        (
            [(0, 1), (2, 3), (4 + MOST_GAP, 5 + MOST_GAP)],
            1000,
            [(2, 1, 1, 1), (4 + MOST_GAP, 1, 2, 1)],
        ),
    ],
)
def test_runs_move_together_if_they_fit_with_the_gaps(kept, max_tokens, expected):
    """Not across many dropped tokens: these would be moved as well."""
    pieces = list(_pieces(kept, max_tokens, torch.device("cpu")))
    assert [piece[:4] for piece in pieces] == expected
    for piece in pieces:
        chosen = range(piece.num_tokens) if piece.chosen is None else piece.chosen.tolist()
        stays = [token - piece.start for start, end in kept for token in range(start, end)]
        assert list(chosen) == [token for token in stays if 0 <= token < piece.num_tokens]


@pytest.mark.parametrize(("piece_items", "max_tokens"), [(1, 1), (7 * 16 + 3, 7)])
def test_a_piece_has_as_many_elements_as_fit_a_cache(tiny, monkeypatch, piece_items, max_tokens):
    """At least one token."""
    model = tiny("llama")
    assert model.calibration.layers[0].shape.key == (2, 8)
    monkeypatch.setattr(compaction, "PIECE_ITEMS", piece_items)
    kv, _ = compute_kv(model)
    moved = Compaction(kv, [(7, NUM_TOKENS)], model.calibration)
    moved.run()
    assert set(moved._pieces) == {(max_tokens, 0)}
