"""Store: every token is copied to its slot, whatever the order of both memories."""

import pytest
import torch

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.arena_kv import ArenaKv
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.transfer.layer_store import store_blocks

BLOCK_TOKENS = 32
NUM_TOKENS = 5 * BLOCK_TOKENS + 23
IN_ORDER = list(range(NUM_TOKENS))
BUFFER_SLOTS = {
    "in order": IN_ORDER,
    "blocks apart": [*IN_ORDER[96:160], *IN_ORDER[:96], *IN_ORDER[160:]],
    "one block here and there": [*IN_ORDER[:128], *IN_ORDER[159:127:-1], *IN_ORDER[160:]],
    "all here and there": IN_ORDER[::-1],
    "apart within a block": [*IN_ORDER[40:], *IN_ORDER[:40]],
}
ARENA_SLOTS = ([2, 3, 4, 5, 6, 7], [5, 6, 7, 1, 2, 3], [4, 5, 2, 3, 0, 7], [7, 0, 5, 1, 3, 2])


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("arena_slots", ARENA_SLOTS)
@pytest.mark.parametrize("lie", BUFFER_SLOTS)
def test_tokens_are_copied_to_their_slots(tiny, make_arena, rows, lie, arena_slots, order):
    """Also where slots are partly adjacent; nothing else of the arena changes."""
    model, slots = tiny("llama"), BUFFER_SLOTS[lie]
    computed = model.new_buffer(NUM_TOKENS)
    token_ids = [3 + position % 90 for position in range(NUM_TOKENS)]
    chunk = Chunk(model.new_kv(NUM_TOKENS), token_ids, want_logits=False, write_buffer=computed)
    model.runner.step([chunk])
    buffer = WriteBuffer(computed.keys, computed.values, 0, slots, NUM_TOKENS)
    arena, arena_kv = make_arena(model.calibration.layout, 8)
    before = bytes(arena.memory)
    firsts = range(0, NUM_TOKENS, BLOCK_TOKENS)
    blocks = [
        rows(slot_id, first, min(BLOCK_TOKENS, NUM_TOKENS - first))
        for slot_id, first in zip(arena_slots, firsts, strict=True)
    ]

    store_blocks(buffer, arena_kv, blocks[::order], model.calibration)

    for layer_index in range(len(model.calibration.layers)):
        for component, of_layers in enumerate((computed.keys, computed.values)):
            view = arena_kv.view(layer_index, component)
            for block in blocks:
                own = slots[block.token_offset : block.token_offset + block.num_tokens]
                stored = view[block.slot_id, : block.num_tokens]
                assert torch.equal(stored, of_layers[layer_index][own])
    for slot_id in set(range(8)) - set(arena_slots):
        begin = slot_id * arena.slot_bytes
        assert arena.slot(slot_id) == before[begin : begin + arena.slot_bytes]


class WatchedArenaKv(ArenaKv):
    """Records the slots of each copy of the first layer's keys."""

    def __init__(self, *args):
        super().__init__(*args)
        self.copies = []

    def scatter(self, layer_index, component_index, run, source):
        super().scatter(layer_index, component_index, run, source)
        if layer_index == component_index == 0:
            self.copies.append(list(run.slot_ids))


@pytest.mark.parametrize(
    ("lie", "arena_slots", "copies"),
    [
        ("in order", [2, 3, 4, 5, 6], [[2, 3, 4, 5, 6]]),
        ("in order", [5, 6, 7, 1, 2], [[5, 6, 7], [1, 2]]),
        ("in order", [4, 5, 1, 2], [[4, 5], [1, 2]]),
        ("in order", [4, 5, 2, 3, 0], [[4, 5, 2, 3, 0]]),
        ("blocks apart", [2, 3, 4, 5, 6], [[2, 3], [4, 5, 6]]),
        ("one block here and there", [2, 3, 4, 5, 6], [[2, 3, 4, 5], [6]]),
        ("apart within a block", [2, 3, 4, 5, 6], [[2, 3, 4, 5], [6]]),
        ("all here and there", [5, 6, 7, 1, 2], [[5, 6, 7, 1, 2]]),
    ],
)
def test_adjacent_slots_are_one_copy(tiny, make_arena, rows, lie, arena_slots, copies):
    """In both memories; with many copies a single one of everything is faster."""
    model = tiny("llama")
    memory = model.new_buffer(NUM_TOKENS)
    buffer = WriteBuffer(memory.keys, memory.values, 0, BUFFER_SLOTS[lie], NUM_TOKENS)
    arena, _ = make_arena(model.calibration.layout, 8)
    watched = WatchedArenaKv(arena, model.calibration.layout)
    firsts = range(0, NUM_TOKENS, BLOCK_TOKENS)
    blocks = [
        rows(slot_id, first, BLOCK_TOKENS)
        for slot_id, first in zip(arena_slots, firsts, strict=False)
    ]
    last = rows(0, len(blocks) * BLOCK_TOKENS, 1)  # of another size: a copy of its own

    store_blocks(buffer, watched, [*blocks, last], model.calibration)

    assert watched.copies == [*copies, [0]]
