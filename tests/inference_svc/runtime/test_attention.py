"""Attention paths agree with the textbook formula."""

import math

import pytest
import torch

from inference_svc.runtime.attention import AttentionOptions, attend, attend_one, visible_mask

HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 8, 23


def textbook(query, keys, values, options, window):
    """Compute row by row, head by head."""
    num_tokens = query.shape[2]
    answer = torch.empty(1, HEADS, num_tokens, DIM)
    for head in range(HEADS):
        for row in range(num_tokens):
            end = LENGTH - num_tokens + row + 1
            begin = 0 if window is None else max(0, end - window)
            key = keys[0, head // (HEADS // KV_HEADS), begin:end]
            scores = key @ query[0, head, row] * (options.scale or DIM**-0.5)
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            weights = scores.exp()
            total = weights.sum()
            if options.sinks is not None:
                total += math.exp(options.sinks[head])
            value = values[0, head // (HEADS // KV_HEADS), begin:end]
            answer[0, head, row] = (weights / total) @ value
    return answer


def tensors(num_tokens):
    generator = torch.Generator().manual_seed(3)
    shapes = ((HEADS, num_tokens), (KV_HEADS, LENGTH), (KV_HEADS, LENGTH))
    return [torch.randn(1, *shape, DIM, generator=generator) for shape in shapes]


@pytest.mark.parametrize("num_tokens", [1, 5, LENGTH])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(scale=0.3),
        AttentionOptions(softcap=1.5),
        AttentionOptions(sinks=torch.linspace(-1, 2, HEADS)),
    ],
    ids=["plain", "scaled", "softcap", "sinks"],
)
def test_prefill_equals_the_formula(num_tokens, window, options):
    """Every combination of history, window, scale, softcap and sinks."""
    query, keys, values = tensors(num_tokens)
    mask = visible_mask(num_tokens, LENGTH, window, query.device)
    attended = attend(query, keys, values, options, mask)
    torch.testing.assert_close(attended, textbook(query, keys, values, options, window))


def test_no_mask_is_causal():
    """Without history no mask is needed."""
    query, keys, values = tensors(LENGTH)
    attended = attend(query, keys, values, AttentionOptions(), None)
    torch.testing.assert_close(attended, textbook(query, keys, values, AttentionOptions(), None))


def test_one_token_with_grouped_heads():
    """Decode with heads as rows is the same attention."""
    query, keys, values = tensors(1)
    grouped = query.view(1, KV_HEADS, HEADS // KV_HEADS, DIM)
    attended = attend_one(grouped, keys, values, None).view(1, HEADS, 1, DIM)
    torch.testing.assert_close(attended, textbook(query, keys, values, AttentionOptions(), None))
