"""The journal: records round-trip, damaged ones are free, and no kill makes a wrong record."""

import os
import signal
import struct
import uuid

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.records.entries import CommittedSlot, WritingSlot
from kvd.host.process_identity import ProcessIdentity
from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.journal import (
    HEADER_BYTES,
    MAX_EPOCH,
    Journal,
    UnfitArenaError,
    header_of,
    journal_bytes,
    pack_header,
    record_bytes_of,
    unpack_header,
)
from tests.sampled import examples
from tests.synthetic_engine import small_layout

LAYOUT = small_layout()
NUM_SLOTS = 4
NUM_TURNS = 15  # kills at random moments
SIZE = journal_bytes(LAYOUT, NUM_SLOTS)
BOOT_ID = str(uuid.uuid4())
WRITER = ProcessIdentity(4242, 99, b"i" * 16)


@pytest.fixture
def fd():
    number = os.memfd_create("journal")
    os.ftruncate(number, SIZE)
    yield number
    os.close(number)


@pytest.fixture
def journal(fd):
    made = Journal(fd, LAYOUT, NUM_SLOTS, NoFaults())
    made.write_header(header_of(LAYOUT, NUM_SLOTS, BOOT_ID, 5), epoch=7)
    yield made
    made.close()


def make_committed(seed, num_tokens=16):
    return CommittedSlot(
        generation=seed,
        key=bytes([seed % 256]) * 16,
        num_tokens=num_tokens,
        token_ids=struct.pack("<I", seed) * num_tokens,
        checksums=struct.pack("<Q", seed) * len(LAYOUT.layers),
    )


def test_records_are_read_again(journal, fd):
    """By another mapping, as by another process; a cleared slot is free."""
    journal.put(0, make_committed(5))
    journal.put(1, make_committed(6, num_tokens=3))
    journal.put(2, WritingSlot(8, 1 << 41, engine_id=3), WRITER)
    journal.put(3, make_committed(9))
    journal.clear(3)
    again = Journal(fd, LAYOUT, NUM_SLOTS, NoFaults())
    adopted, (writing,) = again.read_all()
    assert [(slot.slot_id, slot.block) for slot in adopted] == [
        (0, make_committed(5)),
        (1, make_committed(6, num_tokens=3)),
    ]
    assert (writing.slot_id, writing.generation, writing.lease_id) == (2, 8, 1 << 41)
    assert writing.writer == WRITER
    assert again.header == journal.header
    again.close()


def test_a_slot_holds_the_newest_record(journal):
    """Written, committed, written again."""
    journal.put(0, WritingSlot(1, 2, engine_id=3), WRITER)
    journal.put(0, make_committed(5, num_tokens=2))
    assert [slot.block for slot in journal.read_all()[0]] == [make_committed(5, num_tokens=2)]
    journal.put(0, WritingSlot(2, 3, engine_id=3), WRITER)
    adopted, writing = journal.read_all()
    assert (adopted, len(writing)) == ([], 1)


def test_a_wiped_record_leaves_no_bytes(journal, fd):
    """It had tokens of an erased tenant; the records beside it stay."""
    for slot_id in range(3):
        journal.put(slot_id, make_committed(slot_id + 1))
    journal.clear(1)
    assert make_committed(2).token_ids in os.pread(fd, SIZE, 0)
    journal.wipe(1)
    start, num_bytes = HEADER_BYTES + record_bytes_of(LAYOUT), record_bytes_of(LAYOUT)
    assert os.pread(fd, num_bytes, start) == bytes(num_bytes)
    assert [slot.block for slot in journal.read_all()[0]] == [make_committed(1), make_committed(3)]


def test_each_adoption_raises_the_epoch(journal):
    """Lease ids of different kvds differ, also after very many of them."""
    assert (journal.epoch, journal.raise_epoch(), journal.epoch) == (7, 8, 8)
    journal.write_header(journal.header, epoch=MAX_EPOCH)
    assert journal.raise_epoch() == 1


@pytest.mark.parametrize("offset", range(0, 96, 3))
def test_a_damaged_header_is_refused(journal, offset):
    """With any flipped byte."""
    data = bytearray(pack_header(journal.header))
    data[offset] ^= 0x40
    with pytest.raises(UnfitArenaError):
        unpack_header(bytes(data))


def test_another_version_is_named(journal):
    """The error has its number."""
    data = bytearray(pack_header(journal.header))
    data[8] = 9
    with pytest.raises(UnfitArenaError, match="version 9"):
        unpack_header(bytes(data))


def test_a_journal_too_small_for_its_records_is_refused(fd):
    """Mapping more than there is would end in SIGBUS."""
    with pytest.raises(UnfitArenaError, match="bytes"):
        Journal(fd, LAYOUT, NUM_SLOTS + 100, NoFaults())


@given(st.binary(max_size=200), st.integers(0, 96))
def test_arbitrary_bytes_are_no_header(data, num_sound):
    """Whatever is in a header's place, up to a good part of a real one."""
    sound = pack_header(header_of(LAYOUT, NUM_SLOTS, BOOT_ID, 5))
    mixed = sound[:num_sound] + data
    if mixed[: len(sound)] != sound:
        with pytest.raises(UnfitArenaError):
            unpack_header(mixed)


def sound_bodies(data):
    """Return (slot, body) of the records with a right checksum, by the byte table alone."""
    found = set()
    for slot_id in range(NUM_SLOTS):
        start = HEADER_BYTES + slot_id * record_bytes_of(LAYOUT)
        state, checksum = struct.unpack_from("<QQ", data, start)
        for size in range(64, record_bytes_of(LAYOUT) - 15):
            body = data[start + 16 : start + 16 + size]
            if xxhash.xxh3_64_intdigest(body, seed=state) == checksum:
                found.add(slot_id)
    return found


records = st.one_of(
    st.builds(make_committed, st.integers(0, 1 << 30), st.integers(1, 16)),
    st.builds(WritingSlot, st.integers(0, 1 << 60), st.integers(0, 1 << 60), st.just(1)),
)
damage = st.lists(
    st.tuples(st.integers(HEADER_BYTES, SIZE - 1), st.binary(min_size=1, max_size=40)), max_size=6
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), records), max_size=8), damage)
def test_damage_never_raises_and_never_makes_a_record(puts, damages):
    """Undamaged records are read; every record that is read has its checksum."""
    fd = os.memfd_create("journal")
    os.ftruncate(fd, SIZE)
    journal = Journal(fd, LAYOUT, NUM_SLOTS, NoFaults())
    last = {}
    for slot_id, record in puts:
        journal.put(slot_id, record, WRITER)
        last[slot_id] = record
    hit = set()
    for offset, data in damages:
        piece = data[: SIZE - offset]
        os.pwrite(fd, piece, offset)
        first, end = offset - HEADER_BYTES, offset + len(piece) - HEADER_BYTES
        hit |= set(range(first // record_bytes_of(LAYOUT), end // record_bytes_of(LAYOUT) + 1))
    adopted, writing = journal.read_all()
    read = {slot.slot_id: slot.block for slot in adopted} | {w.slot_id: w for w in writing}
    assert set(read) <= sound_bodies(os.pread(fd, SIZE, 0))
    for slot_id, record in last.items():
        if slot_id not in hit:
            assert slot_id in read
            if isinstance(record, CommittedSlot):
                assert read[slot_id] == record
    journal.close()
    os.close(fd)


@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=SIZE - HEADER_BYTES))
def test_arbitrary_bytes_hold_no_record(data):
    """The file never was a journal."""
    fd = os.memfd_create("journal")
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, data, HEADER_BYTES)
    journal = Journal(fd, LAYOUT, NUM_SLOTS, NoFaults())
    assert journal.read_all() == ([], [])
    journal.close()
    os.close(fd)


class KillAt(NoFaults):
    """Ends the process without a word the nth time that it reaches a write point."""

    def __init__(self, point, nth):
        self.point = point
        self.left = nth

    def reach(self, point):
        if point is self.point:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def in_child(write):
    """Run `write` in a child process until it is killed."""
    child = os.fork()
    if child == 0:
        try:
            write()
        finally:
            os._exit(3)
    return child


@pytest.mark.parametrize(
    ("point", "nth", "expected"),
    [
        (WritePoint.JOURNAL_FREED, 2, None),
        (WritePoint.JOURNAL_BODY, 2, None),
        (WritePoint.JOURNAL_PUT, 2, make_committed(2)),
        (WritePoint.JOURNAL_CLEARED, 1, None),
    ],
)
def test_a_kill_at_a_write_point_leaves_old_new_or_free(fd, point, nth, expected):
    """The record being replaced is free until it is complete; others are not touched."""

    def write():
        journal = Journal(fd, LAYOUT, NUM_SLOTS, KillAt(point, nth))
        journal.put(0, make_committed(1))
        journal.put(1, make_committed(2))
        journal.clear(1)

    _, status = os.waitpid(in_child(write), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    journal = Journal(fd, LAYOUT, NUM_SLOTS, NoFaults())
    read = {slot.slot_id: slot.block for slot in journal.read_all()[0]}
    assert read.pop(0) == make_committed(1)
    assert read.get(1) == expected
    journal.close()


def test_random_kills_leave_only_written_records(fd):
    """A process that rewrites records all the time is killed at a random moment."""

    def write():
        journal = Journal(fd, LAYOUT, NUM_SLOTS, NoFaults())
        for number in range(1 << 30):
            journal.put(number % NUM_SLOTS, make_committed(number, 1 + number % 16))
            if number < NUM_TURNS:
                os.write(writer, b".")

    num_free = 0
    for turn in range(NUM_TURNS):
        reader, writer = os.pipe()
        child = in_child(write)
        for _ in range(turn + 1):  # it continues meanwhile: its progress is unknown then
            os.read(reader, 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        journal = Journal(fd, LAYOUT, NUM_SLOTS, NoFaults())
        adopted, writing = journal.read_all()
        assert not writing
        for slot in adopted:
            number = slot.block.generation
            assert slot.block == make_committed(number, 1 + number % 16)
            assert number % NUM_SLOTS == slot.slot_id
        num_free += NUM_SLOTS - len(adopted)
        journal.close()
    assert num_free < NUM_TURNS * NUM_SLOTS


def test_each_step_of_a_record_passes_its_point(fd):
    """In this order: a kill in between leaves the old record, none, or the new one."""
    points = []

    class Noted(NoFaults):
        def reach(self, point):
            points.append(point)

    journal = Journal(fd, LAYOUT, NUM_SLOTS, Noted())
    journal.write_header(header_of(LAYOUT, NUM_SLOTS, BOOT_ID, 5), epoch=MAX_EPOCH)
    assert journal.raise_epoch() == 1, "epochs begin again"
    journal.put(0, WritingSlot(1, 2, 3), WRITER)
    journal.clear(0)
    journal.wipe(0)
    assert points == [
        WritePoint.ARENA_ADOPTED,
        WritePoint.JOURNAL_FREED,
        WritePoint.JOURNAL_BODY,
        WritePoint.JOURNAL_PUT,
        WritePoint.JOURNAL_CLEARED,
        WritePoint.SLOT_WIPED,
    ]
    journal.close()


@pytest.mark.parametrize("num_missing", [1, 8, 9, 100])
def test_a_truncated_header_is_refused(num_missing):
    """Even if only its checksum is incomplete."""
    packed = pack_header(header_of(LAYOUT, NUM_SLOTS, BOOT_ID, 5))
    assert unpack_header(packed).num_slots == NUM_SLOTS
    assert unpack_header(packed + b"more").num_slots == NUM_SLOTS
    with pytest.raises(UnfitArenaError, match="no journal header"):
        unpack_header(packed[:-num_missing])


@pytest.mark.parametrize("num_tokens", [1, LAYOUT.block_tokens])
def test_a_block_has_between_one_and_a_full_blocks_tokens(journal, num_tokens):
    """A record with another number is no block."""
    journal.put(0, make_committed(5, num_tokens=num_tokens))
    ((slot,), _) = journal.read_all()
    assert slot.block == make_committed(5, num_tokens=num_tokens)
    for impossible in (0, LAYOUT.block_tokens + 1):
        journal.put(0, make_committed(5, num_tokens=1)._replace(num_tokens=impossible))
        assert journal.read_all() == ([], [])
