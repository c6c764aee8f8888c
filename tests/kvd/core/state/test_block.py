"""The operations on a block: one at a time."""

import pytest

from kvd.core.state.block import Block, BlockIndex, BlockIo


def test_one_operation_at_a_time_moves_a_block():
    """Another one cannot begin meanwhile, and only an operation that has begun can end."""
    block = Block(b"key", 1)
    block.move("hash")
    for event in ("hash", "write", "write_done"):
        with pytest.raises(AssertionError, match=f"{event} cannot happen to what is hashing"):
            block.move(event)
    assert block.io is BlockIo.HASHING
    block.move("hash_done")
    assert block.io is BlockIo.IDLE


def test_blocks_are_counted_by_place():
    """In DRAM or on SSD, dirty, not hashed or not verified, in whichever place they come first."""
    blocks = BlockIndex()
    block = Block(b"key", 1)

    def counts() -> tuple[int, ...]:
        unsafe = (blocks.num_dirty, blocks.num_unhashed, blocks.num_unverified)
        return (blocks.num_dram, blocks.num_ssd, *unsafe)

    blocks.add(block)
    assert counts() == (0, 0, 0, 0, 0)
    blocks.enter_ssd(block, 5)
    assert counts() == (0, 1, 0, 0, 0)
    blocks.enter_dram(block, 3, 1)
    assert counts() == (1, 1, 0, 0, 0)
    blocks.set_unverified(block, is_unverified=True)
    assert counts() == (1, 1, 0, 0, 1)
    assert (blocks.leave_ssd(block), counts()[:3]) == (5, (1, 0, 1))
    blocks.enter_ssd(block, 6)
    assert (blocks.leave_dram(block), counts()) == (3, (0, 1, 0, 0, 0))


def test_a_block_is_counted_exactly_once_per_tier():
    """Whether it is added with its slot, or gets one later."""
    index = BlockIndex()
    index.add(Block(b"filled", 1, slot_id=0, generation=1))
    later = Block(b"later", 1)
    index.add(later)
    assert (index.num_dram, index.num_dirty, index.num_unhashed) == (1, 1, 1)
    index.enter_dram(later, 1, 1)
    assert (index.num_dram, index.num_dirty, index.num_ssd) == (2, 2, 0)
    index.add(Block(b"on ssd", 1, extent=7))
    assert (index.num_dram, index.num_dirty, index.num_ssd) == (2, 2, 1)
