"""Layouts: names that never change, and states beside the KV of tokens, or alone."""

from dataclasses import replace

import pytest

from shared.types.kv_layout import (
    MAX_STATE_BYTES,
    RECURRENT_BLOCK_TOKENS,
    Component,
    InvalidLayoutError,
    KVLayout,
    Layer,
    choose_block_tokens,
)
from shared.types.units import MIB

LAYER = Layer((Component("k", (2, 8), "float32", "r"), Component("v", (2, 8), "float32")))
LAYOUT = KVLayout("ab" * 16, (LAYER, Layer(()), LAYER), block_tokens=32)
RECURRENT = KVLayout("ab" * 16, (Layer(()),), 256, "coupled", state_bytes=3 * MIB + 1)


def test_layouts_without_states_keep_their_names():
    """Data of earlier releases is found by its fingerprint."""
    assert LAYOUT.fingerprint == "59365b675e3b93a4b34b92e56c08e2d6"
    coupled = replace(LAYOUT, position_mode="coupled", tp_rank=1, tp_size=2)
    assert coupled.fingerprint == "750f779d93a533713562fc64e4391f7f"


def test_states_make_another_layout():
    coupled = replace(LAYOUT, position_mode="coupled")
    names = {replace(coupled, state_bytes=size).fingerprint for size in (0, 1, 2)}
    assert len(names) == 3


@pytest.mark.parametrize(("state_bytes", "num_slots"), [(0, 0), (1, 1), (8192, 1), (8193, 2)])
def test_a_state_takes_whole_slots(state_bytes, num_slots):
    layout = replace(LAYOUT, position_mode="coupled", state_bytes=state_bytes)
    assert layout.block_bytes == 8192
    assert layout.state_slots == num_slots
    layout.check()


def test_a_purely_recurrent_model():
    """Its slots have a mebibyte, or the state's size in sectors; tokens have no bytes."""
    RECURRENT.check()
    assert (RECURRENT.block_bytes, RECURRENT.state_slots) == (MIB, 4)
    assert (RECURRENT.token_bytes, RECURRENT.slice_offsets) == (0, (0,))
    small = replace(RECURRENT, state_bytes=5000)
    assert (small.block_bytes, small.state_slots) == (8192, 1)
    assert choose_block_tokens(RECURRENT.layers) == RECURRENT_BLOCK_TOKENS
    assert choose_block_tokens((LAYER, Layer(()))) == 512


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (replace(RECURRENT, state_bytes=0), "0 components"),
        (replace(RECURRENT, position_mode="decoupled"), "states, but position mode 'decoupled'"),
        (replace(RECURRENT, state_bytes=MAX_STATE_BYTES + 1), "states of 4294967297 bytes"),
        (replace(RECURRENT, state_bytes=-1), "states of -1 bytes"),
        (replace(RECURRENT, layers=()), "0 layers"),
    ],
)
def test_invalid_states(layout, problem):
    with pytest.raises(InvalidLayoutError, match=problem):
        layout.check()


WIDE = Layer((Component("k", (2, 8), "float32", "r"), Component("v", (2, 8), "float32")), 40)
NARROW = Layer((Component("k", (1, 8), "float32"),), 64)
WINDOWED = replace(LAYOUT, layers=(WIDE, LAYER, WIDE, Layer(()), LAYER, NARROW, WIDE, NARROW))


def test_layers_with_windows_are_stored_separately():
    """In parts of as many layers as fit into a slot, in order; token blocks have the others."""
    WINDOWED.check()
    assert (WINDOWED.window, WINDOWED.block_bytes) == (64, 8192)
    assert WINDOWED.window_parts == ((0, 2), (5, 6), (7,))
    assert (WINDOWED.window_slots, WINDOWED.part_slots) == (3, 3)
    assert [WINDOWED.part_of(i) for i in range(8)] == [1, 0, 1, 0, 0, 2, 2, 3]
    assert WINDOWED.slice_offsets == (0, 0, 4096, 4096, 4096, 0, 4096, 0)
    assert WINDOWED.component_offset(6, 1) == 4096 + 32 * 64
    assert [bool(layer.components) for layer in WINDOWED.token_layers] == [
        *(False, True, False, False, True, False, False, False)
    ]
    assert WINDOWED.fewest_block_tokens == 0


def test_a_slot_has_room_for_the_largest_layer():
    """The others may have fewer bytes per token than one layer with a window."""
    layout = replace(LAYOUT, layers=(NARROW, replace(WIDE, components=WIDE.components * 2), LAYER))
    assert (layout.block_bytes, layout.window_parts) == (8192, ((0,), (1,)))
    assert layout.slot_slices == (0, 0, 8192)  # of a part, as it is verified
    layout = replace(LAYOUT, layers=(WIDE, LAYER, NARROW))
    assert (layout.block_bytes, layout.window_parts) == (4096, ((0,), (2,)))


def test_if_all_layers_have_windows_nothing_is_separate():
    """The layout has the name and the bytes of one without."""
    layout = replace(LAYOUT, layers=(WIDE, WIDE))
    plain = replace(LAYOUT, layers=(LAYER, LAYER))
    assert (layout.window, layout.window_parts, layout.fewest_block_tokens) == (0, (), 1)
    assert layout.fingerprint == plain.fingerprint
    assert layout.block_bytes == plain.block_bytes
    assert layout.slice_offsets == plain.slice_offsets


def test_windows_make_another_layout():
    names = {
        replace(LAYOUT, layers=(LAYER, replace(LAYER, window=window))).fingerprint
        for window in (0, 1, 2)
    }
    assert len(names) == 3


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (replace(LAYOUT, layers=(LAYER, replace(LAYER, window=-1))), "a window of"),
        (replace(LAYOUT, layers=(LAYER, replace(LAYER, window=1 << 31))), "a window of"),
        (replace(WINDOWED, position_mode="coupled", state_bytes=1), "both states and windows"),
    ],
)
def test_invalid_windows(layout, problem):
    with pytest.raises(InvalidLayoutError, match=problem):
        layout.check()
