"""Pooling a sequence that comes in pieces, some of them repeatedly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.runtime.compute.pooler import Pooler
from inference_svc.runtime.model.pooling import Pooling, PoolingMode

WIDTH = 5


def plain(mode, states):
    """Compute the formula over all states at once, [tokens, WIDTH]."""
    if mode is PoolingMode.LAST:
        return states[-1]
    weights = torch.ones(len(states))
    if mode is PoolingMode.WEIGHTED_MEAN:
        weights = torch.arange(1, len(states) + 1).float()
    return (states * weights[:, None]).sum(0) / weights.sum()


@given(
    st.sampled_from(PoolingMode),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.data(),
)
def test_pieces_give_the_result_of_the_whole(mode, sizes, data):
    """Failed steps, and tokens recomputed after a preemption, count once."""
    total = sum(sizes)
    states = torch.randn(total, WIDTH, generator=torch.Generator().manual_seed(total))
    pooler, start = Pooler(Pooling(mode), total), 0
    for size in sizes:
        end = start + size
        for _ in range(data.draw(st.integers(0, 2), "steps that fail")):
            rows = pooler.num_rows(start, end)
            pooler.note(torch.full((rows, WIDTH), 1e6), end)
        first = data.draw(st.integers(0, start), "computed again from")
        rows = pooler.num_rows(first, end)
        pooler.note(states[end - rows : end], end)
        assert not pooler.is_complete
        pooler.commit()
        pooler.commit()  # no state was noted since
        start = end
    assert pooler.is_complete
    torch.testing.assert_close(pooler.vector(), plain(mode, states), rtol=1e-4, atol=1e-5)


def test_only_relevant_rows_are_requested():
    last, mean = (Pooler(Pooling(mode), 10) for mode in (PoolingMode.LAST, PoolingMode.MEAN))
    assert (last.num_rows(0, 9), last.num_rows(9, 10)) == (0, 1)
    assert (mean.num_rows(0, 9), mean.num_rows(9, 10)) == (9, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_in_float32(dtype):
    """In 16 bits 4,000 ones would add up to 256, or 2,048."""
    pooler = Pooler(Pooling(PoolingMode.MEAN), 4000)
    pooler.note(torch.ones(4000, 1, dtype=dtype), 4000)
    pooler.commit()
    assert pooler.vector().item() == 1.0
