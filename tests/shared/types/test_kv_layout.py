"""Layouts: names that never change, and states beside the KV of tokens, or without any."""

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
    """What earlier releases have stored is found by the fingerprint of then."""
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


def test_a_model_that_is_only_recurrent():
    """Its slots are of a mebibyte, or of the state's size in sectors; tokens have no bytes."""
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
        (replace(RECURRENT, position_mode="decoupled"), "states, and position mode 'decoupled'"),
        (replace(RECURRENT, state_bytes=MAX_STATE_BYTES + 1), "states of 4294967297 bytes"),
        (replace(RECURRENT, state_bytes=-1), "states of -1 bytes"),
        (replace(RECURRENT, layers=()), "0 layers"),
    ],
)
def test_states_that_cannot_be(layout, problem):
    with pytest.raises(InvalidLayoutError, match=problem):
        layout.check()
