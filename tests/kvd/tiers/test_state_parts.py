"""Parts of states and windows on SSD and in the journal: whole slots, plain and sealed."""

import os
import struct
from dataclasses import replace

import pytest

from kvd.core.records.actions import IoOutcome
from kvd.core.records.entries import CommittedSlot
from kvd.core.records.extent_shape import ExtentShape
from kvd.tiers.faults import NoFaults
from kvd.tiers.journal import Journal, journal_bytes
from shared.types.kv_layout import Layer
from tests.kvd.tiers.disk import LAYOUT, Block, new_slot
from tests.kvd.tiers.test_sealed_extents import new_keys
from tests.synthetic_engine import layout_with_states

WITH_STATES = replace(LAYOUT, position_mode="coupled", state_bytes=100_000)
RECURRENT = replace(layout_with_states(0), state_bytes=20_000)
LAYER = LAYOUT.layers[0]
WINDOWED = replace(LAYOUT, layers=(replace(LAYER, window=40), *LAYOUT.layers))
WIDE = Layer(LAYER.components * 16, window=40)  # a slot is larger than its tokens' rows
LAYOUTS = {
    "beside rows": WITH_STATES,
    "alone": RECURRENT,
    "of windows": WINDOWED,
    "of wide windows": replace(LAYOUT, layers=(WIDE, LAYER, WIDE)),
}


@pytest.fixture(params=LAYOUTS, ids=str)
def layout(request):
    return LAYOUTS[request.param]


@pytest.fixture(params=["plain", "sealed"])
def stated_disk(disk, layout, request):
    """Return a disk for a layout with states or windows."""
    if request.param == "sealed":
        disk.keys = new_keys()
    disk.volume(layout=layout)
    return disk


@pytest.mark.parametrize("layered", [True, False])
def test_a_part_round_trips_completely(stated_disk, layout, layered):
    """Every byte of the slot, paddings too; beside it blocks of tokens, full and partial."""
    shape = ExtentShape(layout)
    whole = shape.sectors_per_extent
    assert shape.num_sectors(0) == whole
    written = [Block(num_tokens, layout) for num_tokens in (0, layout.block_tokens, 0, 5)]
    for number, block in enumerate(written):
        assert stated_disk.write(number * whole, block) is IoOutcome.OK
    for number, block in enumerate(written):
        slot = new_slot(layout)
        found = stated_disk.read(number * whole, block, slot, layered=layered)
        assert found == (IoOutcome.OK, block.stored)
        assert block.is_in(slot)
        assert block.num_tokens or bytes(slot) == bytes(block.slot)
        assert stated_disk.read(number * whole, block, None)[0] is IoOutcome.OK


def test_any_flipped_byte_of_a_part_is_corrupt(stated_disk, layout):
    """Also one that would be padding in a block of tokens."""
    block = Block(0, layout)
    stated_disk.write(0, block)
    path = stated_disk.directory / "v" / "00000.segment"
    header = ExtentShape(layout).header_bytes
    for position in (0, 20, header, header + 4095, header + layout.block_bytes - 1):
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        stated_disk.volume(layout=layout)
        assert stated_disk.read(0, block, new_slot(layout))[0] is IoOutcome.CORRUPT
        data[position] ^= 1
        path.write_bytes(data)


def test_a_part_is_not_read_as_a_block_of_tokens(stated_disk, layout):
    """The number of tokens and the key are in the header, or bound to it."""
    part = Block(0, layout)
    stated_disk.write(0, part)
    part.num_tokens = layout.block_tokens
    assert stated_disk.read(0, part, new_slot(layout))[0] is IoOutcome.CORRUPT


def test_empty_blocks_take_a_sector(disk):
    """No rows are written: only a header of 4 KiB, packed with others."""
    shape = ExtentShape(RECURRENT)
    assert [shape.num_sectors(n) for n in (1, RECURRENT.block_tokens)] == [1, 1]
    assert shape.num_sectors(0) == 1 + RECURRENT.block_bytes // 4096
    disk.volume(layout=RECURRENT)
    block = Block(RECURRENT.block_tokens, RECURRENT)
    disk.write(1, block)
    slot = new_slot(RECURRENT)
    assert disk.read(1, block, slot) == (IoOutcome.OK, block.stored)
    assert not any(slot)


def test_blocks_of_tokens_have_no_rows_of_layers_with_a_window():
    """Nor unused room of the slot."""
    layout = LAYOUTS["of wide windows"]
    shape, of_one = ExtentShape(layout), ExtentShape(replace(LAYOUT, layers=(LAYER,)))
    assert layout.block_bytes > of_one.layout.block_bytes
    assert shape.num_sectors(layout.block_tokens) == of_one.num_sectors(LAYOUT.block_tokens)
    assert shape.num_sectors(0) == shape.sectors_per_extent


def test_a_layout_without_states_has_no_parts(disk):
    """A header without tokens is invalid there, as before."""
    disk.volume()
    block = Block(0, LAYOUT)
    assert disk.write(0, block) is IoOutcome.OK
    assert disk.read(0, block, new_slot())[0] is IoOutcome.CORRUPT


@pytest.mark.parametrize(
    ("journaled", "is_there"), [(WITH_STATES, True), (WINDOWED, True), (LAYOUT, False)]
)
def test_the_journal_names_parts(journaled, is_there):
    """Where the layout has states or windows; elsewhere such a record is free, as before."""
    fd = os.memfd_create("journal")
    os.ftruncate(fd, journal_bytes(journaled, 2))
    journal = Journal(fd, journaled, 2, NoFaults())
    record = CommittedSlot(7, b"k" * 16, 0, b"", struct.pack("<Q", 3) * len(journaled.layers))
    journal.put(1, record)
    adopted, _ = journal.read_all()
    assert [slot.block for slot in adopted] == [record] * is_there
    journal.close()
    os.close(fd)
