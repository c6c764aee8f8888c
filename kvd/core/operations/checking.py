"""Checks of the cache engine's invariants, for tests; O(everything).

Pure. Each check raises AssertionError on the first broken invariant. (Elsewhere, too, a broken
invariant is an AssertionError, and stops the daemon.)
"""

from collections import Counter
from itertools import chain, pairwise

from kvd.core.records.entries import Pin
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.compaction_run import Phase, Target
from kvd.core.state.leases import LeasePhase, LoadLease, StoreLease
from kvd.core.state.slots import SlotState
from kvd.core.state.stored_parts import group_parts, interleave, is_window
from shared.types.block_key import TOKEN_BYTES


def check(state: CacheState) -> None:
    """Check all invariants of a cache state."""
    _check_slots(state)
    _check_extents(state)
    _check_sessions(state)
    _check_packed(state)
    _check_parts(state)
    _check_tenants(state)
    _check_leases(state)
    for block in state.blocks:
        _check_block(state, block)
    _check_counts(state)
    _check_operations(state)
    _check_looking_ahead(state)
    state.turns.check()
    state.history.check()


def _check_slots(state: CacheState) -> None:
    """Check that each slot is free or has one owner, and that the journal agrees."""
    owners: dict[int, SlotState] = {}
    journal: dict[int, SlotState] = {}
    for block in state.blocks:
        if block.slot_id is not None:
            assert block.slot_id not in owners, f"slot {block.slot_id} has two owners"
            is_filling = block.io is BlockIo.READING
            owners[block.slot_id] = SlotState.WRITING if is_filling else SlotState.COMMITTED
            if block.checksums:
                journal[block.slot_id] = SlotState.COMMITTED
    for lease in state.leases:
        for slot_id, _ in () if isinstance(lease, LoadLease) else lease.slots():
            assert slot_id not in owners, f"slot {slot_id} has two owners"
            owners[slot_id] = journal[slot_id] = SlotState.WRITING
    for target in _copied_to(state):
        assert target.slot_id not in owners, f"slot {target.slot_id} has two owners"
        owners[target.slot_id] = SlotState.WRITING  # a next kvd finds it free
    for slot_id in (slot_id for slot_ids in state.under_way.wipes.values() for slot_id in slot_ids):
        assert slot_id not in owners, f"slot {slot_id} has two owners"
        owners[slot_id] = SlotState.WRITING
    for slot_id in range(len(state.slots)):
        expected = owners.get(slot_id, SlotState.FREE)
        assert state.slots.state(slot_id) is expected, f"slot {slot_id} should be {expected}"
    assert state.slots.num_free == len(state.slots) - len(owners), "free slots are counted right"
    assert state.journal.states == journal, "the journal says what slots hold"


def _check_extents(state: CacheState) -> None:
    """Check that each SSD sector in use belongs to one block, write, drop or relocation."""
    runs = [
        (b.extent, state.shape.num_sectors(b.num_tokens))
        for b in state.blocks
        if b.extent is not None
    ]
    runs += [
        (record.extent, state.shape.num_sectors(record.num_tokens))
        for session in state.sessions.values()
        for record in session.tail_blocks()
    ]
    runs += [(op.extent, op.num_sectors) for op in state.under_way.writes.values()]
    runs += [run for run in state.under_way.drops.values() if run is not None]
    moved = [(op.target, op.num_sectors) for op in state.under_way.relocations.values()]
    moved += state.under_way.replacements.values()
    runs = sorted([*runs, *moved])
    for (extent, num_sectors), (following, _) in pairwise(runs):
        assert extent + num_sectors <= following, f"extents {extent} and {following} overlap"
    num_used = sum(num_sectors for _, num_sectors in runs)
    assert state.extents.num_used_sectors == num_used, "sectors in use are counted right"
    num_whole = len({extent // state.extents.sectors_per_extent for extent, _ in runs})
    assert state.extents.num_used == num_whole, "extents in use are counted right"
    num_doubled = sum(not state.extents.is_packed(num_sectors) for _, num_sectors in moved)
    num_over = max(0, num_whole - num_doubled - len(state.extents))
    assert state.extents.num_over == num_over, "blocks that are relocated count once"


def _check_sessions(state: CacheState) -> None:
    """Check that sessions and blocks name each other, and that sessions rank unless hard-pinned."""
    users: dict[bytes, set[object]] = {}
    for key, session in state.sessions.items():
        assert session.key == key, "a session is registered under its key"
        assert session.spans or session.packed, f"{key} is stored without a span"
        for span in session.spans:
            block = state.blocks.get(span.block_key)
            assert block is not None, f"{key} names a block that is gone"
            if span.num_tokens:
                assert 0 <= span.start <= block.num_tokens - span.num_tokens, (
                    f"{key} has a span outside its block"
                )
            else:
                assert not block.num_tokens, f"{key} has an empty span"
            users.setdefault(span.block_key, set()).add(key)
    for block in state.blocks:
        assert set(block.users) == users.get(block.key, set()), (
            "a block's users are the sessions that name it"
        )
    ranked = set(state.policy.victims(None, state.now_ns))
    assert ranked == {key for key, s in state.sessions.items() if s.pin is not Pin.HARD}, (
        "all but hard-pinned sessions rank"
    )


def _check_packed(state: CacheState) -> None:
    """Check that packed blocks have one user, are only on SSD, and are found by their heads."""
    heads: dict[bytes, object] = {}
    keys: set[bytes] = set()
    for session in state.sessions.values():
        heads |= dict.fromkeys(state.tails.head_keys(session), session.key)
        spans = list(session.tail_spans())
        for span, record in zip(spans, session.tail_blocks(), strict=True):
            assert record.key not in keys, "a packed block is used once"
            assert state.blocks.get(record.key) is None, "a packed block is not in the index"
            assert span.block_key == record.key, "packed spans and blocks go together"
            assert (
                0 <= span.start < span.start + span.num_tokens <= record.num_tokens
                or span.num_tokens == record.num_tokens == 0
            ), "a packed span lies in its block"
            keys.add(record.key)
        if session.packed and session.pin is not Pin.HARD:
            assert state.policy.ranks(session.key, Tier.SSD), "a session answers for what it packs"
    assert state.tails.heads == heads, "packed blocks are found"
    assert state.tails.num_blocks == len(keys), "packed blocks are counted right"


def _check_parts(state: CacheState) -> None:
    """Check that sessions have all parts of a state or window or none, in place and indexed."""
    users: dict[bytes, set[object]] = {}
    for key, session in state.sessions.items():
        spans = [*session.spans, *session.tail_spans()]
        runs = [span for span in spans if span.num_tokens]
        beside = group_parts(spans)
        for part_key, parts in beside.items():
            assert len(parts) == state.layout.part_slots, f"{key} has parts without the others"
            assert len({part[1:] for part in parts}) == 1, "parts say the same of what they are of"
            assert is_window(parts[0]) == bool(state.layout.window), "the layout says which of both"
            users.setdefault(part_key, set()).add(key)
        if beside:
            is_in_place = spans == interleave(runs, beside.values())
            assert is_in_place, "a state is behind its tokens, a window behind its block"
    found = [] if state.stored_parts is None else list(state.stored_parts)
    assert {stored.key: set(stored.users) for stored in found} == users, "parts are found"


def _check_tenants(state: CacheState) -> None:
    """Check that tenants are charged for their blocks, and for slots that are being filled."""
    num_blocks: Counter[str] = Counter()
    num_sessions: Counter[str] = Counter()
    ranked: dict[str, set[object]] = {}
    for key, session in state.sessions.items():
        num_blocks[key.tenant] += session.num_packed
        num_sessions[key.tenant] += 1
        if session.pin is not Pin.HARD:
            ranked.setdefault(key.tenant, set()).add(key)
    for block in state.blocks:
        num_blocks[block.tenant] += 1
        assert all(user.tenant == block.tenant for user in block.users), "tenants share no block"
    for lease in state.leases:
        if isinstance(lease, StoreLease):
            num_blocks[lease.key.tenant] += len(lease.slots())
    if state.compaction is not None:
        num_blocks[state.compaction.key.tenant] += len(_copied_to(state))
    for usage in state.tenants:
        used_bytes = num_blocks.pop(usage.tenant, 0) * state.layout.block_bytes
        assert usage.used_bytes == used_bytes, "a tenant is charged for what it has"
        assert usage.num_sessions == num_sessions[usage.tenant], "its sessions are counted right"
        order = state.tenants.order_of(usage.tenant)
        assert order is None or set(order) == ranked.get(usage.tenant, set()), (
            "all sessions of a tenant with a quota rank, but hard-pinned ones"
        )
    assert not +num_blocks, "every block is charged to a tenant"
    pins = Counter(session.pin for session in state.sessions.values())
    assert all(pins[pin] == num for pin, num in state.num_pins.items()), "pins are counted right"
    retained = [s for s in state.sessions.values() if s.retain_ns is not None]
    assert state.num_retained == len(retained), "retained sessions are counted right"
    assert not any(s.ended for s in retained), "what has ended is not retained"
    superseded = [s for s in state.sessions.values() if s.superseded]
    assert not any(s.awaited_tools for s in superseded), "what is superseded awaits nothing"


def _check_leases(state: CacheState) -> None:
    """Check that blocks count their leases, and that leases wait for exactly their arrivals."""
    readers: Counter[int] = Counter()
    holders: Counter[int] = Counter()
    orphans = [
        lease
        for lease in state.leases
        if not isinstance(lease, LoadLease) and lease.phase is LeasePhase.ORPHAN
    ]
    for lease in state.leases:
        if isinstance(lease, LoadLease):
            readers.update(id(block) for block, _ in lease.entries)
            _check_load(state, lease)
        elif isinstance(lease, StoreLease):
            holders.update(id(part) for _, part in lease.all_parts() if isinstance(part, Block))
    holders.update(map(id, _held_for_compaction(state)))
    holders.update(id(op.block) for op in state.under_way.relocations.values())
    for block in state.blocks:
        assert block.readers == readers[id(block)], "a block's readers are its load leases"
        assert block.holders == holders[id(block)], "a block's holders are counted right"
    assert state.leases.num_orphans == len(orphans), "orphan leases are counted right"
    num_quarantined = sum(len(lease.slots()) for lease in orphans)
    assert state.leases.num_quarantined_slots == num_quarantined, (
        "quarantined slots are counted right"
    )


def _copied_to(state: CacheState) -> list[Target]:
    """Return the slots that a compaction is filling."""
    run = state.compaction
    return run.targets if run is not None and run.phase is Phase.COPYING else []


def _held_for_compaction(state: CacheState) -> list[Block]:
    """Return a compaction's new blocks without a user, or its old ones that must still be kept."""
    run = state.compaction
    if run is None or run.phase is Phase.COPYING:
        return []
    return run.new_blocks if run.phase is Phase.WRITING else run.sources


def _check_load(state: CacheState, lease: LoadLease) -> None:
    """Check that a load lease waits for exactly its arriving blocks, in their slots."""
    arriving = {block.key for block, _ in lease.entries if block.io.is_arriving}
    waits = {key for key in arriving if lease.lease_id not in state.under_way.arrival_of[key].early}
    joined = {k for k, op in state.under_way.arrival_of.items() if lease.lease_id in op.waiting}
    assert waits == joined, "a lease waits for its reads and verifications and no others"
    assert lease.num_waiting == len(waits), "a lease counts what it waits for"
    assert lease.is_tracked or not waits, "a lease that waits has its progress published"
    for block, span in lease.entries:
        assert block.slot_id == span.slot_id, "a leased slot stays with its block"
        assert block.generation == span.generation, "a leased slot is not given away"


def _check_block(state: CacheState, block: Block) -> None:
    """Check that a block has a place, a user, and a user that ranks in every tier it is in."""
    assert block.slot_id is not None or block.extent is not None, "a block has a place"
    assert block.is_needed or block.io is not BlockIo.IDLE, "a block nobody wants is gone"
    if block.io is BlockIo.READING:
        assert block.slot_id is not None, "a read has a slot"
        assert block.extent is not None, "a read has an extent"
    if block.io is BlockIo.HASHING:
        assert block.unhashed, "only unhashed blocks are hashed"
    if block.io is BlockIo.WRITING:
        assert block.dirty, "only dirty blocks are written"
        assert block.checksums, "only hashed blocks are written"
    if block.io in (BlockIo.VERIFYING, BlockIo.WRITING, BlockIo.COPYING):
        assert block.checksums, "what is verified, written or copied has checksums"
    if block.is_unverified:
        assert block.slot_id is not None, "only a copy in DRAM may be unverified"
        assert not block.readers or block.io is BlockIo.VERIFYING, "unverified bytes are not read"
        assert block.io in (BlockIo.IDLE, BlockIo.VERIFYING), "unverified bytes are not written"
    _check_contents(block)
    for tier in Tier:
        num_answer = sum(
            state.sessions[k].pin is Pin.HARD or state.policy.ranks(k, tier) for k in block.users
        )
        assert block.num_answer(tier) == num_answer, "who answers for a block is counted right"
        if block.users and block.resides(tier):
            assert num_answer, f"nobody answers for a block in {tier.value}"
    num_clean = sum(
        state.sessions[k].pin is Pin.HARD or state.policy.offers(k) for k in block.users
    )
    assert block.num_answer_clean == num_clean, "who answers for clean blocks is counted right"
    assert num_clean or not block.users or not block.clean, "nobody answers for a clean block"
    assert not block.users or block.last_user in block.users, "the last user is one of them"


def _check_contents(block: Block) -> None:
    """Check that token ids and checksums are known exactly for blocks in DRAM."""
    if block.slot_id is None or block.io is BlockIo.READING:
        assert not block.token_ids, "token ids are kept for blocks in DRAM only"
        assert not block.checksums, "checksums are kept for blocks in DRAM only"
        assert block.io is BlockIo.READING or not block.readers, "a read block keeps its slot"
    else:
        num_bytes = block.num_tokens * TOKEN_BYTES
        assert len(block.token_ids) == num_bytes, "token ids of blocks in DRAM are known"
        assert block.checksums or block.extent is None, "what is on SSD was hashed"


def _check_counts(state: CacheState) -> None:
    """Check the counters of blocks against a recount."""
    blocks = state.blocks
    counts = {
        "DRAM": (blocks.num_dram, sum(block.slot_id is not None for block in blocks)),
        "SSD": (blocks.num_ssd, sum(block.extent is not None for block in blocks)),
        "dirty": (blocks.num_dirty, sum(block.dirty for block in blocks)),
        "unhashed": (blocks.num_unhashed, sum(block.unhashed for block in blocks)),
        "unverified": (blocks.num_unverified, sum(block.is_unverified for block in blocks)),
    }
    for name, (counted, there_are) in counts.items():
        assert counted == there_are, f"{name} blocks are counted right"


def _check_operations(state: CacheState) -> None:
    """Check that moving blocks are registered with their operation, and queued ones are idle."""
    blocks = state.blocks
    run = state.compaction
    sources = run.sources if run is not None and run.phase is Phase.COPYING else []
    by_io = {
        BlockIo.COPYING: sources,
        BlockIo.READING: [read.block for read in state.under_way.reads.values()],
        BlockIo.VERIFYING: [verify.block for verify in state.under_way.verifies.values()],
        BlockIo.HASHING: list(chain.from_iterable(state.under_way.hashes.values())),
        BlockIo.WRITING: [
            op.block for op in state.under_way.writes.values() if blocks.holds(op.block)
        ],
    }
    for io, under_way in by_io.items():
        assert {block.key for block in blocks if block.io is io} == {b.key for b in under_way}, (
            f"blocks that are {io.value} are registered"
        )
        assert all(map(blocks.holds, under_way)), f"blocks that are {io.value} are in the index"
    arriving = (*state.under_way.reads.values(), *state.under_way.verifies.values())
    assert state.under_way.arrival_of == {op.block.key: op for op in arriving}, (
        "arrivals are registered"
    )
    copied = {op.source: op for op in state.under_way.relocations.values() if not op.is_void}
    assert state.under_way.relocated == copied, "copies of extents are registered"
    for op in copied.values():
        assert not blocks.holds(op.block) or op.block.extent == op.source, "a block that left voids"
    for block in state.unwritten:
        assert blocks.holds(block), "only blocks of the index wait to be written"
        assert block.writable, "only dirty blocks at rest wait to be written"
    for key, block in state.unverified.items():
        assert blocks.get(key) is block, "only blocks of the index wait to be verified"
        assert block.is_unverified, "only unverified blocks wait to be verified"
        assert block.io is BlockIo.IDLE, "a block waits to be verified once"
    verifying = [block for block in blocks if block.is_unverified and block.io is BlockIo.VERIFYING]
    assert blocks.num_unverified == len(state.unverified) + len(verifying), (
        "every unverified block is verified in time"
    )


def _check_looking_ahead(state: CacheState) -> None:
    """Check the queue, the blocks that were read ahead, and the refused writes."""
    state.placement.queue.check()
    for block in state.blocks:
        if block.is_ahead:
            assert block.slot_id is not None, "what was read ahead is in DRAM"
            assert not block.readers, "what was read ahead and is loaded counts as used"
    for key, block in state.unwritten.refused.items():
        assert state.blocks.get(key) is block, "only blocks of the index are refused"
        assert block.dirty, "a refused block is in DRAM only"
        assert not state.unwritten.holds(block), "a refused block does not wait to be written"
