"""Loads with a kernel that embeds keys have the bits of loads that torch embeds in place."""

import pytest
import torch

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.cuda.key_rotation import embed_on_device
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.transfer import layer_load
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from tests.inference_svc.runtime.transfer.test_layer_load import blocks_of, prefill, tokens
from tests.sampled import sampled_cases

HISTORY, PAGE_TOKENS = 90, 8
NORMED = ["smollm3", "gemma3"]
PAGES = [7, 3, 4, 5, 0, 11, 1, 2, 9, 8, 6, 12, 10]


class Counted:
    """The kernel, counting tokens by heads and elements."""

    def __init__(self):
        self.num_tokens = {}

    def __call__(self, keys, tables, region, slots):
        assert keys.is_contiguous()
        kind = tuple(keys.shape[1:])
        self.num_tokens[kind] = self.num_tokens.get(kind, 0) + len(keys)
        embed_on_device(keys, tables, region, slots)


def paged_kv(model):
    """Make empty KV on unordered pages, some of them adjacent; filled with garbage."""
    shapes = [layer.shape for layer in model.calibration.layers]
    slots = PagedSlots(len(PAGES), PAGE_TOKENS)
    cpu = torch.device("cpu")
    pool = PagePool(shapes, slots, 1, device=cpu, dtype=model.loaded.dtype)
    pool._page_region.fill_(5.0)
    return pool.new_kv(HISTORY, PAGES)


def contents(kv, num_tokens):
    """Return all layers' tokens of every component."""
    return [
        component.read(layer_index, 0, num_tokens)
        for component in kv.components
        for layer_index in range(len(component.cut(0, num_tokens)))
    ]


@pytest.mark.parametrize(
    ("name", "on_pages", "piece_items"),
    sampled_cases(
        ["llama", "llama-yarn", "gpt-neox", "glm", "cohere", *NORMED, "gptj", "hunyuan"],
        [True, False],
        [1 << 17, 100],
        count=12,
        seed=1,
    ),
)
def test_bits_equal_those_of_torch(
    tiny, make_arena, rows, monkeypatch, name, on_pages, piece_items
):
    """On pages and contiguous, in pieces of any size; keys behind a norm are left to torch."""
    monkeypatch.setattr(layer_load, "PIECE_ITEMS", piece_items)
    check_bits(tiny(name), make_arena, rows, on_pages=on_pages)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v32"])
@pytest.mark.parametrize("on_pages", [True, False])
def test_latents_and_index_keys(tiny, make_arena, rows, name, on_pages):
    """Their rotated part lies beside another component, or in a third one."""
    check_bits(tiny(name), make_arena, rows, on_pages=on_pages)


def check_bits(model, make_arena, rows, *, on_pages):
    """Load a history both ways, after a discard; compare all written rows."""
    calibration = model.calibration
    _, arena_kv = make_arena(calibration.layout, 8)
    blocks = blocks_of(rows, [5, 6, 7, 0, 4, 2], HISTORY, 16)
    store_blocks(prefill(model, tokens(31, HISTORY))[1], arena_kv, blocks, calibration)
    gap = [
        rows(5, 0, 16),
        rows(6, 16, 4, start=3),
        rows(6, 20, 2, start=9),
        *shift_blocks(rows, blocks),
    ]
    kernel = Counted()
    for spans in (blocks, gap):
        end = sum(span.num_tokens for span in spans)
        loaded = []
        for embed in (None, kernel):
            kv = paged_kv(model) if on_pages else model.new_kv(HISTORY)
            loader = LayerLoader(kv, arena_kv, spans, calibration, embed=embed)
            for layer_index in range(len(calibration.layers)):
                loader.load(layer_index)
            loaded.append(contents(kv, end))
        for by_torch, by_kernel in zip(*loaded, strict=True):
            assert torch.equal(by_torch, by_kernel)
    embedded = [
        shape
        for layer in calibration.layers
        for recipe, shape in zip(layer.components, layer.shape.parts, strict=True)
        if recipe.rotary is not None and recipe.post is None
    ]
    both = HISTORY + sum(span.num_tokens for span in gap)
    assert kernel.num_tokens == {shape: embedded.count(shape) * both for shape in embedded}


def shift_blocks(rows, blocks):
    """Shift the blocks from the third on by ten tokens."""
    return [rows(b.slot_id, b.token_offset - 10, b.num_tokens) for b in blocks[2:]]
