"""Where a layer's keys before RoPE are found."""

import pytest
import torch

from inference_svc.runtime.positions.recipes import KeySource


@pytest.mark.parametrize("seq_dim", [1, 2])
@pytest.mark.parametrize(
    ("dim", "first", "width"),
    [(6, 0, 6), (6, 0, 4), (3, 0, 3), (9, 0, 2), (6, 2, 4), (9, 7, 2), (9, 3, 2)],
)
def test_the_unrotated_part_comes_from_the_cache(seq_dim, dim, first, width):
    """The rest comes from the apply call's argument, in any order of dimensions."""
    tokens, heads = 5, 2
    whole = torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(3))
    argument = whole[..., first : first + width]
    seen = argument.transpose(0, 1) if seq_dim == 2 else argument
    calls = [((None,), None), ((None, seen[None]), None)]
    cached = whole.transpose(0, 1)[None].clone()
    cached[..., first : first + width] = 7.0
    found = KeySource(1, 1, seq_dim, first, width).before_rope(calls, cached)
    assert torch.equal(found, whole)
