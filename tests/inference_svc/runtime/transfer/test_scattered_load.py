"""Loading after discards: spans that begin inside slots, and hundreds of short ones."""

import pytest
import torch

from inference_svc.core.ranges import kept_runs, num_in
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.slot_runs import ScatteredTokens, SlotRun
from inference_svc.runtime.transfer.layer_load import LayerLoader
from inference_svc.runtime.transfer.layer_store import store_blocks
from inference_svc.runtime.transfer.spans import check_spans
from inference_svc.runtime.transfer.token_runs import token_runs
from shared.types.kv_layout import Component, KVLayout, Layer

NUM_TOKENS = 160
BLOCK_TOKENS = 16
SLOTS = [7, 3, 9, 0, 2, 5, 4, 8, 1, 6]
EVERY_THIRD = tuple((first, first + 1) for first in range(1, 159, 3))
RANGES = {
    "inside a block": ((5, 9),),
    "the oldest": ((0, 75),),
    "one of each block": tuple((first, first + 1) for first in range(0, 160, 16)),
    "every third": EVERY_THIRD,
    "every third, then none": EVERY_THIRD[:15],
    "pairs across blocks": tuple((first, first + 2) for first in range(15, 159, 16)),
}


def store_rows(model, make_arena, rows):
    """Make rows of a history before RoPE, and the same in slots."""
    token_ids = [3 + index * 11 % 90 for index in range(NUM_TOKENS)]
    kv, buffer = model.new_kv(NUM_TOKENS), model.new_buffer(NUM_TOKENS)
    model.runner.step([Chunk(kv, token_ids, False, buffer)])
    _, arena_kv = make_arena(model.calibration.layout, num_slots=len(SLOTS))
    blocks = [rows(slot, n * BLOCK_TOKENS, BLOCK_TOKENS) for n, slot in enumerate(SLOTS)]
    store_blocks(buffer, arena_kv, blocks, model.calibration)
    return buffer, arena_kv


def spans_of(rows, ranges):
    """Return kvd's spans after a discard: the kept part of each block, at its new position."""
    spans, offset = [], 0
    for start, end in kept_runs(ranges, NUM_TOKENS):
        for block in range(start // BLOCK_TOKENS, (end - 1) // BLOCK_TOKENS + 1):
            first = max(start, block * BLOCK_TOKENS)
            count = min(end, (block + 1) * BLOCK_TOKENS) - first
            spans.append(rows(SLOTS[block], offset, count, start=first - block * BLOCK_TOKENS))
            offset += count
    return spans


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("name", ["llama", "gpt-neox", "smollm3", "deepseek-v3", "deepseek-v32"])
def test_every_remaining_row_is_loaded_to_its_place(tiny, make_arena, rows, name, ranges):
    """Bit for bit as if the kept rows were embedded in one piece."""
    model = tiny(name)
    buffer, arena_kv = store_rows(model, make_arena, rows)
    spans = spans_of(rows, ranges)
    kv = model.new_kv(NUM_TOKENS)
    assert check_spans(kv, spans, model.calibration.layout) == NUM_TOKENS - num_in(ranges)
    loader = LayerLoader(kv, arena_kv, spans, model.calibration)
    for layer_index, layer in enumerate(model.calibration.layers):
        loader.load(layer_index)
        for recipe, free, embedded in zip(
            layer.components, buffer.components, kv.components, strict=True
        ):
            kept = [free[layer_index][start:end] for start, end in kept_runs(ranges, NUM_TOKENS)]
            expected = recipe.embed(torch.cat(kept), 0).transpose(0, 1)
            assert torch.equal(embedded[layer_index][0, :, : expected.shape[1]], expected)


def test_short_runs_are_gathered_together(rows):
    """However many; runs of whole blocks, and a single short run, are copied as usual."""
    many = list(token_runs(spans_of(rows, EVERY_THIRD)))
    assert [type(run) for run in many] == [ScatteredTokens]
    assert many[0].num_tokens == NUM_TOKENS - num_in(EVERY_THIRD)
    whole = [rows(slot, 16 * n, 16) for n, slot in enumerate(SLOTS)]
    tail = rows(11, 160, 3)
    assert [run.num_tokens for run in token_runs([*whole, tail])] == [160, 3]
    assert all(isinstance(run, SlotRun) for run in token_runs([*whole, tail]))
    mixed = list(token_runs([rows(12, 0, 1), rows(13, 1, 2), *whole, tail]))
    assert [run.num_tokens for run in mixed] == [3, 160, 3]


def test_rows_are_found_where_slots_are_no_whole_number_of_rows_apart(make_arena):
    """A slot is no multiple of a row of 60 bytes."""
    components = (Component("k", (3, 5), "float32"), Component("v", (2, 8), "float32"))
    layout = KVLayout("5e" * 16, (Layer(components),), BLOCK_TOKENS)
    arena, arena_kv = make_arena(layout, num_slots=10)
    generator = torch.Generator().manual_seed(3)
    arena.memory[:] = bytes(range(256)) * (len(arena.memory) // 256)
    slots = torch.randint(0, 10, (50,), generator=generator)
    which = torch.randint(0, BLOCK_TOKENS, (50,), generator=generator)
    for index, component in enumerate(components):
        view = arena_kv.view(0, index)
        assert (view.stride(0) % view.stride(1) == 0) == (index == 1)
        out = torch.empty(50, *component.shape)
        arena_kv.gather(0, index, ScatteredTokens(slots, which), out)
        assert torch.equal(out.view(torch.int32), view[slots, which].view(torch.int32))
