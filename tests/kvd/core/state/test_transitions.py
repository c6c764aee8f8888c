"""State machines are tables; what they do not hold cannot happen, and the README draws them."""

from pathlib import Path

import pytest

import kvd
from kvd.core.state.block import BLOCK_MOVES, Block, BlockIo
from kvd.core.state.leases import LEASE_MOVES, StoreLease, move
from kvd.core.state.slots import SLOT_MOVES, SlotTable
from shared.types.session_key import SessionKey

README = Path(kvd.__file__).with_name("README.md")


def test_the_readme_draws_what_the_tables_say():
    """Its diagrams are made from them."""
    text = README.read_text(encoding="utf-8")
    for moves in (BLOCK_MOVES, SLOT_MOVES, LEASE_MOVES):
        assert f"```mermaid\n{moves.diagram()}\n```" in text


def test_one_operation_at_a_time_moves_a_block():
    """Another one cannot begin meanwhile, and only what has begun can end."""
    block = Block(b"key", 1)
    block.move("hash")
    for event in ("hash", "write", "write_done"):
        with pytest.raises(AssertionError, match=f"{event} cannot happen to what is hashing"):
            block.move(event)
    assert block.io is BlockIo.HASHING
    block.move("hash_done")
    assert block.io is BlockIo.IDLE


def test_only_a_committed_slot_is_written_anew():
    """A slot keeps its generation then; one that is free gets the next one."""
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
    """What an earlier kvd had given away is not free."""
    slots = SlotTable(2)
    slots.adopt(1, 7, is_committed=True)
    for is_committed in (True, False):
        with pytest.raises(AssertionError):
            slots.adopt(1, 7, is_committed=is_committed)


def test_a_lease_ends_once():
    """An orphan is its engine's again, or ends; what has ended is nobody's."""
    lease = StoreLease(1, 2, SessionKey("t", "m", "s"))
    with pytest.raises(AssertionError):
        move(lease, "reattach")
    for event in ("detach", "reattach", "end"):
        move(lease, event)
    for event in ("settle", "detach", "reattach", "end"):
        with pytest.raises(AssertionError, match=f"{event} cannot happen to what is ended"):
            move(lease, event)
