"""The write ring: one memory for all turns, lent per token."""

import pytest
import torch

from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.kv.write_ring import WriteRing

SHAPES = [LayerShape((2, 4), (1, 6)), LayerShape((2, 4), (2, 4))]


@pytest.fixture
def slots():
    return WriteSlots(12)


@pytest.fixture
def ring(slots):
    return WriteRing(SHAPES, slots, device=torch.device("cpu"), dtype=torch.float32)


def fill(buffer, first_token, num_tokens, number):
    places = buffer.places(first_token, num_tokens)
    for rows in (*buffer.keys.layers, *buffer.values.layers):
        places.write(rows, torch.full((num_tokens, *rows.shape[1:]), float(number)))


def holds(buffer, first_token, num_tokens, number):
    places = buffer.places(first_token, num_tokens)
    layers = (*buffer.keys.layers, *buffer.values.layers)
    return all(bool((places.read(rows) == number).all()) for rows in layers)


def test_the_spare_slot_is_never_lent(ring, slots):
    """Writing to it changes no other slot."""
    buffer = ring.lend(0, 0)
    ring.extend(buffer, 12)
    fill(buffer, 0, 12, 3)
    fill(ring.spare_buffer(), 0, 1, 9)
    assert (slots.num_free, ring.num_slots) == (0, 12)
    assert holds(buffer, 0, 12, 3)
    assert holds(ring.spare_buffer(), 0, 1, 9)


def test_alternately_growing_turns_keep_their_tokens(ring, slots):
    """Slots of two answers alternate; each reads its own tokens, until they are stored."""
    one, other = ring.lend(0, 0), ring.lend(7, 7)
    for token in range(6):
        for buffer, number in ((one, 1), (other, 2)):
            first = buffer.first_token + token
            ring.extend(buffer, first + 1)
            fill(buffer, first, 1, number)
    assert slots.num_free == 0
    assert holds(one, 0, 6, 1)
    assert holds(other, 7, 6, 2)
    one.end_token = 6
    one.forget_before(4)
    assert slots.num_free == 4
    ring.extend(other, 17)
    fill(other, 13, 4, 3)
    assert holds(one, 4, 2, 1)
    assert holds(other, 7, 6, 2)
    assert holds(other, 13, 4, 3)
    with pytest.raises(AssertionError, match="slots for those from 4 to 6"):
        one.places(3, 2)


def test_tokens_keep_their_slots(ring, slots):
    """A step that failed is computed again in the same place."""
    buffer = ring.lend(0, 0)
    ring.extend(buffer, 5)
    before = list(buffer.slots)
    ring.extend(buffer, 5)
    ring.extend(buffer, 3)
    assert (buffer.slots, slots.num_free) == (before, 7)


def test_a_released_buffer_frees_its_slots(ring, slots):
    """After the last copy from it."""
    buffer = ring.lend(2, 4)
    ring.extend(buffer, 10)
    buffer.end_token = 8
    buffer.forget_before(5)
    with buffer.hold():
        buffer.memory.release()
        assert slots.num_free == 12 - 5
    assert slots.num_free == 12
    slots.check()


def test_first_tokens_of_a_block_have_slots_at_once(ring, slots):
    """A load fills them; with little room the buffer begins behind them."""
    buffer = ring.lend(4, 9)
    assert (buffer.first_token, buffer.end_token, buffer.room_end) == (4, 9, 9)
    assert slots.num_free == 7
    late = ring.lend(8, 12)
    assert (late.first_token, late.end_token, late.room_end) == (12, 12, 12)
    assert slots.num_free == 7


def test_tokens_that_are_not_computed_yet_are_kept(ring):
    """Their slots are about to be written."""
    buffer = ring.lend(0, 0)
    ring.extend(buffer, 5)
    buffer.end_token = 3
    with pytest.raises(AssertionError, match="forgotten of 3 computed"):
        buffer.forget_before(4)
