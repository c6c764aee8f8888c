"""Every path of attention agrees with the textbook formula."""

import pytest
import torch

from inference_svc.runtime.attention import softmax_attention
from inference_svc.runtime.attention.softmax_attention import (
    TILE_TOKENS,
    AttentionOptions,
    attend,
    attend_one,
)
from tests.sampled import sampled_cases

HEADS, DIM, LENGTH = 6, 8, TILE_TOKENS + 40
OPTIONS = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scale=0.7),
    "softcap": AttentionOptions(softcap=1.5),
    "sinks": AttentionOptions(sinks=torch.linspace(-1, 4, HEADS)),
    "both": AttentionOptions(softcap=2.0, sinks=torch.linspace(-1, 4, HEADS)),
}


def textbook(query, keys, values, options):
    """Compute in float64 with all scores at once."""
    num_tokens, group = query.shape[2], query.shape[1] // keys.shape[1]
    keys, values = (rows[0].double().repeat_interleave(group, 0) for rows in (keys, values))
    scores = query[0].double() @ keys.transpose(1, 2) * (options.scale or DIM**-0.5)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position = torch.arange(LENGTH)
    distance = position[LENGTH - num_tokens :, None] - position
    hidden = (
        distance < 0 if options.window is None else (distance < 0) | (distance >= options.window)
    )
    if options.chunk is not None:
        hidden |= (
            position[LENGTH - num_tokens :, None] // options.chunk != position // options.chunk
        )
    weights = scores.masked_fill(hidden, float("-inf")).exp()
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + options.sinks.double().exp()[:, None, None]
    return (weights / total @ values)[None]


def tensors(num_tokens, kv_heads, value_dim=DIM, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = ((HEADS, num_tokens, DIM), (kv_heads, LENGTH, DIM), (kv_heads, LENGTH, value_dim))
    return [torch.randn(1, *shape, generator=generator).to(dtype) for shape in shapes]


def assert_close(attended, expected):
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "window", "num_tokens", "kv_heads", "value_dim"),
    sampled_cases(
        list(OPTIONS),
        [None, 1, 6, 100, LENGTH + 1],
        [1, 5, TILE_TOKENS + 1, LENGTH],
        [2, HEADS],
        [DIM, DIM + 4],
        count=25,
        seed=1,
    ),
)
def test_attention_equals_the_formula(name, window, num_tokens, kv_heads, value_dim):
    """Every combination of history, tiles, window, scale, softcap, sinks, groups and widths."""
    query, keys, values = tensors(num_tokens, kv_heads, value_dim)
    options = OPTIONS[name]._replace(window=window)
    attended = attend(query, keys, values, options, {})
    assert attended.shape == (1, HEADS, num_tokens, value_dim)
    assert_close(attended, textbook(query, keys, values, options))


@pytest.mark.parametrize(
    ("name", "chunk", "window", "num_tokens"),
    sampled_cases(
        list(OPTIONS),
        [1, 7, 100, TILE_TOKENS + 20, LENGTH, LENGTH + 1],
        [None, 6],
        [1, 5, TILE_TOKENS + 1, LENGTH],
        count=20,
        seed=2,
    ),
)
def test_chunks_equal_the_formula(name, chunk, window, num_tokens):
    """However tiles and chunks overlap."""
    query, keys, values = tensors(num_tokens, 2)
    options = OPTIONS[name]._replace(chunk=chunk, window=window)
    attended = attend(query, keys, values, options, {})
    assert_close(attended, textbook(query, keys, values, options))


@pytest.mark.parametrize("kv_heads", [2, HEADS])
@pytest.mark.parametrize("num_tokens", [1, 5, LENGTH])
@pytest.mark.parametrize("name", ["plain", "sinks"])
def test_bfloat16_equals_the_formula_to_rounding(name, num_tokens, kv_heads):
    """In bfloat16 no path loses more than the rounding of its operands."""
    query, keys, values = tensors(num_tokens, kv_heads, dtype=torch.bfloat16)
    expected = textbook(query, keys, values, OPTIONS[name])
    attended = attend(query, keys, values, OPTIONS[name], {})
    assert attended.dtype == torch.bfloat16
    assert (attended.double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("kv_heads", [2, HEADS])
@pytest.mark.parametrize("name", ["plain", "sinks"])
def test_one_token_with_grouped_heads(name, kv_heads):
    """Decoding with heads as rows is the same attention, bit by bit."""
    query, keys, values = tensors(1, kv_heads)
    grouped = query.view(1, kv_heads, -1, DIM)
    one = attend_one(grouped, keys, values, OPTIONS[name]).reshape(1, HEADS, 1, DIM)
    assert torch.equal(one, attend(query, keys, values, OPTIONS[name], {}))


def test_one_token_of_ungrouped_heads_in_bfloat16():
    """It has the same bits as among other tokens."""
    query, keys, values = (rows.bfloat16() for rows in tensors(1, HEADS))
    options = OPTIONS["plain"]
    one = attend_one(query.view(1, HEADS, 1, DIM), keys, values, options)
    assert torch.equal(one, attend(query, keys, values, options, {}))


def test_the_number_of_scores_in_memory_is_bounded(monkeypatch):
    """Where all scores must be held, long chunks are computed in smaller tiles."""
    monkeypatch.setattr(softmax_attention, "MAX_SCORES", 7 * HEADS * LENGTH)
    query, keys, values = tensors(50, 2)
    attended = attend(query, keys, values, OPTIONS["softcap"], {})
    assert_close(attended, textbook(query, keys, values, OPTIONS["softcap"]))


def test_masks_are_made_once():
    """Layers with the same window share the masks of a step."""
    query, keys, values = tensors(LENGTH, 2)
    masks = {}
    options = AttentionOptions(window=20)
    first = attend(query, keys, values, options, masks)
    made = dict(masks)
    assert made
    assert torch.equal(attend(query, keys, values, options, masks), first)
    assert all(masks[key] is mask for key, mask in made.items())
    assert len(masks) == len(made)
