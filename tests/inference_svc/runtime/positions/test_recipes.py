"""Where a layer's keys are seen before RoPE."""

import pytest
import torch

from inference_svc.runtime.positions.recipes import KeySource


@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize(("dim", "width"), [(6, 6), (6, 4), (3, 3), (9, 2)])
def test_what_is_never_rotated_comes_from_the_cache(seq_dim, dim, width):
    """The rest from the apply call's argument, however its dimensions are ordered."""
    tokens, heads = 5, 2
    whole = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(3))
    argument = whole[..., :width]
    seen = argument.transpose(0, 1) if seq_dim == 2 else argument
    calls = [((None,), None), ((None, seen[None]), None)]
    cached = torch.full((1, heads, tokens, dim), 7.0)
    cached[0, :, :, width:] = whole.transpose(0, 1)[..., width:]
    found = KeySource(1, 1, seq_dim, width).before_rope(calls, cached)
    assert torch.equal(found, whole)
