"""Every operation of a performer is answered once; journal and index are written in order."""

import asyncio
import errno

import pytest

from kvd.core.records.actions import (
    DropBlock,
    DropSession,
    HashSlots,
    IoOutcome,
    PutBlock,
    PutSession,
    ReadBlock,
    VerifyExtent,
    VerifySlot,
    WriteJournal,
)
from kvd.core.records.entries import (
    AdoptedSlot,
    BlockRecord,
    CommittedSlot,
    SessionRecord,
    WritingSlot,
)
from kvd.runtime.performer import MAX_INDEX_BYTES
from kvd.tiers.manifest import MAX_QUEUED_BYTES
from shared.types.units import SECTOR_BYTES
from tests.kvd.runtime.performer_world import DEADLINE_S, ENGINE_ID, IDENTITY, KEY, LAYOUT, LEASE


@pytest.mark.parametrize("num_tokens", [16, 3])
@pytest.mark.parametrize("layered", [False, True])
async def test_a_block_goes_to_ssd_and_back(world, num_tokens, layered):
    """Written, read into another slot, hashed and verified there: the same bytes."""
    write, stored = world.write_action(1, 0, 2, num_tokens)
    world.performer.perform(write)
    assert await world.until_idle() == [("write_done", 1, IoOutcome.OK)]
    world.performer.perform(ReadBlock(2, write.key, write.extent, 1, num_tokens, layered))
    assert await world.until_idle() == [("read_done", 2, IoOutcome.OK, stored)]
    world.performer.perform(HashSlots(3, ((1, num_tokens), (0, num_tokens))))
    assert await world.until_idle() == [("hash_done", 3, [stored.checksums] * 2)]
    world.performer.perform(VerifySlot(4, 1, num_tokens, stored.checksums, urgent=True))
    world.performer.perform(VerifyExtent(5, write.key, write.extent, num_tokens))
    done = await world.until_idle()
    assert sorted(done) == [("verify_done", 4, IoOutcome.OK), ("verify_done", 5, IoOutcome.OK)]


async def test_wrong_bytes_are_corrupt(world):
    """In a slot and on SSD, and for another key."""
    write, stored = world.write_action(1, 0, 0)
    world.performer.perform(write)
    await world.until_idle()
    world.arena.slots.slot(0)[-1] ^= 1
    world.performer.perform(VerifySlot(2, 0, 16, stored.checksums, urgent=False))
    world.performer.perform(VerifyExtent(3, b"x" * 16, write.extent, 16))
    world.performer.perform(ReadBlock(4, b"x" * 16, write.extent, 1, 16))
    done = sorted(await world.until_idle(), key=lambda entry: entry[1])
    assert done == [
        ("verify_done", 2, IoOutcome.CORRUPT),
        ("verify_done", 3, IoOutcome.CORRUPT),
        ("read_done", 4, IoOutcome.CORRUPT, None),
    ]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "injected"), RuntimeError("injected")])
async def test_failed_operations_are_answered(world, error):
    """An error of the device, or of kvd: TRANSIENT, once."""
    world.faults.read_error = world.faults.write_error = error
    write, _ = world.write_action(1, 0, 0)
    world.performer.perform(write)
    world.performer.perform(ReadBlock(2, write.key, 0, 1, 16, layered=True))
    world.performer.perform(VerifyExtent(3, write.key, 0, 16))
    done = sorted(await world.until_idle(), key=lambda entry: entry[1])
    transient = IoOutcome.TRANSIENT
    assert done == [
        ("write_done", 1, transient),
        ("read_done", 2, transient, None),
        ("verify_done", 3, transient),
    ]


async def test_operations_on_a_closed_arena_are_answered(world):
    """The arena is given up while a hash is queued: no checksums."""
    world.performer.use_arena(None)
    world.performer.perform(HashSlots(1, ((0, 16), (1, 16))))
    assert await world.until_idle() == [("hash_done", 1, [b"", b""])]


@pytest.mark.parametrize("num_tokens", [16, 3])
async def test_active_bytes_are_counted(world, num_tokens):
    """The pool gets the bytes of each write and read: its budget is in bytes."""
    write, _ = world.write_action(1, 0, 0, num_tokens)
    shape = world.volume.shape
    num_bytes = shape.num_sectors(num_tokens) * SECTOR_BYTES
    for action, expected in (
        (write, num_bytes),
        (ReadBlock(2, write.key, 0, 1, num_tokens), num_bytes - shape.header_bytes),
    ):
        world.faults.hold.clear()
        world.performer.perform(action)
        async with asyncio.timeout(DEADLINE_S):
            while len(world.pool):  # noqa: ASYNC110  # until it runs, and is held there
                await asyncio.sleep(0.001)
        assert world.pool.bytes_in_flight == expected
        world.faults.hold.set()
        await world.until_idle()


async def test_the_journal_is_written_at_once(world):
    """Records exist when perform() returns, with the identity of the writer."""
    writing = WritingSlot(generation=4, lease_id=LEASE, engine_id=ENGINE_ID)
    committed = CommittedSlot(5, b"k" * 16, 16, b"t" * 64, b"c" * 64)
    world.performer.perform(WriteJournal({0: writing, 1: committed, 2: committed}))
    world.performer.perform(WriteJournal({2: None}))
    adopted, written = world.arena.journal.read_all()
    assert adopted == [AdoptedSlot(1, committed)]
    assert [(w.slot_id, w.generation, w.lease_id, w.writer) for w in written] == [
        (0, 4, LEASE, IDENTITY)
    ]


async def test_index_rows_are_kept_in_order(world):
    """A dropped block is reported after its commit; rows count as uncommitted before theirs."""
    block = BlockRecord(b"k" * 16, 0, 16)
    session = SessionRecord(KEY, b"\0", 7)
    world.performer.perform(PutBlock(block))
    world.performer.perform(PutSession(session))
    assert world.performer.num_uncommitted == 1
    await world.until_idle()
    world.performer.perform(PutBlock(BlockRecord(b"l" * 16, 9, 16)))
    world.performer.perform(DropBlock(1, block.key))
    world.performer.perform(DropSession(KEY))
    assert await world.until_idle() == [("drop_done", 1)]
    rows = world.manifest.rows(LAYOUT)
    assert (rows.block_keys, list(rows.extents)) == (b"l" * 16, [9])


async def test_a_full_queue_of_rows_reports_when_it_is_empty(world):
    """One call asks for rows again, however many requests there were."""
    spans = b"\0" * (MAX_QUEUED_BYTES // 4)
    assert world.performer.index_room == MAX_INDEX_BYTES
    for number in range(5):
        key = KEY._replace(session_id=str(number))
        world.performer.perform(PutSession(SessionRecord(key, spans, 7)))
    assert world.performer.index_room == 0
    for _ in range(3):
        world.performer.await_room()
    async with asyncio.timeout(DEADLINE_S):
        while not world.num_completions:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert world.performer.index_room == MAX_INDEX_BYTES
    assert world.num_completions == 1
