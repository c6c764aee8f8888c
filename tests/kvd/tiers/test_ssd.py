"""Segments: what is written is read, and everything else is CORRUPT, TRANSIENT or FULL."""

import errno
import os

import pytest

from kvd.core.actions import IoOutcome
from kvd.tiers.ssd import NoFaults, SegmentVolume
from shared.kv_layout import Component, KVLayout, Layer

LAYOUT = KVLayout(
    "ab" * 16,
    (
        Layer((Component("k", (2, 8), "float32"),)),
        Layer(()),
        Layer((Component("v", (600,), "float32"),)),
    ),
    block_tokens=16,
)
BLOCK = LAYOUT.block_bytes


class Failing(NoFaults):
    """Fails every read or write with an errno."""

    def __init__(self, read=0, write=0):
        self.read, self.write = read, write

    def before_read(self, extent):
        if self.read:
            raise OSError(self.read, "injected")

    def before_write(self, extent):
        if self.write:
            raise OSError(self.write, "injected")


@pytest.fixture
def make(tmp_path):
    made = []

    def volume(num_extents=8, extents_per_segment=3, faults=None):
        made.append(
            SegmentVolume(
                tmp_path / "v", LAYOUT, num_extents, extents_per_segment, faults or NoFaults()
            )
        )
        made[-1].open()
        return made[-1]

    yield volume
    for each in made:
        each.close()


def _slot(fill):
    return memoryview(bytearray(os.urandom(BLOCK - 1) + bytes([fill])))


def _write(volume, *pairs):
    return volume.write(list(pairs))


def _segments(tmp_path):
    return {path.name: path.stat().st_size for path in (tmp_path / "v").iterdir()}


def test_written_blocks_are_read(make):
    """Every extent gives back its block, in this instance and in the next one."""
    volume = make()
    slots = {extent: _slot(extent) for extent in (7, 0, 3, 2)}
    results = dict(zip(slots, _write(volume, *slots.items()), strict=True))
    assert all(len(written.checksums) == 3 for written in results.values())
    for reader in (volume, make()):
        for extent, slot in slots.items():
            memory = memoryview(bytearray(BLOCK))
            assert reader.read(extent, memory, results[extent].checksums) is IoOutcome.OK
            assert memory == slot


def test_segments_are_allocated_when_needed(make, tmp_path):
    """Only segments that are written to exist, at their full size; the last one may be shorter."""
    volume = make()
    assert _segments(tmp_path) == {}
    _write(volume, (7, _slot(1)))
    assert _segments(tmp_path) == {"00002.segment": 2 * BLOCK}
    _write(volume, (0, _slot(1)))
    assert _segments(tmp_path) == {"00000.segment": 3 * BLOCK, "00002.segment": 2 * BLOCK}


def test_a_flipped_bit_anywhere_is_corrupt(make, tmp_path):
    """Any byte of the extent counts, padding too."""
    volume = make()
    (written,) = _write(volume, (0, _slot(1)))
    path = tmp_path / "v" / "00000.segment"
    for position in (0, 4095, BLOCK - 1):
        content = bytearray(path.read_bytes())
        content[position] ^= 4
        path.write_bytes(content)
        outcome = volume.read(0, memoryview(bytearray(BLOCK)), written.checksums)
        assert outcome is IoOutcome.CORRUPT
        content[position] ^= 4
        path.write_bytes(content)
    assert volume.read(0, memoryview(bytearray(BLOCK)), written.checksums) is IoOutcome.OK


def test_missing_bytes_are_corrupt_and_nothing_is_deleted(make, tmp_path):
    """A file that is too short, or gone, does not hold the block; other files are left alone."""
    volume = make()
    first, other = _write(volume, (0, _slot(1)), (3, _slot(2)))
    (tmp_path / "v" / "00000.segment").write_bytes(b"short")
    memory = memoryview(bytearray(BLOCK))
    assert make().read(0, memory, first.checksums) is IoOutcome.CORRUPT
    (tmp_path / "v" / "00000.segment").unlink()
    assert make().read(0, memory, first.checksums) is IoOutcome.CORRUPT
    assert make().read(3, memory, other.checksums) is IoOutcome.OK


def test_device_errors_are_transient(make):
    """An input/output error says nothing about the bytes."""
    (written,) = _write(make(), (0, _slot(1)))
    memory = memoryview(bytearray(BLOCK))
    failing = make(faults=Failing(read=errno.EIO, write=errno.EIO))
    assert failing.read(0, memory, written.checksums) is IoOutcome.TRANSIENT
    assert _write(failing, (1, _slot(1)))[0].outcome is IoOutcome.TRANSIENT
    assert make().read(0, memory, written.checksums) is IoOutcome.OK


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_is_full(make, number):
    """A full file system or quota is FULL."""
    full = make(faults=Failing(write=number))
    assert _write(full, (1, _slot(1)))[0].outcome is IoOutcome.FULL


def test_one_failure_does_not_fail_the_batch(make):
    """Blocks of a batch fail one by one."""
    volume = make(num_extents=8)
    volume._faults = OnlyExtent(2)
    outcomes = [w.outcome for w in _write(volume, (1, _slot(1)), (2, _slot(2)), (3, _slot(3)))]
    assert outcomes == [IoOutcome.OK, IoOutcome.TRANSIENT, IoOutcome.OK]


class OnlyExtent(NoFaults):
    """Fails the writes of one extent."""

    def __init__(self, extent):
        self.extent = extent

    def before_write(self, extent):
        if extent == self.extent:
            raise OSError(errno.EIO, "injected")


def test_shrinking_gives_segments_back(make, tmp_path):
    """With fewer extents than before, files beyond them go; those that are partly used stay."""
    _write(make(num_extents=9), (0, _slot(1)), (4, _slot(1)), (8, _slot(1)))
    (tmp_path / "v" / "notes.txt").write_text("not ours")
    make(num_extents=4)
    assert set(_segments(tmp_path)) == {"00000.segment", "00001.segment", "notes.txt"}
