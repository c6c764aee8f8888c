"""Attention over pages: tables of a step, and the results of the portable back-end."""

import pytest
import torch

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.attention.attention import Part, TorchAttention, TorchStepAttention
from inference_svc.runtime.attention.paged_attention import PageCall, PagedAttention, PageStep
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.cuda.page_attention import attend_pages
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.kv.page_pool import PagePool
from tests.pages import placed_step

HEADS, KV_HEADS, DIM, PAGE_TOKENS = 4, 2, 8, 4
SHAPES = [LayerShape((KV_HEADS, DIM), (KV_HEADS, DIM)), LayerShape((1, 16), (1, 24))]
CPU = torch.device("cpu")
OPTIONS = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scale=0.3),
    "window": AttentionOptions(window=5),
    "chunk": AttentionOptions(chunk=8),
    "softcap": AttentionOptions(softcap=1.5),
    "sinks": AttentionOptions(sinks=torch.linspace(-1, 2, HEADS), window=9),
}


def fill_randomly(pool, kv, num_past, num_tokens):
    """Fill KV with random rows, and return it as a part."""
    for tokens in (kv.keys, kv.values):
        for layer_index in range(len(SHAPES)):
            with tokens.filling(layer_index, 0, num_past + num_tokens) as rows:
                rows.copy_(torch.randn(rows.shape))
    kv.num_tokens = num_past
    return Part(kv, num_tokens)


def paged_parts():
    """Make parts on scattered pages."""
    torch.manual_seed(5)
    pool = PagePool(SHAPES, PagedSlots(30, PAGE_TOKENS), 1, device=CPU, dtype=torch.float32)
    return [
        fill_randomly(pool, pool.new_kv(17, [8, 2, 3, 20, 19]), 16, 1),
        fill_randomly(pool, pool.new_kv(6, [0, 11]), 0, 6),
        fill_randomly(pool, pool.new_kv(12, [5, 4, 7]), 8, 4),
        fill_randomly(pool, pool.new_kv(3, [29]), 2, 1),
    ]


def step_of(*parts, page_tokens=16):
    """Return the pages, new tokens and length of parts."""
    return placed_step(
        [(torch.tensor(pages, dtype=torch.int32), *sizes) for pages, *sizes in parts],
        page_tokens,
        CPU,
    )


def test_a_step_has_pages_tokens_and_lengths():
    """In one table; shorter rows are padded."""
    step = step_of(([8, 2, 3], 1, 11), ([0], 4, 4), ([5, 6], 2, 7), page_tokens=4)
    assert step.starts.tolist() == [0, 1, 5, 7]
    assert step.lengths.tolist() == [11, 4, 7]
    assert [row[:count] for row, count in zip(step.tables.tolist(), (3, 1, 2), strict=True)] == [
        [8, 2, 3],
        [0],
        [5, 6],
    ]
    assert (step.most_length, step.page_tokens) == (11, 4)
    assert step.tables.dtype == torch.int32


def test_tokens_are_divided_into_tiles_by_part():
    """A tile is of one part; parts of one token are not among them."""
    step = step_of(([0], 1, 3), ([1], 5, 5), ([2], 2, 9), ([3], 1, 1))
    assert step.tiles(2).tolist() == [[1, 0], [1, 2], [1, 4], [2, 0]]
    assert step.tiles(8).tolist() == [[1, 0], [2, 0]]
    assert step.single_tokens().tolist() == [[0, 0], [3, 0]]
    assert step_of(([0], 1, 3)).tiles(8) is None
    assert step_of(([0], 2, 3)).single_tokens() is None


def test_a_step_of_single_tokens_reads_its_tensors_when_it_runs():
    """New contents make another step; it may reach farther than its parts."""
    first = step_of(([8, 2], 1, 6), ([5], 1, 3), page_tokens=4)
    tables, lengths = torch.zeros(2, 6, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    step = PageStep.of_single_tokens(tables, lengths, most_length=24, page_tokens=4)
    assert step.tiles(8) is None
    assert torch.equal(step.single_tokens(), first.single_tokens())
    assert torch.equal(step.starts, first.starts)
    tables[:, :2], lengths[:] = first.tables, first.lengths
    torch.manual_seed(5)
    keys, values, query = (torch.randn(48, KV_HEADS, DIM) for _ in range(3))
    calls = [(query[:2], keys, values, each, PageCall(0.3)) for each in (first, step)]
    assert torch.equal(*(attend_pages(*call) for call in calls))


@pytest.mark.parametrize("name", OPTIONS)
def test_results_equal_the_portable_back_end(name):
    """Over the same pages, in every layer, with every kind of call."""
    parts = paged_parts()
    parts += [Part(parts[1].kv, 2, 4), Part(parts[2].kv, 1, 3)]  # the last tokens alone
    step, portable = PagedAttention(attend_pages).prepare(parts), TorchAttention().prepare(parts)
    for layer_index, shape in enumerate(SHAPES):
        num_tokens = sum(part.num_tokens for part in parts)
        query = torch.randn(1, num_tokens, HEADS, shape.key[1]).transpose(1, 2)
        expected = portable.attend(query, layer_index, OPTIONS[name])
        attended = step.attend(query, layer_index, OPTIONS[name])
        assert attended.is_contiguous()
        torch.testing.assert_close(attended, expected)


def test_kv_without_pages_uses_the_portable_back_end():
    """As in calibration, whose sequences have their own memory."""
    pool = KVPool(SHAPES, 50, device=CPU, dtype=torch.float32)
    part = fill_randomly(pool, pool.new_kv(9), 8, 1)
    assert isinstance(PagedAttention(attend_pages).prepare([part]), TorchStepAttention)
