"""Windows: of layers with windows, only the last tokens are stored, loaded and needed."""

from dataclasses import replace

import pytest
import torch

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.cpu.token_kernel import TokenKernel
from inference_svc.runtime.cuda.key_rotation import embed_on_device
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_groups import HeldWindows, LayerGroups
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.windowed_kv import WindowedKv
from inference_svc.runtime.positions.rotation import BY_TORCH, LoadKernels
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from inference_svc.runtime.transfer.spans import check_spans, check_windows, windows_beside
from shared.types.granted_slots import GrantedWindow
from tests.held_windows import NAMES, token_ids
from tests.sampled import sampled_cases

HISTORY = 40
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def prefill_history(model, history):
    """Compute a history; return its write buffer."""
    kv, buffer = model.new_kv(len(history)), model.new_buffer(len(history))
    model.runner.step([Chunk(kv, history, want_logits=False, write_buffer=buffer)])
    return buffer


def blocks_of(rows, block_tokens):
    firsts = range(0, HISTORY, block_tokens)
    order = range(len(firsts))[::-1]
    return [
        rows(slot, first, min(block_tokens, HISTORY - first))
        for slot, first in zip(order, firsts, strict=True)
    ]


def load_blocks(model, arena_kv, blocks, windows, pool, kernels=BY_TORCH):
    """Load blocks into KV whose slots are NaN."""
    pages = range(pool.num_pages)[::-1] if isinstance(pool, PagePool) else ()
    kv = pool.new_kv(96, pages)
    for component in kv.components:
        for layer in component.slots.layers if pages else component.layers:
            layer.fill_(float("nan"))
    kv.begin_at(windows[0].token_offset)
    loader = LayerLoader(kv, arena_kv, blocks, model.calibration, kernels=kernels, windows=windows)
    for layer_index in range(len(model.calibration.layers)):
        loader.load(layer_index)
    kv.num_tokens = check_spans(kv, blocks, model.calibration.layout)
    return kv


def holding_pool(model, page_tokens=None):
    """Make a pool whose sequences keep the last tokens only, with loaded ones."""
    layers, layout = model.calibration.layers, model.calibration.layout
    shapes = [layer.shape for layer in layers]
    held = HeldWindows.of(layout, shapes, step_tokens=20, scored_tokens=32)
    options = {"device": model.loaded.device, "dtype": model.loaded.dtype}
    if page_tokens is not None:
        windows = held._replace(rows=replace(held.rows, spare_tokens=layout.block_tokens))
        groups = LayerGroups.of(windows, shapes, page_tokens)
        num_pages = groups.pages.num_pages(96 // page_tokens)
        slots = PagedSlots(num_pages, page_tokens, groups.pages)
        return PagePool(shapes, slots, 1, groups=groups, **options)
    rows = replace(held.rows, spare_tokens=HISTORY - held.rows.window)
    return KVPool(shapes, 96, windows=held._replace(rows=rows), **options)


HELD = [
    ("all", "torch"),
    ("the last", "torch"),
    ("the last", "cpp"),
    ("the last on pages", "torch"),
    ("the last on pages", "cpp"),
    ("the last on pages", "triton"),
]


@pytest.mark.parametrize(
    ("name", "held", "positions"),
    sampled_cases(NAMES, HELD, ["decoupled", "coupled"], count=27, seed=1),
)
def test_rows_before_a_window_are_never_read(tiny, make_arena, rows, name, held, positions):
    """They are NaN, and new tokens have the stock model's logits."""
    holds, by = held
    model = tiny(name, positions=positions, has_windows=True)
    layout = model.calibration.layout
    assert 0 < layout.window < HISTORY
    history, new = token_ids(1, HISTORY), token_ids(2, 21)
    blocks = blocks_of(rows, layout.block_tokens)
    num_blocks = len(blocks)
    windows = windows_beside(blocks, layout, num_blocks)
    _, arena_kv = make_arena(layout, num_blocks * (1 + layout.window_slots))
    store_blocks(
        prefill_history(model, history), arena_kv, blocks, model.calibration, windows=windows
    )
    assert check_windows(windows, HISTORY, layout) == windows[0].token_offset

    is_on_pages = holds == "the last on pages"
    pool = model.pool if holds == "all" else holding_pool(model, 8 if is_on_pages else None)
    kernels = {
        "torch": BY_TORCH,
        "cpp": LoadKernels(load=TokenKernel.load()),
        "triton": LoadKernels(embed=embed_on_device),
    }
    kv = load_blocks(model, arena_kv, blocks, windows, pool, kernels[by])
    assert isinstance(kv, WindowedKv) == (holds == "the last")
    assert isinstance(kv, PagedKv) == is_on_pages
    logits = [model.runner.step([Chunk(kv, new[:20], want_logits=True)])[0]]
    kv.keep_from(HISTORY)
    logits.append(model.runner.step([Chunk(kv, new[20:], want_logits=True)])[0])

    expected = model.stock_logits([*history, *new])[[-2, -1]]
    torch.testing.assert_close(torch.stack(logits), expected, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_s_slots_have_its_rows_and_zeros(tiny, make_arena, rows, name):
    """Whole slots are stored: no old contents are left in them."""
    model = tiny(name, has_windows=True)
    layout = model.calibration.layout
    blocks = blocks_of(rows, layout.block_tokens)
    windows = windows_beside(blocks, layout, len(blocks))
    arena, arena_kv = make_arena(layout, len(blocks) * (1 + layout.window_slots))
    arena.memory[:] = b"\xee" * len(arena.memory)
    buffer = prefill_history(model, token_ids(3, HISTORY))
    store_blocks(buffer, arena_kv, [], model.calibration, windows=windows)
    for window in windows:
        for layers, slot_id in zip(layout.window_parts, window.slot_ids, strict=True):
            expected = bytearray(layout.block_bytes)
            for layer_index in layers:
                for index, component in enumerate(layout.layers[layer_index].components):
                    first = window.token_offset
                    places = buffer.places(first, window.num_tokens)
                    tokens = places.read(buffer.components[index][layer_index])
                    begin = layout.component_offset(layer_index, index)
                    end = begin + window.num_tokens * component.token_bytes
                    expected[begin:end] = tokens.contiguous().view(torch.uint8).numpy().tobytes()
            assert arena.slot(slot_id) == bytes(expected)
    written = {slot_id for window in windows for slot_id in window.slot_ids}
    for slot_id in set(range(arena.num_slots)) - written:
        assert arena.slot(slot_id) == b"\xee" * arena.slot_bytes


def test_invalid_windows_are_refused(tiny):
    """Gaps, too few tokens or too many, rows beyond a slot, another number of parts."""
    layout = tiny("gemma3", has_windows=True).calibration.layout
    size, slots = layout.block_tokens, (0,) * layout.window_slots

    def window(token_offset, num_tokens=size, start=0, slot_ids=slots):
        return GrantedWindow(token_offset, num_tokens, start, slot_ids, (0,) * len(slot_ids))

    end = 2 * size + layout.window // 2
    right = [window(size), window(2 * size, layout.window // 2)]
    assert check_windows(right, end, layout) == size
    for wrong in (
        [],
        right[:1],
        right[::-1],
        [window(size), window(2 * size + 1, layout.window // 2 - 1)],
        [window(size, start=1), right[1]],
        [window(size, start=-1), right[1]],
        [window(size), window(2 * size, layout.window // 2, slot_ids=(*slots, 0))],
        [window(end - layout.window + 1, layout.window - 1)],
    ):
        with pytest.raises(ValueError, match="window"):
            check_windows(wrong, end, layout)
