"""Rows of arena slots as tensors: exactly at the layout's offsets."""

import gc
import os

import pytest
import torch

from inference_svc.runtime.kv.arena_kv import ArenaKv
from inference_svc.runtime.kv.slot_runs import SlotRun
from shared.kvd_client.arena_map import ArenaMap
from shared.types.kv_layout import Component, KVLayout, Layer

NUM_SLOTS = 6


def layer(*components):
    return Layer(tuple(Component(name, shape, dtype) for name, shape, dtype in components))


def mixed_layout(dtype):
    """Lay out layers of several shapes whose slices all end in padding."""
    return KVLayout(
        "test",
        (
            layer(("k", (2, 4), dtype), ("v", (2, 4), dtype)),
            layer(("k", (3, 10), dtype), ("v", (3, 6), dtype)),
            layer(("k", (1, 4), dtype), ("v", (1, 12), dtype)),
        ),
        block_tokens=5,
    )


def make_arena_map(layout, num_slots=NUM_SLOTS):
    """Map a memory file as engines do."""
    fd = os.memfd_create("arena")
    try:
        os.ftruncate(fd, layout.block_bytes * num_slots)
        return ArenaMap(fd, layout.block_bytes, num_slots)
    finally:
        os.close(fd)


def by_offsets(arena, layout, slot_id, layer_index, component_index):
    """Read a component of a slot byte by byte, as the layout's docstring describes."""
    component = layout.layers[layer_index].components[component_index]
    begin = slot_id * layout.block_bytes + layout.component_offset(layer_index, component_index)
    num_bytes = layout.block_tokens * component.token_bytes
    copied = bytearray(arena.memory[begin : begin + num_bytes])
    flat = torch.frombuffer(copied, dtype=getattr(torch, component.dtype))
    return flat.view(layout.block_tokens, *component.shape)


def components_of(layout):
    return [
        (layer_index, component_index)
        for layer_index, layer in enumerate(layout.layers)
        for component_index in range(len(layer.components))
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_views_have_the_layouts_offsets(dtype):
    """Values written through a view are found at the component's offset of that slot."""
    layout = mixed_layout(dtype)
    arena = make_arena_map(layout)
    rows = ArenaKv(arena, layout)
    for number, (layer_index, component_index) in enumerate(components_of(layout)):
        view = rows.view(layer_index, component_index)
        view.copy_(torch.arange(view.numel()).remainder(97).view(view.shape) + number)
    for number, (layer_index, component_index) in enumerate(components_of(layout)):
        view = rows.view(layer_index, component_index)
        expected = torch.arange(view.numel()).remainder(97).view(view.shape) + number
        for slot_id in range(NUM_SLOTS):
            found = by_offsets(arena, layout, slot_id, layer_index, component_index)
            assert torch.equal(found, expected[slot_id].to(found.dtype))


def test_components_of_other_dtypes_share_an_arena():
    """A layout may mix dtypes; each view has its own."""
    layout = KVLayout(
        "test", (layer(("k", (2, 3), "float32"), ("v", (2, 3), "bfloat16")),), block_tokens=5
    )
    arena = make_arena_map(layout)
    rows = ArenaKv(arena, layout)
    rows.view(0, 0).fill_(1.5)
    rows.view(0, 1).fill_(2.5)
    assert (by_offsets(arena, layout, 5, 0, 0) == 1.5).all()
    assert (by_offsets(arena, layout, 5, 0, 1) == 2.5).all()


@pytest.mark.parametrize(
    "slot_ids", [[2, 3, 4], [4, 0, 5], [3]], ids=["side by side", "any", "one"]
)
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 5), (1, 3), (4, 1)])
def test_scatter_changes_only_the_rows_of_the_run(slot_ids, start, num_tokens):
    """After scatter exactly the named rows of the named slots differ; gather reads them back."""
    layout = mixed_layout("float32")
    arena = make_arena_map(layout)
    rows = ArenaKv(arena, layout)
    torch.frombuffer(arena.memory, dtype=torch.float32).normal_()
    before = torch.frombuffer(bytearray(arena.memory), dtype=torch.float32).clone()
    run = SlotRun(slot_ids, start, num_tokens)
    source = torch.randn(len(slot_ids), num_tokens, 3, 6)
    rows.scatter(1, 1, run, source)

    item = layout.component_offset(1, 1) // 4
    for slot_id, block in zip(slot_ids, source, strict=True):
        begin = slot_id * layout.block_bytes // 4 + item + start * 18
        before[begin : begin + num_tokens * 18] = block.flatten()
    assert torch.equal(torch.frombuffer(arena.memory, dtype=torch.float32), before)

    token_major = torch.empty_like(source)
    rows.gather(1, 1, run, token_major)
    assert torch.equal(token_major, source)
    head_major = torch.empty(3, len(slot_ids), num_tokens, 6)
    rows.gather(1, 1, run, head_major.permute(1, 2, 0, 3))
    assert torch.equal(head_major.permute(1, 2, 0, 3), source)


def test_runs_are_split_into_slots():
    """Pieces are whole slots, in order, of a limited number of tokens."""
    run = SlotRun([5, 3, 4, 0, 1], 1, 3)
    assert run.num_tokens == 15
    assert [piece.slot_ids for piece in run.split(7)] == [[5, 3], [4, 0], [1]]
    assert [piece.slot_ids for piece in run.split(1)] == [[5], [3], [4], [0], [1]]
    assert run.split(15) == [run]


@pytest.mark.parametrize(
    ("slot_ids", "is_one"),
    [([0], True), ([0, 1, 2], True), ([4, 5], True), ([1, 0], False), ([0, 2], False)],
)
def test_adjacent_slots_are_recognised(slot_ids, is_one):
    """They are copied in one call, from the first slot on."""
    assert SlotRun(slot_ids, 0, 5).is_consecutive is is_one


def test_slots_outside_the_arena_are_refused():
    """An unknown slot id must not reach other memory."""
    layout = mixed_layout("float32")
    rows = ArenaKv(make_arena_map(layout), layout)
    for slot_ids in ([0, NUM_SLOTS], [0, -1], [NUM_SLOTS - 1, NUM_SLOTS], [-1], [-1, 0]):
        out = torch.zeros(len(slot_ids), 5, 2, 4)
        with pytest.raises((IndexError, RuntimeError)):
            rows.gather(0, 0, SlotRun(slot_ids, 0, 5), out)
        with pytest.raises((IndexError, RuntimeError)):
            rows.scatter(0, 0, SlotRun(slot_ids, 0, 5), out)


def test_slots_smaller_than_blocks_are_refused():
    """An arena of another layout is not viewed at all."""
    layout = mixed_layout("float32")
    arena = make_arena_map(layout)
    arena.slot_bytes -= 4096
    with pytest.raises(ValueError, match="slots of"):
        ArenaKv(arena, layout)


def test_rows_stay_readable_after_the_arena_is_closed():
    """The mapping lives as long as views of it, though the arena gives out no more."""
    layout = mixed_layout("float32")
    arena = make_arena_map(layout)
    rows = ArenaKv(arena, layout)
    rows.view(2, 0).fill_(4.0)
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        ArenaKv(arena, layout)
    del arena
    gc.collect()
    assert (rows.view(2, 0) == 4.0).all()
