"""The performer over a real arena, real files and the real index: every operation is answered once.

In the engine's place stands a list: what completions would tell it.
"""

import asyncio
import errno
import os
import threading

import pytest

from kvd.core.records.actions import (
    ClearSlot,
    DropBlock,
    DropSession,
    HashSlot,
    IoOutcome,
    PutBlock,
    PutSession,
    PutSlot,
    ReadBlock,
    TrackLoad,
    UntrackLoad,
    VerifyExtent,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.records import (
    AdoptedSlot,
    BlockRecord,
    CommittedSlot,
    SessionRecord,
    StoredBlock,
    WritingSlot,
)
from kvd.host.process_identity import ProcessIdentity
from kvd.runtime.completions import Ended
from kvd.runtime.performer import MAX_ROW_BYTES, Owners, Performer
from kvd.tiers.arena_store import ArenaOptions, ArenaStore
from kvd.tiers.faults import NoFaults
from kvd.tiers.io_threads import IoPool, Priority
from kvd.tiers.manifest import MAX_QUEUED_BYTES, LayoutRow, Manifest
from kvd.tiers.segment_files import SpaceBudget
from kvd.tiers.slot_rows import BlockHasher
from kvd.tiers.volume import SegmentVolume
from shared.kvd_client.progress_words import FAILED_BIT, LAYERS_MASK, ProgressWords
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.session_key import SessionKey
from shared.types.units import SECTOR_BYTES

# Slices of 512 KiB: a layered read has four groups.
LAYOUT = KVLayout(
    "ab" * 16, tuple(Layer((Component("k", (8192,), "float32"),)) for _ in range(8)), 16
)
NUM_SLOTS = 6
OWNER, LEASE = 3, 77
IDENTITY = ProcessIdentity(os.getpid(), 123, b"i" * 16)
KEY = SessionKey("tenant", LAYOUT.model, "a")
DEADLINE_S = 30


class Engine:
    """Notes the completions, in order."""

    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        return lambda op_id, *rest: self.done.append((name, op_id, *rest[:-1]))


class Breaking(NoFaults):
    """Raises what it is told to, at reads or writes, or holds them up."""

    def __init__(self):
        self.read_error = self.write_error = None
        self.hold = threading.Event()
        self.hold.set()

    def before_read(self, extent):
        assert self.hold.wait(DEADLINE_S)
        if self.read_error:
            raise self.read_error

    def before_write(self, extent):
        assert self.hold.wait(DEADLINE_S)
        if self.write_error:
            raise self.write_error


class World:
    """One layout's performer and all it works on."""

    def __init__(self, directory):
        self.faults = Breaking()
        self.engine = Engine()
        self.num_wakes = self.num_completions = 0
        self.volume = SegmentVolume(
            directory / "v", LAYOUT, 4, SpaceBudget(None, 0, directory), "auto", self.faults
        )
        self.segment = directory / "v" / "00000.segment"
        self.manifest = Manifest(directory / "manifest.db", directory / "volumes", self.faults)
        self.pool = IoPool(3, 64 << 20)
        self.arena = ArenaStore(ArenaOptions(), directory, num_words=4).create(LAYOUT, NUM_SLOTS)
        owners = Owners(lambda _owner: IDENTITY, lambda _owner: self._wake)
        self.performer = Performer(LAYOUT, self.volume, self.manifest, self.pool, owners)
        self.changed = asyncio.Event()

    def start(self, loop=None):
        self.volume.files.open()
        self.manifest.open()
        row = LayoutRow(LAYOUT.fingerprint, b"message", 4)
        self.manifest.put_layout(row)
        self.pool.start()
        self.performer.use_arena(self.arena)
        self.performer.start(loop or asyncio.get_running_loop(), self._complete)

    def fill(self, slot_id, num_tokens=16):
        """Put a random block into a slot; returns what is stored of it."""
        slot = self.arena.slots.slot(slot_id)
        slot[:] = os.urandom(len(slot))
        checksums = BlockHasher(LAYOUT).checksums(slot, num_tokens)
        return StoredBlock(os.urandom(4 * num_tokens), checksums)

    def write_action(self, op_id, slot_id, extent, num_tokens=16):
        stored = self.fill(slot_id, num_tokens)
        extent *= self.volume.shape.sectors_per_extent
        key = bytes([slot_id]) * 16
        return WriteBlock(op_id, key, slot_id, extent, num_tokens, *_fields(stored), "t"), stored

    async def until_idle(self):
        """Wait for the answers, and return them."""
        async with asyncio.timeout(DEADLINE_S):
            # Counters, not an event: what is waited for is the drain's own condition.
            while self.performer.num_pending or self.performer.num_uncommitted:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        done, self.engine.done = self.engine.done, []
        return done

    async def close(self):
        self.faults.hold.set()
        await asyncio.to_thread(self.pool.close)
        await self.performer.close()
        self.manifest.close()
        self.volume.files.close()
        self.arena.close()

    def _complete(self, completion):
        self.num_completions += 1
        completion(self.engine, 5)

    def _wake(self):
        self.num_wakes += 1


def _fields(stored):
    return stored.token_ids, stored.checksums


@pytest.fixture
async def world(tmp_path):
    made = World(tmp_path)
    made.start()
    yield made
    await made.close()


@pytest.mark.parametrize("num_tokens", [16, 3])
@pytest.mark.parametrize("layered", [False, True])
async def test_a_block_goes_to_ssd_and_back(world, num_tokens, layered):
    """Written, read into another slot, hashed and verified there: the same bytes."""
    write, stored = world.write_action(1, 0, 2, num_tokens)
    world.performer.perform(write)
    assert await world.until_idle() == [("write_done", 1, IoOutcome.OK)]
    world.performer.perform(ReadBlock(2, write.key, write.extent, 1, num_tokens, layered))
    assert await world.until_idle() == [("read_done", 2, IoOutcome.OK, stored)]
    world.performer.perform(HashSlot(3, 1, num_tokens))
    assert await world.until_idle() == [("hash_done", 3, stored.checksums)]
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
async def test_whatever_happens_operations_are_answered(world, error):
    """An error of the device, or of ours: TRANSIENT, once."""
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


async def test_slots_that_are_gone_are_answered(world):
    """An arena that is given up while a hash is queued: no checksums."""
    world.performer.use_arena(None)
    world.performer.perform(HashSlot(1, 0, 16))
    assert await world.until_idle() == [("hash_done", 1, b"")]


# ---------------------------------------------------------------------------------- progress


async def test_progress_of_a_load(world):
    """Layers are published as they come; the word is taken back with the lease."""
    words = ProgressWords(world.arena.progress.fd, 4)
    for slot_id in (0, 1):
        world.performer.perform(world.write_action(slot_id + 1, slot_id, slot_id)[0])
    await world.until_idle()
    sectors = world.volume.shape.sectors_per_extent
    world.faults.hold.clear()
    for op_id, slot_id in ((11, 0), (12, 1)):
        key = bytes([slot_id]) * 16
        world.performer.perform(
            ReadBlock(op_id, key, slot_id * sectors, slot_id + 2, 16, layered=True)
        )
    world.performer.perform(TrackLoad(LEASE, OWNER, (11, 12)))
    index = world.performer.loads.index_of(LEASE)
    assert words.word(index) & (LAYERS_MASK | FAILED_BIT) == 0
    world.faults.hold.set()
    await asyncio.to_thread(words_ready, world, words, index)
    await world.until_idle()
    assert words.word(index) & (LAYERS_MASK | FAILED_BIT) == 8
    assert 1 <= world.num_wakes <= 8
    world.performer.perform(UntrackLoad(LEASE))
    assert world.performer.loads.index_of(LEASE) is None


def words_ready(world, words, index):
    """Wait as an engine does, woken by the publications."""
    waker = threading.Thread(target=_wake_until, args=(world, words, index))
    waker.start()
    words.wait(index, LEASE, 8, DEADLINE_S)
    waker.join()


def _wake_until(world, words, index):
    while words.word(index) & LAYERS_MASK < 8:
        threading.Event().wait(0.001)
    words.wake()


async def test_a_failed_read_fails_the_load(world):
    """FAILED is seen by the engine."""
    words = ProgressWords(world.arena.progress.fd, 4)
    world.performer.perform(ReadBlock(11, b"x" * 16, 0, 1, 16, layered=True))
    world.performer.perform(TrackLoad(LEASE, OWNER, (11,)))
    index = world.performer.loads.index_of(LEASE)
    assert await world.until_idle() == [("read_done", 11, IoOutcome.CORRUPT, None)]
    assert words.word(index) & FAILED_BIT


async def test_layers_before_a_wrong_one_are_announced(world):
    """A flipped bit in the last slice: no layer from its group on, then FAILED; answered once."""
    words = ProgressWords(world.arena.progress.fd, 4)
    write, _ = world.write_action(1, 0, 0)
    world.performer.perform(write)
    await world.until_idle()
    with world.segment.open("r+b") as file:
        file.seek(world.volume.shape.full_bytes - 1)
        file.write(bytes([world.arena.slots.slot(0)[-1] ^ 1]))
    world.performer.perform(ReadBlock(11, write.key, 0, 1, 16, layered=True))
    world.performer.perform(TrackLoad(LEASE, OWNER, (11,)))
    assert await world.until_idle() == [("read_done", 11, IoOutcome.CORRUPT, None)]
    word = words.word(world.performer.loads.index_of(LEASE))
    assert word & FAILED_BIT
    assert word & LAYERS_MASK <= 6


async def test_a_verify_brings_all_layers(world):
    """A load that waits for an adopted slot is ready when it is verified."""
    words = ProgressWords(world.arena.progress.fd, 4)
    stored = world.fill(0)
    world.performer.perform(VerifySlot(11, 0, 16, stored.checksums, urgent=True))
    world.performer.perform(TrackLoad(LEASE, OWNER, (11,)))
    index = world.performer.loads.index_of(LEASE)
    await world.until_idle()
    assert words.word(index) & (LAYERS_MASK | FAILED_BIT) == 8


async def test_what_has_ended_at_the_end_is_reported(world):
    """All of it, before the files and the arena go, and nothing afterwards."""
    for op_id in range(1, 101):
        world.performer._completions.put(
            Ended(lambda engine, now_ns, op_id=op_id: engine.ended(op_id, now_ns))
        )
    await world.performer.close()
    assert [op_id for _, op_id in world.engine.done] == list(range(1, 101))
    world.performer._completions.put(Ended(lambda engine, now_ns: engine.ended(101, now_ns)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(world.engine.done) == 100


@pytest.mark.parametrize("num_tokens", [16, 3])
async def test_a_load_hurries_what_is_read_ahead(world, num_tokens):
    """It goes before the writes then; what was queued for it before finds it done."""
    words = ProgressWords(world.arena.progress.fd, 4)
    write, stored = world.write_action(1, 0, 0, num_tokens)
    world.performer.perform(write)
    await world.until_idle()
    let_go = threading.Event()
    for _ in range(3):  # as many as there are threads for what nobody waits for
        world.pool.submit(Priority.WRITE, 0, lambda _: let_go.wait(DEADLINE_S))
    try:
        world.performer.perform(ReadBlock(11, write.key, 0, 1, num_tokens, ahead=True))
        world.performer.perform(TrackLoad(LEASE, OWNER, (11,)))
        index = world.performer.loads.index_of(LEASE)
        async with asyncio.timeout(DEADLINE_S):
            while words.word(index) & LAYERS_MASK < 8:  # noqa: ASYNC110  # the word is what counts
                await asyncio.sleep(0.001)
    finally:
        let_go.set()
    assert await world.until_idle() == [("read_done", 11, IoOutcome.OK, stored)]
    async with asyncio.timeout(DEADLINE_S):
        while len(world.pool):  # noqa: ASYNC110  # the job that came too late
            await asyncio.sleep(0.001)
    assert await world.until_idle() == []


async def test_a_load_hurries_a_verify_in_the_background(world):
    """One that nobody waited for so far does not keep a load waiting behind the writes."""
    words = ProgressWords(world.arena.progress.fd, 4)
    stored = world.fill(0)
    world.faults.hold.clear()
    for slot_id in (1, 2, 3, 4):  # more than there are threads
        world.performer.perform(world.write_action(slot_id, slot_id, slot_id)[0])
    world.performer.perform(VerifySlot(11, 0, 16, stored.checksums, urgent=False))
    world.performer.perform(TrackLoad(LEASE, OWNER, (11,)))
    index = world.performer.loads.index_of(LEASE)
    async with asyncio.timeout(DEADLINE_S):
        while words.word(index) & LAYERS_MASK < 8:  # noqa: ASYNC110  # the word is what counts
            await asyncio.sleep(0.001)
    assert [entry[:2] for entry in world.engine.done] in ([], [("verify_done", 11)])
    world.faults.hold.set()
    done = await world.until_idle()
    assert sorted(entry[1] for entry in done) == [1, 2, 3, 4, 11]


@pytest.mark.parametrize("num_tokens", [16, 3])
async def test_what_is_in_flight_is_counted(world, num_tokens):
    """The pool is told the bytes of each write and read: its budget is one of bytes."""
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


# ------------------------------------------------------------------------- journal and index


async def test_the_journal_is_written_at_once(world):
    """Records are there when perform() returns, with the identity of the writer."""
    writing = WritingSlot(generation=4, lease_id=LEASE, owner=OWNER)
    committed = CommittedSlot(5, b"k" * 16, 16, b"t" * 64, b"c" * 64)
    world.performer.perform(PutSlot(0, writing))
    world.performer.perform(PutSlot(1, committed))
    world.performer.perform(PutSlot(2, committed))
    world.performer.perform(ClearSlot(2))
    adopted, written = world.arena.journal.read_all()
    assert adopted == [AdoptedSlot(1, committed)]
    assert [(w.slot_id, w.generation, w.lease_id, w.writer) for w in written] == [
        (0, 4, LEASE, IDENTITY)
    ]


async def test_index_rows_are_kept_in_order(world):
    """A dropped block is told after its commit; rows count as uncommitted until theirs."""
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


async def test_a_full_queue_of_rows_is_told_when_it_is_empty(world):
    """Rows are asked for again by one call, however often that was asked for."""
    spans = b"\0" * (MAX_QUEUED_BYTES // 4)
    assert world.performer.row_room == MAX_ROW_BYTES
    for number in range(5):
        key = KEY._replace(session_id=str(number))
        world.performer.perform(PutSession(SessionRecord(key, spans, 7)))
    assert world.performer.row_room == 0
    for _ in range(3):
        world.performer.await_room()
    async with asyncio.timeout(DEADLINE_S):
        while not world.num_completions:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert world.performer.row_room == MAX_ROW_BYTES
    assert world.num_completions == 1


# ------------------------------------------------------------------------------- completions


class CountingLoop:
    """The running loop, with its wake-ups from threads counted."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        self.num_wakes = 0

    def call_soon_threadsafe(self, callback, *args):
        self.num_wakes += 1
        self.loop.call_soon_threadsafe(callback, *args)

    def call_soon(self, callback, *args):
        self.loop.call_soon(callback, *args)


async def test_what_ends_together_is_one_wake_up(tmp_path):
    """While the loop is busy any number of operations end at the price of one wake-up."""
    world, loop = World(tmp_path), CountingLoop()
    world.start(loop)
    stored = world.fill(0)
    for op_id in range(1, 301):
        world.performer.perform(VerifySlot(op_id, 0, 16, stored.checksums, urgent=True))
    while len(world.performer._completions) < 300:
        threading.Event().wait(0.001)  # the loop does not run meanwhile
    assert loop.num_wakes == 1
    done = await world.until_idle()
    assert sorted(op_id for _, op_id, _ in done) == list(range(1, 301))
    await world.close()
