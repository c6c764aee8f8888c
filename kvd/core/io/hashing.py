"""Hashes: the checksums of what engines have stored (D11).

Pure. A stored block is served at once, and hashed in the background; before that it is neither
written nor in the journal, so that no later kvd can take bytes over that nobody can verify.
"""

from collections.abc import Iterable

from kvd.core.io.writing import Writer
from kvd.core.records.actions import HashSlot
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState


class Hasher:
    """Issues and completes hashes of one cache state."""

    def __init__(self, state: CacheState, writer: Writer) -> None:
        self._state = state
        self._writer = writer

    def request(self, blocks: Iterable[Block]) -> None:
        """Have a session's dirty blocks hashed; those that are go to the writer."""
        for block in blocks:
            if block.unhashed and block.io is BlockIo.IDLE:
                self._start(block)
            else:
                self._writer.admit(block)
        self._writer.issue()

    def hash_done(self, op_id: int, checksums: bytes) -> None:
        """Take the checksums of a HashSlot, b"" if they could not be computed."""
        state = self._state
        block = state.hashes.pop(op_id)
        block.io = BlockIo.IDLE
        if checksums:
            state.blocks.know(block, block.token_ids, checksums)
            state.put_block_slot(block)
        else:  # tried again when its session stores again
            state.outbox.count("hash_errors")
        state.settle(block)
        self._writer.admit(block)
        self._writer.issue()
        state.outbox.space_freed()

    def _start(self, block: Block) -> None:
        state = self._state
        assert block.slot_id is not None, "an unhashed block is in DRAM"
        block.io = BlockIo.HASHING
        op_id = state.next_op_id()
        state.hashes[op_id] = block
        state.outbox.add(HashSlot(op_id, block.slot_id, block.num_tokens))
