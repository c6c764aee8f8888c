"""The kernel over pages, run by Triton's interpreter, equals plain attention.

The interpreter computes float16 and float32; bfloat16 is compiled (test_compiled_kernels.py).
"""

import pytest
import torch

from inference_svc.runtime.attention.paged_attention import PageCall
from inference_svc.runtime.cuda import page_attention
from inference_svc.runtime.cuda.page_attention import (
    TileShape,
    num_part_splits,
    shape_of_part,
    tile_shape,
)
from tests.pages import PARTS, Pages

CLOSE = {torch.float32: 5e-6, torch.float16: 4e-3}


@pytest.mark.parametrize(
    ("shape", "page_tokens", "dtype", "options"),
    [
        pytest.param((8, 2, 64, 64), 16, torch.float32, {}, marks=pytest.mark.long),
        pytest.param((8, 8, 16, 16), 16, torch.float16, {}, marks=pytest.mark.long),
        pytest.param(  # tests/gpu has a case with sinks for every run
            *((4, 2, 8, 8), 5, torch.float32, {"sinks": torch.linspace(-2, 3, 4)}),
            marks=pytest.mark.long,
        ),
        ((6, 2, 48, 32), 16, torch.float32, {"softcap": 5.0, "window": 100}),
        ((6, 2, 16, 80), 256, torch.float32, {"window": 300, "sinks": torch.linspace(-1, 9, 6)}),
        ((4, 4, 80, 80), 32, torch.float32, {"chunk": 33}),
        ((5, 1, 16, 16), 16, torch.float16, {"window": 9}),
        pytest.param((71, 1, 16, 16), 16, torch.float16, {"window": 9}, marks=pytest.mark.long),
    ],
)
def test_each_part_sees_its_own_tokens(shape, page_tokens, dtype, options):
    """With any lengths beside each other, and every kind of call."""
    pages = Pages(PARTS, shape, page_tokens, dtype)
    call = PageCall(shape[2] ** -0.5, **options)
    attended = pages.attended(call)
    assert attended.dtype == dtype
    assert attended.shape == (sum(size for size, _ in PARTS), shape[0], shape[3])
    for part, piece in enumerate(attended.split([size for size, _ in PARTS])):
        expected = pages.expected(part, call)
        assert (piece - expected).abs().max() < CLOSE[dtype], PARTS[part]


def test_pages_before_the_window_are_not_read():
    """Whatever page the tables name there: it belongs to others now."""
    pages = Pages(PARTS, (4, 2, 16, 16), 16, torch.float32)
    call = PageCall(0.25, window=40)
    expected = pages.attended(call)
    nobodys = min(set(range(len(pages.keys) // 16)).difference(*pages.tables))  # NaN
    num_hidden = 0
    for table, (num_new, length) in zip(pages.tables, pages.parts, strict=True):
        hidden = max(0, length - num_new - 39) // 16
        table[:hidden] = [nobodys] * hidden
        num_hidden += hidden
    assert num_hidden > 10
    assert torch.equal(pages.attended(call), expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all", marks=pytest.mark.long),
        pytest.param({"window": 300, "sinks": torch.linspace(-1, 2, 4)}, id="window"),
    ],
)
def test_a_result_is_the_same_alone_and_in_a_batch(options):
    """To the bit: tiles and splits do not depend on other parts."""
    pages = Pages(PARTS, (4, 2, 16, 16), 16, torch.float32)
    call = PageCall(0.25, **options)
    together = pages.attended(call).split([size for size, _ in PARTS])
    for part in range(len(PARTS)):
        assert torch.equal(pages.attended(call, [part]), together[part])


def test_a_query_may_have_any_strides():
    """As models return it."""
    pages = Pages([(3, 20), (1, 9)], (4, 2, 16, 16), 16, torch.float32)
    call = PageCall(0.25)
    expected = pages.attended(call)
    pages.query = pages.query.transpose(0, 2).contiguous().transpose(0, 2)
    assert pages.query.stride(2) != 1
    assert torch.equal(pages.attended(call), expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all", marks=pytest.mark.long),
        pytest.param({"window": 30, "sinks": torch.tensor([-1.0, 2.0])}, id="window"),
        pytest.param({"chunk": 33}, id="chunk", marks=pytest.mark.long),
    ],
)
def test_parts_of_few_tokens_are_divided_too(monkeypatch, options):
    """In splits, some of whose rows see nothing, merged for as many tiles as fit."""
    monkeypatch.setattr(page_attention, "FEWEST_SPLIT_TOKENS", 16)
    monkeypatch.setattr(page_attention, "PART_PROGRAMS", 8)
    parts = [(66, 130), (5, 5), (2, 70)]
    pages = Pages(parts, (2, 1, 16, 16), 16, torch.float32)
    call = PageCall(0.25, **options)
    together = pages.attended(call).split([size for size, _ in parts])
    monkeypatch.setattr(page_attention, "FOUND_BYTES", 1)
    for part, piece in enumerate(together):
        assert (piece - pages.expected(part, call)).abs().max() < CLOSE[torch.float32], parts[part]
        assert torch.equal(pages.attended(call, [part]), piece), parts[part]


@pytest.mark.parametrize(
    ("num_programs", "seen", "num_splits"),
    [(64, 16384, 4), (512, 1 << 20, 1), (8, 16384, 32), (8, 4096, 8), (8, 1023, 1), (130, 4096, 2)],
)
def test_the_splits_of_a_part_fill_a_gpu(num_programs, seen, num_splits):
    """Each has at least 512 tokens."""
    assert num_part_splits(num_programs, seen) == num_splits


@pytest.mark.parametrize(
    ("group", "dim", "value_dim", "item_bytes", "wide", "narrow"),
    [
        (4, 64, 64, 2, (128, 64, 8, 3), (128, 64, 8, 3)),
        (4, 128, 128, 2, (128, 64, 8, 3), (128, 32, 8, 3)),
        (4, 256, 256, 2, (128, 32, 8, 2), (64, 32, 8, 2)),
        (4, 512, 512, 2, (64, 16, 8, 2), (64, 16, 8, 2)),
        (1, 192, 128, 2, (128, 32, 8, 2), (64, 32, 8, 2)),  # 192 elements are padded to 256
        (8, 80, 80, 4, (32, 32, 8, 2), (32, 32, 8, 2)),
        (4, 64, 64, 4, (32, 64, 8, 2), (32, 64, 8, 2)),
        (4, 192, 64, 4, (16, 16, 8, 2), (16, 16, 8, 2)),
        (1, 8, 4, 4, (32, 64, 4, 2), (32, 64, 4, 2)),  # a product has at least 16 columns
        (130, 64, 64, 2, (256, 64, 8, 3), (256, 64, 8, 3)),  # a whole group's heads
    ],
)
def test_tiles_are_as_large_as_registers_allow(group, dim, value_dim, item_bytes, wide, narrow):
    """Fewer rows in float32, fewer keys of wide heads, more warps for what is wide."""
    for is_wide, shape in ((True, wide), (False, narrow)):
        assert tile_shape(group, dim, value_dim, item_bytes, is_wide=is_wide) == TileShape(*shape)


@pytest.mark.parametrize(
    ("rows", "group", "num_new", "halved"),
    [(128, 4, 16, True), (128, 4, 17, False), (128, 71, 2, False), (64, 4, 2, False)],
)
def test_few_new_tokens_take_half_a_tile(rows, group, num_new, halved):
    """If it holds them all; a warp group multiplies 64 rows."""
    shape = TileShape(rows, 64, 8, 3)
    expected = TileShape(rows // 2, 64, 4, 3) if halved else shape
    assert shape_of_part(shape, group, num_new) == expected
