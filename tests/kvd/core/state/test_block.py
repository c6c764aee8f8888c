"""What the performer does with a block: one operation at a time."""

import pytest

from kvd.core.state.block import Block, BlockIo


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
