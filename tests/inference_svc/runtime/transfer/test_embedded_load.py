"""Loads by a kernel have the bits of loads by torch, which embeds keys in place."""

import pytest
import torch

from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.cpu.token_kernel import TokenKernel
from inference_svc.runtime.cuda.key_rotation import embed_on_device
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.positions.rotation import BY_TORCH, LoadKernels
from inference_svc.runtime.transfer import layer_load
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from tests.inference_svc.runtime.transfer.test_layer_load import blocks_of, prefill, tokens
from tests.sampled import sampled_cases

HISTORY, PAGE_TOKENS = 90, 8
FAMILIES = [
    "llama",
    "llama-yarn",
    "gpt-neox",
    "glm",
    "cohere",
    "smollm3",
    "gemma3",
    "gptj",
    "hunyuan",
]
PAGES = [7, 3, 4, 5, 0, 11, 1, 2, 9, 8, 6, 12, 10]


class Counted:
    """The kernel of a GPU, counting tokens by heads and elements."""

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
        FAMILIES,
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
    check_embedding(tiny(name), make_arena, rows, on_pages=on_pages)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v32"])
@pytest.mark.parametrize("on_pages", [True, False])
def test_latents_and_index_keys(tiny, make_arena, rows, name, on_pages):
    """Their rotated part lies beside another component, or in a third one."""
    check_embedding(tiny(name), make_arena, rows, on_pages=on_pages)


@pytest.mark.parametrize(
    ("name", "on_pages"),
    sampled_cases(
        [*FAMILIES, "deepseek-v3", "deepseek-v32", "opt"],
        [True, False],
        count=16,
        seed=1,
    ),
)
def test_a_cpus_kernel_loads_everything(tiny, make_arena, rows, name, on_pages):
    """Keys, also those behind a norm and those without rotation, and values."""
    check_bits(tiny(name), make_arena, rows, LoadKernels(load=TokenKernel.load()), on_pages)


def test_a_slot_outside_of_the_arena_is_refused(tiny, make_arena, rows):
    """As torch's own copies refuse it: kvd's answer is not trusted with memory."""
    model = tiny("llama")
    _, arena_kv = make_arena(model.calibration.layout, 8)
    for slot_id in (-1, 8):
        spans = [rows(0, 0, 16), rows(slot_id, 16, 16)]
        kernels = LoadKernels(load=TokenKernel.load())
        kv = model.new_kv(HISTORY)
        with pytest.raises(IndexError, match="outside of an arena of 8"):
            LayerLoader(kv, arena_kv, spans, model.calibration, kernels=kernels)


def check_embedding(model, make_arena, rows, *, on_pages):
    """Check a GPU's kernel, and that it embeds all keys that no norm follows."""
    kernel = Counted()
    num_loaded = check_bits(model, make_arena, rows, LoadKernels(embed=kernel), on_pages)
    embedded = [
        shape
        for layer in model.calibration.layers
        for recipe, shape in zip(layer.components, layer.shape.parts, strict=True)
        if recipe.rotary is not None and recipe.post is None
    ]
    assert kernel.num_tokens == {shape: embedded.count(shape) * num_loaded for shape in embedded}


def check_bits(model, make_arena, rows, kernels, on_pages):
    """Load a history both ways, and again after a discard; return the number of tokens of both."""
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
    for spans in (blocks, gap):
        end = sum(span.num_tokens for span in spans)
        loaded = []
        for kind in (BY_TORCH, kernels):
            kv = paged_kv(model) if on_pages else model.new_kv(HISTORY)
            loader = LayerLoader(kv, arena_kv, spans, calibration, kernels=kind)
            for layer_index in range(len(calibration.layers)):
                loader.load(layer_index)
            loaded.append(contents(kv, end))
        for by_torch, by_kernel in zip(*loaded, strict=True):
            assert torch.equal(by_torch, by_kernel)
    return HISTORY + sum(span.num_tokens for span in gap)


def shift_blocks(rows, blocks):
    """Shift the blocks from the third on by ten tokens."""
    return [rows(b.slot_id, b.token_offset - 10, b.num_tokens) for b in blocks[2:]]
