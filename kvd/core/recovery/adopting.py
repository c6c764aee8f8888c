"""Adoption: take over the slots that an earlier kvd has left in the arena (D4, D10).

Pure. The journal says what the slots hold. A committed slot becomes an unverified block: its bytes
are compared with their checksums before they are used. A slot that an engine was filling stays
reserved for that engine, for as long as it may still write: it is quarantined under a
RestoredLease. All other slots are free.

`adopt` is called before the index is restored, so that sessions are not cut at blocks that are in
DRAM only; `settle` is called after it.
"""

from collections.abc import Sequence

from kvd.core.records.entries import AdoptedSlot, OrphanSlot
from kvd.core.records.extent_shape import CHECKSUM_BYTES
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import RestoredLease
from kvd.core.state.slots import SlotState
from shared.types.block_key import KEY_BYTES, TOKEN_BYTES


def adopt(
    state: CacheState,
    adopted: Sequence[AdoptedSlot],
    orphans: Sequence[OrphanSlot],
    first_lease_id: int,
) -> None:
    """Adopt committed slots as blocks and quarantine orphans; clear slots with a bad record.

    Args:
        state: the cache's tables, still without sessions.
        adopted: committed slots, as the journal describes them.
        orphans: slots that an engine was filling.
        first_lease_id: leases are numbered from here on, or above those of the orphans.
    """
    for orphan in orphans:
        if _is_free(state, orphan.slot_id):
            _quarantine(state, orphan)
    state.leases.start_at(max([first_lease_id, *(lease.lease_id + 1 for lease in state.leases)]))
    for slot in adopted:
        if not _is_free(state, slot.slot_id):
            continue
        state.journal.states[slot.slot_id] = SlotState.COMMITTED
        if _is_sound(state, slot):
            _add_block(state, slot)
        else:
            state.clear_slot(slot.slot_id)
    state.slots.finish_adoption()


def settle(state: CacheState) -> None:
    """Forget adopted blocks that no session uses, and queue the others for verification."""
    adopted = [block for block in state.blocks if block.is_unverified]
    used = []
    for block in adopted:
        if block.users:
            used.append((state.sessions[block.newest_user()].last_access_ns, block))
        else:
            state.forget(block)
    # The most recently used blocks are verified first.
    for _, block in sorted(used, key=lambda pair: pair[0], reverse=True):
        state.unverified[block.key] = block
    # They enter DRAM's eviction order as they were used: least recently used first.
    for block in reversed(state.unverified.values()):
        state.settle(block)
    state.outbox.count("adopted_blocks", len(used))


def _is_free(state: CacheState, slot_id: int) -> bool:
    is_slot = 0 <= slot_id < len(state.slots)
    return is_slot and state.slots.state(slot_id) is SlotState.FREE


def _quarantine(state: CacheState, orphan: OrphanSlot) -> None:
    """Reserve a slot for the engine that was filling it."""
    writing = orphan.writing
    lease = state.leases.get(writing.lease_id)
    if not isinstance(lease, RestoredLease):
        lease = RestoredLease(writing.lease_id, writing.engine_id, since_ns=state.now_ns)
        state.leases.add(lease)
    state.leases.quarantine(lease, orphan.slot_id, writing.generation)
    state.slots.adopt(orphan.slot_id, writing.generation, is_committed=False)
    state.journal.states[orphan.slot_id] = SlotState.WRITING


def _is_sound(state: CacheState, slot: AdoptedSlot) -> bool:
    """Whether a slot's journal record is plausible, and its block is not adopted already."""
    block = slot.block
    fewest = state.layout.fewest_block_tokens
    return (
        fewest <= block.num_tokens <= state.layout.block_tokens
        and len(block.key) == KEY_BYTES
        and len(block.token_ids) == block.num_tokens * TOKEN_BYTES
        and len(block.checksums) == len(state.layout.layers) * CHECKSUM_BYTES
        and state.blocks.get(block.key) is None
    )


def _add_block(state: CacheState, slot: AdoptedSlot) -> None:
    """Make an unverified block of a committed slot."""
    record = slot.block
    block = Block(record.key, record.num_tokens)
    state.slots.adopt(slot.slot_id, record.generation, is_committed=True)
    state.blocks.add(block)
    state.blocks.enter_dram(block, slot.slot_id, record.generation)
    state.blocks.set_contents(block, record.token_ids, record.checksums)
    state.blocks.set_unverified(block, is_unverified=True)
