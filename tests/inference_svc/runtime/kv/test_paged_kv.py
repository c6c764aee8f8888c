"""KV on pages gives the same results as contiguous KV, wherever the pages are."""

import pytest
import torch

from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape, token_items_of
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.paged_kv import PageTable
from inference_svc.runtime.memory import HUGE_PAGE_BYTES
from inference_svc.runtime.transfer.compaction import compact_in_place
from inference_svc.runtime.transfer.layer_load import copy_layer

CPU = torch.device("cpu")
SHAPES = [LayerShape((2, 4), (2, 4)), LayerShape((1, 8), (1, 6)), LayerShape((2, 4), (1, 6))]
NUM_PAGES, PAGE_TOKENS = 24, 4
APART = [9, 3, 4, 5, 20, 0]  # pages of a sequence; three of them are adjacent


def make_pool(shapes, num_pages=NUM_PAGES, num_buffer_slots=40):
    slots = PagedSlots(num_pages, PAGE_TOKENS)
    return PagePool(shapes, slots, num_buffer_slots, device=CPU, dtype=torch.float32)


def fill(kv, first, num_tokens):
    """Write to every element the position of its token and its layer's index."""
    for tokens in (kv.keys, kv.values):
        for layer_index in range(len(SHAPES)):
            with tokens.filling(layer_index, first, num_tokens) as out:
                positions = torch.arange(first, first + num_tokens)
                out.copy_((100 * layer_index + positions)[:, None, None].expand_as(out))


@pytest.mark.parametrize("pages", [APART, [7, 8, 9, 10, 11, 12], [5, 4, 3, 2, 1, 0]])
@pytest.mark.parametrize(("first", "num_tokens"), [(0, 24), (0, 1), (5, 9), (4, 8), (23, 1)])
def test_tokens_are_found_by_position(pages, first, num_tokens):
    """All ways of reading and writing agree; adjacent pages are views."""
    kv = make_pool(SHAPES).new_kv(24, pages)
    fill(kv, 0, 11)
    fill(kv, 11, 13)
    for tokens in (kv.keys, kv.values):
        cut = tokens.cut(first, num_tokens)
        assert len(cut) == len(SHAPES)
        for layer_index, shape in enumerate(SHAPES):
            heads, dim = shape.key if tokens is kv.keys else shape.value
            assert cut[layer_index].shape == (1, heads, num_tokens, dim)
            read = tokens.read(layer_index, first, num_tokens)
            assert torch.equal(cut[layer_index][0].transpose(0, 1), read)
            expected = torch.arange(first, first + num_tokens) + 100.0 * layer_index
            assert torch.equal(read, expected[:, None, None].expand(-1, heads, dim))


def test_the_spare_page_is_never_lent():
    """It lies behind all others, and is not counted."""
    pool = make_pool(SHAPES)
    assert pool.num_token_slots == pool.num_free == NUM_PAGES * PAGE_TOKENS + 40
    kvs = [pool.new_kv(24, list(range(first, first + 6))) for first in range(0, NUM_PAGES, 6)]
    for kv in kvs:
        fill(kv, 0, 24)
    spare = pool.spare_kv()
    assert (spare.table.pages, spare.capacity_tokens) == ([NUM_PAGES], PAGE_TOKENS)
    for kept in (*spare.keys.slots.layers, *spare.values.slots.layers):
        kept[spare.table.slots_of(0, PAGE_TOKENS)] = -1.0
    for kv in kvs:
        for tokens in (kv.keys, kv.values):
            for layer_index in range(len(SHAPES)):
                assert tokens.read(layer_index, 0, 24).min() == 100 * layer_index


@pytest.mark.parametrize("pages", [APART, [7, 8, 9], [5, 4], [2, 3, 1, 2], [6]])
def test_adjacent_tokens_are_recognised(pages):
    """They are a view, and cost no copy."""
    table, num_slots = PageTable(pages, PAGE_TOKENS, CPU), len(pages) * PAGE_TOKENS
    for first in range(num_slots):
        for num_tokens in range(1, num_slots - first + 1):
            slots = table.slots_of(first, num_tokens)
            is_run = slots == list(range(slots[0], slots[0] + num_tokens))
            assert table.is_run(first, num_tokens) is is_run


def test_sequences_of_one_region_do_not_overlap():
    """Nor do tokens beyond what is written."""
    pool = make_pool(SHAPES)
    one, other = pool.new_kv(24, APART), pool.new_kv(8, [1, 2])
    fill(one, 0, 24)
    kept = [one.keys.read(layer, 0, 24).clone() for layer in range(3)]
    fill(other, 0, 8)
    fill(other, 3, 2)
    for layer in range(3):
        assert torch.equal(one.keys.read(layer, 0, 24), kept[layer])


def test_shared_pages_are_copied_before_they_are_written():
    """The sequence continues with the copies; other holders keep the pages."""
    pool = make_pool(SHAPES)
    one, other = pool.new_kv(24, APART), pool.new_kv(12, APART[:3])
    fill(one, 0, 24)
    one.copy_shared_pages([PageCopy(1, 3, 15), PageCopy(2, 4, 16)])
    assert one.table.pages == [9, 15, 16, 5, 20, 0]
    for tokens in (one.keys, one.values):
        for layer in range(3):
            with tokens.filling(layer, 6, 4) as out:
                out.zero_()
    for ours, theirs in ((one.keys, other.keys), (one.values, other.values)):
        for layer in range(3):
            expected = torch.arange(12) + 100.0 * layer
            assert torch.equal(theirs.read(layer, 0, 12)[:, 0, 0], expected)
            expected[6:10] = 0
            assert torch.equal(ours.read(layer, 0, 12)[:, 0, 0], expected)
    one.copy_shared_pages([])
    assert one.table.pages == [9, 15, 16, 5, 20, 0]


def test_a_sequence_grows_in_place():
    """Its pages stay, others are added."""
    pool = make_pool(SHAPES)
    kv = pool.new_kv(5, [9, 3])
    fill(kv, 0, 8)
    assert (kv.capacity_tokens, kv.free_tokens) == (8, 8)
    kv.grow([9, 3, 4])
    assert kv.capacity_tokens == 12
    fill(kv, 8, 4)
    assert torch.equal(kv.keys.read(0, 0, 12)[:, 0, 0], torch.arange(12.0))
    with pytest.raises(AssertionError, match="keeps its pages"):
        kv.grow([9, 4, 3, 5])
    with pytest.raises(AssertionError, match="2 pages for 9 tokens"):
        pool.new_kv(9, [1, 2])


def test_the_pool_counts_pages_and_write_buffers():
    """What is free of either is free."""
    pool = make_pool(SHAPES)
    assert pool.num_token_slots == pool.num_free == NUM_PAGES * PAGE_TOKENS + 40
    buffer = pool.new_write_buffer(0, 30)
    assert pool.num_free == NUM_PAGES * PAGE_TOKENS + 10
    pool.release(buffer)
    kv = pool.new_kv(4, [0])
    pool.release(kv)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(kv)
    pool.check()


def test_prefault_covers_pages_and_write_buffers():
    """It returns the allocated size of both together."""
    token_bytes = 4 * token_items_of(SHAPES)
    num_pages = HUGE_PAGE_BYTES // (token_bytes * PAGE_TOKENS) + 1
    num_slots = 2 * num_pages * PAGE_TOKENS
    buffers = KVPool(SHAPES, num_slots, device=CPU, dtype=torch.float32).prefault()
    pages = (num_pages + 1) * PAGE_TOKENS * token_bytes  # one of them is the spare page
    pages = pages if buffers else 0  # 0: a kernel that cannot
    assert make_pool(SHAPES, num_pages, num_slots).prefault() == pages + buffers


# Attention over views, over windows, over latents that are expanded, over those that an index
# chooses, and under a mask.
MODELS = ["llama", "gemma3", "deepseek-v3", "deepseek-v32", "gptj"]


def steps(model, kvs, seed):
    """Compute two sequences in parallel: chunks, then single tokens; return all logits."""
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(5, 60, (2, 22), generator=generator).tolist()
    logits = []
    for sizes in ((9, 1), (4, 8), (1, 1), (1, 1), (5, 1)):
        chunks = []
        for kv, text, size in zip(kvs, texts, sizes, strict=True):
            ids = text[kv.num_tokens : kv.num_tokens + size]
            chunks.append(Chunk(kv, ids, want_logits=True, want_all=True))
        logits.append(model.runner.step(chunks))
    return torch.cat(logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_on_pages(tiny, name):
    """Bit for bit: scattered pages are gathered, and the arithmetic is the same."""
    model = tiny(name)
    pool = make_pool([layer.shape for layer in model.calibration.layers])
    expected = steps(model, [model.new_kv(24) for _ in range(2)], seed=3)
    one, other = pool.new_kv(24, APART), pool.new_kv(24, [10, 2, 1, 23, 7, 8])
    assert torch.equal(steps(model, [one, other], seed=3), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v32"])
def test_compaction_and_copies_are_the_same(tiny, name):
    """After a discard, and of a copied prefix."""
    model = tiny(name)
    num_layers = len(model.calibration.layers)
    pool = make_pool([layer.shape for layer in model.calibration.layers])
    kvs = [model.new_kv(24), pool.new_kv(24, APART)]
    copied = [model.new_kv(24), pool.new_kv(24, [11, 12, 13, 22, 1, 2])]
    ids = list(range(8, 30))
    for kv, copy in zip(kvs, copied, strict=True):
        model.runner.step([Chunk(kv, ids, want_logits=False)])
        for layer in range(num_layers):
            copy_layer(kv, copy, layer, 13)
        compact_in_place(kv, [(0, 2), (7, 12), (15, 22)], model.calibration)
    for kind in (kvs, copied):
        num_tokens = 13 if kind is copied else kvs[0].num_tokens
        for layer in range(num_layers):
            for ours, theirs in zip(kind[0].components, kind[1].components, strict=True):
                read = (tokens.read(layer, 0, num_tokens) for tokens in (ours, theirs))
                assert torch.equal(*read)
