"""Checksums of slots: verify adopted blocks, and hash new ones (D11).

Pure. Adopted blocks are verified in the background, a few at a time, so that they can be written
and evicted. A load of a block that is not verified yet verifies it at once; if `verify_on_load` is
set, so does every load. arriving.py takes the outcomes, because loads wait for them.

A newly stored block is served at once, and hashed in the background. Before it is hashed it is
neither written nor in the journal, so that no later kvd adopts bytes that it cannot verify.
Corrupt bytes are counted and reported; an I/O error is not corruption.
"""

from collections.abc import Callable, Iterable, Sequence

from kvd.core.records.actions import BLOCK_CORRUPT, HashSlots, VerifySlot
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session_history import MoveKind
from kvd.core.state.under_way import Arrival
from shared.types.units import NS_PER_S

HASH_BATCH = 16  # blocks of one operation: for a small block it costs as much as the hash
MAX_BACKGROUND = 4  # background verifications under way
CORRUPT = "corrupt"  # why a session or a lease was cut
RETRY_NS = NS_PER_S  # pause after a verification that failed with an I/O error


class Verifier:
    """Starts and ends verifications of one cache state."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._background: set[int] = set()  # operations
        self._retry_at_ns = 0

    def is_needed(self, block: Block, *, always: bool) -> bool:
        """Whether a block in DRAM has to be verified before a load may use it.

        An idle block that is not verified yet has to be. With `always` so has every block, unless
        it is being hashed or written at the moment.
        """
        is_wanted = block.is_unverified or (always and bool(block.checksums))
        return is_wanted and block.io is BlockIo.IDLE

    def start(self, block: Block, *, urgent: bool) -> None:
        """Begin to verify an idle block in DRAM; costs O(leases) if it has readers.

        The completion is `Arrivals.verify_done`.
        """
        state = self._state
        assert block.slot_id is not None, "only a block in DRAM is verified"
        state.unverified.pop(block.key, None)
        verify = state.under_way.begin_verify(block)
        verify.was_queued = state.unwritten.holds(block)
        if block.readers:
            verify.early = {lease.lease_id: lease for lease in state.leases.reading(block)}
        state.unwritten.discard(block)
        if not urgent:
            self._background.add(verify.op_id)
        action = VerifySlot(
            verify.op_id, block.slot_id, block.num_tokens, block.checksums, urgent=urgent
        )
        state.outbox.add(action)

    def issue(self) -> None:
        """Begin background verifications of adopted blocks, up to MAX_BACKGROUND at a time."""
        state = self._state
        if state.now_ns < self._retry_at_ns:
            return
        while state.unverified and len(self._background) < MAX_BACKGROUND:
            self.start(next(iter(state.unverified.values())), urgent=False)

    def retry_at_ns(self) -> int | None:
        """Return when to call `issue` again; None if nothing waits, or a completion calls it."""
        return self._retry_at_ns if self._state.unverified and not self._background else None

    def finish(self, op_id: int) -> Arrival:
        """Record the end of a verification, with any outcome; returns it."""
        self._background.discard(op_id)
        return self._state.under_way.end_verify(op_id)

    def record_success(self, block: Block) -> None:
        """Record that a block's bytes match its checksums."""
        self._state.outbox.count("verified_blocks")
        self._state.blocks.set_unverified(block, is_unverified=False)

    def record_failure(self, block: Block) -> None:
        """Record that a block could not be verified because of an I/O error; try again later."""
        if block.is_unverified:
            self._state.unverified[block.key] = block
            self._retry_at_ns = self._state.now_ns + RETRY_NS


class Hasher:
    """Issues and completes the hashing of new blocks of one cache state.

    Args:
        state: the cache's tables.
        write: called with blocks that are hashed, to be queued for writing.
    """

    def __init__(self, state: CacheState, write: Callable[[Iterable[Block]], None]) -> None:
        self._state = state
        self._write = write

    def request(self, blocks: Iterable[Block]) -> None:
        """Hash those of a session's blocks that need it; pass the others to the writer."""
        new: list[Block] = []
        ready: list[Block] = []
        for block in blocks:
            is_new = block.unhashed and block.io is BlockIo.IDLE
            (new if is_new else ready).append(block)
        for first in range(0, len(new), HASH_BATCH):
            self._start(new[first : first + HASH_BATCH])
        self._write(ready)

    def hash_done(self, op_id: int, checksums: Sequence[bytes]) -> None:
        """Take the completion of a HashSlots.

        Args:
            op_id: the operation.
            checksums: of each slot, in order; b"": it could not be read.
        """
        state = self._state
        blocks = state.under_way.end_hash(op_id)
        for block, found in zip(blocks, checksums, strict=True):
            if found:
                state.blocks.set_contents(block, block.token_ids, found)
                state.journal.put_block(block)
            else:  # it is hashed again when its session stores again
                state.outbox.count("hash_errors")
            state.settle(block)
        self._write(blocks)
        state.outbox.on_space_freed()

    def _start(self, blocks: Sequence[Block]) -> None:
        slots = []
        for block in blocks:
            assert block.slot_id is not None, "an unhashed block is in DRAM"
            slots.append((block.slot_id, block.num_tokens))
        op_id = self._state.under_way.begin_hash(blocks)
        self._state.outbox.add(HashSlots(op_id, tuple(slots)))


def report_corrupt(state: CacheState, block: Block, tier: Tier) -> None:
    """Count and report that a block's copy in this tier is not what was stored."""
    state.outbox.count("blocks_corrupt")
    state.outbox.count(f"blocks_corrupt_{tier.value}")
    fields = {"block": block.key.hex(), "tier": tier.value, "num_sessions": len(block.users)}
    state.outbox.emit(BLOCK_CORRUPT, block.last_user, fields)
    state.record_block_move(block, MoveKind.CORRUPT, tier.value)
