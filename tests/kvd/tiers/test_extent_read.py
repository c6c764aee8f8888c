"""Reading extents: changed bytes are CORRUPT, a device's error is TRANSIENT."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.records.actions import IoOutcome
from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES
from tests.kvd.tiers.blocks_on_disk import EXTENT, SHAPE, WHOLE, Failing
from tests.kvd.tiers.disk import LAYOUT, Block, Disk, new_slot
from tests.sampled import examples


def _flip(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("num_tokens", [16, 5])
def test_a_flipped_bit_is_corrupt(disk, num_tokens):
    """In each field of the header, the checksums, the token ids, and both ends of each slice."""
    disk.volume(direct="off")
    block = Block(num_tokens)
    disk.write(0, block)
    path = disk.directory / "v" / "00000.segment"
    positions = [0, 4, 8, 16, 32, 48, 52, 64, 64 + 31, 64 + 32, 64 + 32 + 4 * num_tokens - 1]
    offset = SHAPE.header_bytes
    for index, layer in enumerate(LAYOUT.layers):
        if layer.components:
            positions += [offset, offset + layer.token_bytes * num_tokens - 1]
        offset += SHAPE.slice_bytes(index, num_tokens)
    for position in positions:
        _flip(path, position)
        assert disk.read(0, block, new_slot()) == (IoOutcome.CORRUPT, None), position
        assert disk.read(0, block, None) == (IoOutcome.CORRUPT, None)
        _flip(path, position)
    assert disk.read(0, block, new_slot())[0] is IoOutcome.OK


def test_padding_is_not_checked(disk):
    """Unused and undescribed bytes may have any value."""
    disk.volume(direct="off")
    block = Block(5)
    disk.write(0, block)
    for position in (SHAPE.header_bytes - 1, SHAPE.header_bytes + SECTOR_BYTES - 1):
        _flip(disk.directory / "v" / "00000.segment", position)
    slot = new_slot()
    assert disk.read(0, block, slot)[0] is IoOutcome.OK
    assert block.is_in(slot)


def test_another_block_is_corrupt(disk):
    """An extent with another key, or another length, is not the requested one."""
    disk.volume()
    block, other = Block(), Block()
    disk.write(0, block)
    other_length = Block(5)
    other_length.key = block.key
    for wrong in (other, other_length):
        assert disk.read(0, wrong, new_slot()) == (IoOutcome.CORRUPT, None)
    assert disk.read(WHOLE, block, new_slot()) == (IoOutcome.CORRUPT, None)  # never written


def test_another_layout_is_corrupt(disk):
    """Equal sizes do not make it the same layout."""
    twin = KVLayout("cd" * 16, LAYOUT.layers, LAYOUT.block_tokens)
    disk.volume()
    block = Block()
    disk.write(0, block)
    disk.volume(layout=twin)
    assert disk.read(0, block, new_slot()) == (IoOutcome.CORRUPT, None)


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("size", [0, 5, SHAPE.header_bytes, EXTENT - SECTOR_BYTES, EXTENT - 1])
def test_a_short_file_is_corrupt(disk, direct, size):
    """It does not have the block; it is not deleted for it."""
    disk.volume(direct=direct)
    block = Block()
    disk.write(0, block)
    path = disk.directory / "v" / "00000.segment"
    os.truncate(path, size)
    assert disk.read(0, block, new_slot()) == (IoOutcome.CORRUPT, None)
    disk.volume(direct=direct)
    assert disk.read(0, block, new_slot()) == (IoOutcome.CORRUPT, None)
    assert path.stat().st_size == size
    assert disk.write(0, block) is IoOutcome.OK  # it is made whole again
    assert disk.read(0, block, new_slot())[0] is IoOutcome.OK


def test_a_missing_file_is_corrupt(disk):
    """Other extents are not affected."""
    disk.volume()
    block, other = Block(), Block()
    disk.write(0, block)
    disk.write(3 * WHOLE, other)
    disk.close()
    (disk.directory / "v" / "00000.segment").unlink()
    disk.volume()
    assert disk.read(0, block, new_slot()) == (IoOutcome.CORRUPT, None)
    assert disk.read(3 * WHOLE, other, new_slot())[0] is IoOutcome.OK


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), num_tokens=st.sampled_from([1, 5, 15, 16]))
def test_altered_segments_never_pass(data, num_tokens):
    """With any contents of a segment a successful read returns the written bytes."""
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory))
        disk.volume(direct="off")
        block = Block(num_tokens)
        disk.write(0, block)
        path = disk.directory / "v" / "00000.segment"
        size = SHAPE.num_sectors(num_tokens) * SECTOR_BYTES
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.integers(0, size - 1))
            piece = data.draw(st.binary(min_size=1, max_size=64))
            content[start : start + len(piece)] = piece
        end = data.draw(st.sampled_from([len(content), size, size // 2]))
        path.write_bytes(content[:end])
        slot = new_slot()
        outcome, stored = disk.read(0, block, slot)
        assert outcome in (IoOutcome.OK, IoOutcome.CORRUPT)
        if outcome is IoOutcome.OK:
            assert block.is_in(slot)
            assert stored == block.stored
        disk.close()


def test_device_errors_are_transient(disk):
    """An input/output error says nothing about the bytes."""
    disk.volume()
    block = Block()
    disk.write(0, block)
    disk.volume(faults=Failing(errno.EIO, read=True, write=True))
    assert disk.read(0, block, new_slot()) == (IoOutcome.TRANSIENT, None)
    assert disk.write(WHOLE, Block()) is IoOutcome.TRANSIENT
    disk.volume()
    assert disk.read(0, block, new_slot())[0] is IoOutcome.OK
