"""The invariants of the cache engine, as code: O(everything), for tests and for `kvd verify`.

Pure. Raises AssertionError on the first broken one (house rule: a broken invariant stops the
daemon).
"""

from collections import Counter

from kvd.core.block import Block, BlockIo
from kvd.core.leases import LoadLease, NewBlock
from kvd.core.records import Tier
from kvd.core.slots import SlotState
from kvd.core.state import CacheState


def check(state: CacheState) -> None:
    """Check everything."""
    _check_slots(state)
    _check_extents(state)
    _check_sessions(state)
    _check_leases(state)
    for block in state.blocks:
        _check_block(state, block)
    _check_counts(state)


def _check_slots(state: CacheState) -> None:
    """Each slot belongs to one block or one store lease, or is free."""
    owners: dict[int, SlotState] = {}
    for block in state.blocks:
        if block.slot_id is not None:
            assert block.slot_id not in owners, f"slot {block.slot_id} has two owners"
            is_filling = block.io is BlockIo.READING
            owners[block.slot_id] = SlotState.WRITING if is_filling else SlotState.COMMITTED
    for lease in state.leases:
        for _, part in () if isinstance(lease, LoadLease) else lease.parts:
            if isinstance(part, NewBlock):
                assert part.slot_id not in owners, f"slot {part.slot_id} has two owners"
                owners[part.slot_id] = SlotState.WRITING
    for slot_id in range(len(state.slots)):
        expected = owners.get(slot_id, SlotState.FREE)
        assert state.slots.state(slot_id) is expected, f"slot {slot_id} should be {expected}"
    assert state.slots.num_free == len(state.slots) - len(owners), "free slots are counted right"


def _check_extents(state: CacheState) -> None:
    """Each extent in use belongs to one block, one write or one drop."""
    used = [block.extent for block in state.blocks if block.extent is not None]
    used += [op.extent for op in state.writes.values()]
    used += [extent for extent in state.drops.values() if extent is not None]
    assert len(used) == len(set(used)), "an extent has two owners"
    assert state.extents.num_used == len(used), "extents in use are counted right"


def _check_sessions(state: CacheState) -> None:
    """Sessions and blocks name each other; all but pinned sessions are in the order of all."""
    users: dict[bytes, set[object]] = {}
    for key, session in state.sessions.items():
        assert session.key == key, "a session is registered under its key"
        assert session.spans, f"{key} is stored without a span"
        for span in session.spans:
            block = state.blocks.get(span.block_key)
            assert block is not None, f"{key} names a block that is gone"
            assert span.num_tokens > 0, f"{key} has an empty span"
            assert 0 <= span.start <= block.num_tokens - span.num_tokens, (
                f"{key} has a span outside its block"
            )
            users.setdefault(span.block_key, set()).add(key)
    for block in state.blocks:
        assert set(block.users) == users.get(block.key, set()), (
            "a block's users are the sessions that name it"
        )
    ranked = set(state.policy.victims(None))
    assert ranked == {key for key, s in state.sessions.items() if not s.pinned}, (
        "all but pinned sessions rank"
    )


def _check_leases(state: CacheState) -> None:
    """Leases are counted in their blocks, and wait in exactly the reads of their entries."""
    readers: Counter[int] = Counter()
    holders: Counter[int] = Counter()
    for lease in state.leases:
        if isinstance(lease, LoadLease):
            readers.update(id(block) for block, _ in lease.entries)
            waits = {block.key for block, _ in lease.entries if block.io is BlockIo.READING}
            joined = {k for k, op in state.read_of.items() if lease.lease_id in op.waiting}
            assert waits == joined, "a lease waits for its reads and no others"
            assert lease.num_waiting == len(waits), "a lease counts its reads"
            for block, span in lease.entries:
                assert block.slot_id == span.slot_id, "a leased slot stays with its block"
                assert block.generation == span.generation, "a leased slot is not given away"
        else:
            holders.update(id(part) for _, part in lease.parts if isinstance(part, Block))
    for block in state.blocks:
        assert block.readers == readers[id(block)], "a block's readers are its load leases"
        assert block.holders == holders[id(block)], "a block's holders are the store leases on it"


def _check_block(state: CacheState, block: Block) -> None:
    """A block is somewhere, wanted, and answered for in every tier it is in."""
    assert block.slot_id is not None or block.extent is not None, "a block has a place"
    assert block.wanted or block.io is not BlockIo.IDLE, "a block nobody wants is gone"
    if block.io is BlockIo.READING:
        assert block.slot_id is not None and block.extent is not None, "a read has both its ends"  # noqa: PT018
    if block.io is BlockIo.WRITING:
        assert block.dirty, "only dirty blocks are written"
    if block.dirty:
        assert block.token_ids, "a dirty block has what its row needs"
    if block.slot_id is None:
        assert not block.readers, "a read block keeps its slot"
        assert not block.token_ids, "token ids are kept for blocks in DRAM only"
    for tier in Tier:
        if block.users and block.resides(tier):
            is_answered = any(
                state.sessions[k].pinned or state.policy.ranks(k, tier) for k in block.users
            )
            assert is_answered, f"nobody answers for a block in {tier.value}"


def _check_counts(state: CacheState) -> None:
    """Counts, operations and the write queue agree with the blocks."""
    blocks = state.blocks
    assert blocks.num_dram == sum(block.slot_id is not None for block in blocks), (
        "DRAM blocks are counted right"
    )
    assert blocks.num_ssd == sum(block.extent is not None for block in blocks), (
        "SSD blocks are counted right"
    )
    assert blocks.num_dirty == sum(block.dirty for block in blocks), (
        "dirty blocks are counted right"
    )
    reading = {block.key for block in blocks if block.io is BlockIo.READING}
    writing = {block.key for block in blocks if block.io is BlockIo.WRITING}
    assert reading == set(state.read_of) == {op.block.key for op in state.reads.values()}, (
        "reads are registered"
    )
    assert writing == {op.block.key for op in state.writes.values()}, "writes are registered"
    for key, block in state.unwritten.items():
        assert blocks.get(key) is block, "only blocks of the index wait to be written"
        assert block.dirty, "only dirty blocks wait to be written"
        assert block.io is BlockIo.IDLE, "a block waits to be written once"
