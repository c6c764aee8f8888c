"""A slot of the arena: its owner, and its generation."""

import pytest

from kvd.core.state.slots import SlotTable


def test_a_committed_slot_keeps_its_generation_when_rewritten():
    """A free slot gets the next generation."""
    slots = SlotTable(2)
    with pytest.raises(AssertionError):
        slots.rewrite(0)
    slot_id, generation = slots.allocate()
    slots.commit(slot_id)
    slots.rewrite(slot_id)
    slots.commit(slot_id)
    slots.free(slot_id)
    assert slots.allocate() == (slot_id, generation + 1)


def test_a_slot_is_adopted_once():
    """A slot that an earlier kvd had granted is not free."""
    slots = SlotTable(2)
    slots.adopt(1, 7, is_committed=True)
    for is_committed in (True, False):
        with pytest.raises(AssertionError):
            slots.adopt(1, 7, is_committed=is_committed)
