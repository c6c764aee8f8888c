"""Checksums of slots: compared with what was stored, and computed of what is new (D11).

Pure. Adopted blocks are verified in the background, a few at a time, so that their writes and
evictions become possible; a load of one that is not verified yet has it verified at once, and so
does every load if that is wanted. The outcomes are taken by arriving.py, because loads wait for
them.

A stored block is served at once, and hashed in the background; before that it is neither written
nor in the journal, so that no later kvd can take bytes over that nobody can verify.
Bytes that are not what was stored are counted and reported; an I/O error is not corruption.
"""

from collections.abc import Callable, Iterable

from kvd.core.records.actions import BLOCK_CORRUPT, HashSlot, VerifySlot
from kvd.core.records.records import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session_history import MoveKind
from kvd.core.state.under_way import Arrival
from shared.types.units import NS_PER_S

MAX_BACKGROUND = 4  # verifications under way that nobody waits for
CORRUPT = "corrupt"  # why a session or a lease was cut
RETRY_NS = NS_PER_S  # after a verification that could not be made


class Verifier:
    """Starts verifications of one cache state."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._background: set[int] = set()  # operations
        self._retry_at_ns = 0

    def is_needed(self, block: Block, *, always: bool = False) -> bool:
        """Whether a block at rest in DRAM is to be verified before a load may have it.

        With `verify_on_load`, or `always`, a block is verified unless it is being hashed or written
        just now.
        """
        if block.io is not BlockIo.IDLE:
            return False
        is_wanted = always or self._state.limits.verify_on_load
        return block.is_unverified or (is_wanted and bool(block.checksums))

    def start(self, block: Block, *, urgent: bool) -> None:
        """Verify a block at rest; then `verify_done`. Costs O(leases) if it has readers."""
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
        """Have adopted blocks verified in the background."""
        state = self._state
        if state.now_ns < self._retry_at_ns:
            return
        while state.unverified and len(self._background) < MAX_BACKGROUND:
            self.start(next(iter(state.unverified.values())), urgent=False)

    def retry_at_ns(self) -> int | None:
        """Return when `issue` is to be called again; None if a completion calls it anyhow."""
        return self._retry_at_ns if self._state.unverified and not self._background else None

    def ended(self, op_id: int) -> Arrival:
        """Take a verification out of those under way, however it ended."""
        self._background.discard(op_id)
        return self._state.under_way.end_verify(op_id)

    def passed(self, block: Block) -> None:
        """Record that a block's bytes are good."""
        self._state.outbox.count("verified_blocks")
        self._state.blocks.set_unverified(block, is_unverified=False)

    def failed(self, block: Block) -> None:
        """Record that a block could not be verified, which says nothing of its bytes."""
        if block.is_unverified:
            self._state.unverified[block.key] = block
            self._retry_at_ns = self._state.now_ns + RETRY_NS


class Hasher:
    """Issues and completes hashes of one cache state.

    Args:
        state: of the cache.
        write: takes blocks that have been hashed.
    """

    def __init__(self, state: CacheState, write: Callable[[Iterable[Block]], None]) -> None:
        self._state = state
        self._write = write

    def request(self, blocks: Iterable[Block]) -> None:
        """Have a session's dirty blocks hashed; those that are go to the writer."""
        ready = []
        for block in blocks:
            if block.unhashed and block.io is BlockIo.IDLE:
                self._start(block)
            else:
                ready.append(block)
        self._write(ready)

    def hash_done(self, op_id: int, checksums: bytes) -> None:
        """See CacheEngine.hash_done."""
        state = self._state
        block = state.under_way.end_hash(op_id)
        if checksums:
            state.blocks.set_contents(block, block.token_ids, checksums)
            state.journal.put_block(block)
        else:  # tried again when its session stores again
            state.outbox.count("hash_errors")
        state.settle(block)
        self._write((block,))
        state.outbox.on_space_freed()

    def _start(self, block: Block) -> None:
        state = self._state
        assert block.slot_id is not None, "an unhashed block is in DRAM"
        op_id = state.under_way.begin_hash(block)
        state.outbox.add(HashSlot(op_id, block.slot_id, block.num_tokens))


def report_corrupt(state: CacheState, block: Block, tier: Tier) -> None:
    """Count and report that a block's copy in this tier is not what was stored."""
    state.outbox.count("blocks_corrupt")
    state.outbox.count(f"blocks_corrupt_{tier.value}")
    fields = {"block": block.key.hex(), "tier": tier.value, "num_sessions": len(block.users)}
    state.outbox.emit(BLOCK_CORRUPT, block.last_user, fields)
    state.record_block_move(block, MoveKind.CORRUPT, tier.value)
