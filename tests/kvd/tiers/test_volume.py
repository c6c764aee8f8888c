"""Extents: written bytes are read, and every failure is CORRUPT, TRANSIENT or FULL."""

import errno
import os
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvd.core.records.actions import IoOutcome, WriteBlock
from kvd.tiers.direct_io import probe_direct
from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.volume_identity import ID_NAME
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.units import SECTOR_BYTES
from tests.kvd.tiers.blocks_on_disk import EXTENT, SHAPE, WHOLE, Failing
from tests.kvd.tiers.disk import LAYOUT, Block, Disk, new_slot
from tests.sampled import examples


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_written_blocks_are_read(disk, direct):
    """Every extent returns its block and header, to the next volume as well."""
    disk.volume(direct=direct)
    blocks = {extent * WHOLE: Block() for extent in (7, 0, 3, 2)}
    for extent, block in blocks.items():
        assert disk.write(extent, block) is IoOutcome.OK
    for _ in range(2):
        for extent, block in blocks.items():
            slot = new_slot()
            assert disk.read(extent, block, slot) == (IoOutcome.OK, block.stored)
            assert slot == block.slot
        disk.volume(direct=direct)


@settings(max_examples=examples(60), deadline=None)
@given(
    num_tokens=st.lists(st.integers(1, LAYOUT.block_tokens), min_size=1, max_size=4),
    layered=st.booleans(),
)
def test_packed_blocks_round_trip(num_tokens, layered):
    """Only the used rows of a partial block are read, from as few sectors as possible."""
    with tempfile.TemporaryDirectory() as directory:
        disk = Disk(Path(directory))
        disk.volume()
        extent, written = 0, []
        for tokens in num_tokens:
            block = Block(tokens)
            assert disk.write(extent, block) is IoOutcome.OK
            written.append((extent, block))
            extent += SHAPE.num_sectors(tokens)
            extent += -extent % WHOLE if tokens == LAYOUT.block_tokens else 0
            if extent % WHOLE + WHOLE // 2 > WHOLE:
                extent += -extent % WHOLE
        for extent, block in written:
            slot, before = new_slot(), bytes(LAYOUT.block_bytes)
            assert disk.read(extent, block, slot, layered=layered) == (IoOutcome.OK, block.stored)
            assert block.is_in(slot)
            if block.num_tokens < LAYOUT.block_tokens:
                assert sum(a != b for a, b in zip(bytes(slot), before, strict=True)) <= (
                    LAYOUT.token_bytes * block.num_tokens
                )
            assert disk.read(extent, block, None) == (IoOutcome.OK, block.stored)
        disk.close()


@pytest.mark.parametrize("num_tokens", [1, 5, 15])
def test_unused_rows_are_not_on_disk(disk, num_tokens):
    """Slot and staging memory may have another session's rows: unused rows are zeroed."""
    disk.volume()
    block = Block(num_tokens)
    disk.staging.take(2 * EXTENT)[:] = b"\xa5" * (2 * EXTENT)  # what was staged before
    assert disk.write(0, block) is IoOutcome.OK
    content = (disk.directory / "v" / "00000.segment").read_bytes()
    header_bytes = 64 + 8 * len(LAYOUT.layers) + 4 * num_tokens
    assert not any(content[header_bytes : SHAPE.header_bytes])
    offset = SHAPE.header_bytes
    for index, layer in enumerate(LAYOUT.layers):
        used = layer.token_bytes * num_tokens
        end = offset + SHAPE.slice_bytes(index, num_tokens)
        assert (used == 0) is not any(content[offset : offset + used])
        assert not any(content[offset + used : end])
        offset = end
    assert not any(content[offset:])


def test_large_blocks_move_in_groups(disk):
    """Layered reads take a mebibyte at a time, scrubs and packed blocks four, others all."""
    layers = tuple(Layer((Component("k", (1 << 13,), "float32"),)) for _ in range(24))
    layout = KVLayout("cd" * 16, layers, block_tokens=16)  # slices of 512 KiB
    disk.volume(layout=layout, extents_per_segment=2)
    full, partial = Block(16, layout), Block(15, layout)
    volume = disk.made[-1]

    def num_groups(block, slot, *, layered):
        return len(volume.plan_read(0, block.key, block.num_tokens, slot, layered=layered).groups)

    slot = new_slot(layout)
    assert [num_groups(full, slot, layered=layered) for layered in (True, False)] == [12, 1]
    assert [num_groups(partial, slot, layered=layered) for layered in (True, False)] == [8, 2]
    assert num_groups(full, None, layered=False) == 3
    for extent, block in ((0, full), (volume.shape.sectors_per_extent, partial)):
        assert disk.write(extent, block) is IoOutcome.OK
        for layered in (True, False):
            slot = new_slot(layout)
            assert disk.read(extent, block, slot, layered=layered)[0] is IoOutcome.OK
            assert block.is_in(slot)
        assert disk.read(extent, block, None)[0] is IoOutcome.OK


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    "where", [{"write": True}, {"point": WritePoint.SEGMENT_CREATED}], ids=["write", "allocation"]
)
def test_no_space_is_full(disk, number, where):
    """A full file system or quota is FULL, wherever it shows."""
    volume = disk.volume(faults=Failing(number, **where), extents_per_segment=1)
    assert disk.write(0, Block()) is IoOutcome.FULL
    assert volume.files.allocated_bytes == 0


@pytest.mark.parametrize("had", [0, 1])
def test_failed_growth_keeps_nothing(disk, had):
    """Even if the file had its space already: it gets its old length."""
    volume = disk.volume(total_bytes=(had + 1) * EXTENT)
    for extent in range(had):
        assert disk.write(extent * WHOLE, Block()) is IoOutcome.OK
    volume.files.faults = Failing(errno.EIO, point=WritePoint.SEGMENT_ALLOCATED)
    assert disk.write(had * WHOLE, Block()) is IoOutcome.TRANSIENT
    assert disk.segments() == {"00000.segment": had * EXTENT}
    assert volume.files.reserved_bytes == had * EXTENT
    assert disk.write(had * WHOLE, Block()) is IoOutcome.OK


@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.EOPNOTSUPP, IoOutcome.OK),
        (errno.EINVAL, IoOutcome.OK),
        (errno.EIO, IoOutcome.TRANSIENT),
    ],
)
def test_fallocate_is_optional(disk, monkeypatch, number, outcome):
    """Files get their size without it; a failing disk is another matter."""

    def refuse(*_):
        raise OSError(number, "injected")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    disk.volume(extents_per_segment=1)
    assert disk.write(0, Block()) is outcome
    is_there = outcome is IoOutcome.OK
    assert disk.segments() == {"00000.segment": EXTENT if is_there else 0}


def test_an_unusable_segment_leaves_no_descriptor(disk):
    """The file in its place does not support direct I/O."""
    volume = disk.volume()
    if not volume.files.is_direct:
        pytest.skip("the file system has no direct I/O")
    (disk.directory / "v" / "00000.segment").symlink_to("/dev/null")
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="Invalid argument"):
        volume.files.fd_for_reading(0)
    assert psutil.Process().num_fds() == before


def test_a_disk_too_full_for_a_step_may_have_room_for_the_extent(disk):
    """A segment grows by less then; an error other than lack of space is not retried."""
    disk.volume(faults=Failing(errno.ENOSPC, point=WritePoint.SEGMENT_CREATED))
    assert disk.write(0, Block()) is IoOutcome.OK
    assert disk.segments() == {"00000.segment": EXTENT}
    assert (disk.directory / "v" / "00000.segment").stat().st_mode & 0o777 == 0o600
    volume = disk.volume(faults=Failing(errno.EIO, point=WritePoint.SEGMENT_CREATED))
    assert disk.write(WHOLE, Block()) is IoOutcome.TRANSIENT
    assert volume.files.physical_extents() > 1
    assert disk.segments() == {"00000.segment": EXTENT}


def test_a_failed_sync_fails_all_writes_since_the_last_one(disk):
    """Also later ones whose next sync succeeds: the kernel has dropped them."""
    volume = disk.volume(faults=Failing(errno.EIO, point=WritePoint.SEGMENT_SYNCED))
    blocks = [Block() for _ in range(4)]

    def write(index):
        return volume.write([blocks[index].at(index * WHOLE)], disk.staging)

    first, meanwhile, elsewhere = write(0), write(1), write(3)  # 3: of another segment
    assert volume.sync([first]) == [IoOutcome.TRANSIENT]
    assert volume.sync([meanwhile, elsewhere]) == [IoOutcome.TRANSIENT, IoOutcome.OK]
    assert volume.sync([write(0)]) == [IoOutcome.OK]


def test_adjacent_blocks_are_one_write(disk):
    """Each has its header; a segment's end, a gap or a partial block ends the run."""
    volume = disk.volume()
    blocks = [Block() for _ in range(3)]
    run = [block.at(index * WHOLE) for index, block in enumerate(blocks)]
    assert volume.sync([volume.write(run, disk.staging)]) == [IoOutcome.OK]
    for index, block in enumerate(blocks):
        assert disk.read(index * WHOLE, block, None)[0] is IoOutcome.OK

    def action(extent, num_tokens=16):
        return WriteBlock(1, b"", 0, extent, num_tokens, b"", b"", "t")

    assert volume.follows(action(WHOLE), action(0))
    assert not volume.follows(action(2 * WHOLE), action(0))
    assert not volume.follows(action(WHOLE, 3), action(0))
    assert not volume.follows(action(3 * WHOLE), action(2 * WHOLE))  # of another segment


def test_one_failure_does_not_fail_its_batch(disk):
    """Blocks fail one by one."""
    disk.volume(faults=Failing(errno.EIO, write=True, extent=WHOLE))
    outcomes = [disk.write(index * WHOLE, Block()) for index in range(3)]
    assert outcomes == [IoOutcome.OK, IoOutcome.TRANSIENT, IoOutcome.OK]


def test_refused_direct_io_goes_through_the_page_cache(disk):
    """Unaligned memory cannot be read into directly: it is read all the same."""
    volume = disk.volume(direct="on")
    block = Block()
    assert disk.write(0, block) is IoOutcome.OK
    if not volume.files.is_direct:
        pytest.skip("the file system has no direct I/O")
    unaligned = memoryview(bytearray(LAYOUT.block_bytes + 1))[1:]
    assert disk.read(0, block, unaligned)[0] is IoOutcome.OK
    assert block.is_in(unaligned)
    assert not volume.files.is_direct
    assert "Invalid argument" in volume.files.buffered_reason
    assert disk.write(WHOLE, block) is IoOutcome.OK
    assert disk.read(WHOLE, block, new_slot())[0] is IoOutcome.OK


def test_direct_io_is_used_where_possible_unless_switched_off(disk):
    """The mode in use is visible."""
    assert not disk.volume(direct="off").files.is_direct
    assert disk.made[-1].files.buffered_reason
    volume = disk.volume()
    assert volume.files.is_direct is probe_direct(disk.directory)
    assert volume.files.is_direct is not bool(volume.files.buffered_reason)


def test_direct_io_can_be_switched_off(disk):
    """The mode in use is visible."""
    assert not disk.volume(direct="off").files.is_direct
    assert disk.made[-1].files.buffered_reason
    volume = disk.volume()
    assert volume.files.is_direct is not bool(volume.files.buffered_reason)


class Recorder(NoFaults):
    """Records the write points in order."""

    def __init__(self):
        self.points = []

    def reach(self, point):
        self.points.append(point)


def test_write_points_are_passed_in_order(disk):
    """A kill may come between any two steps of a write."""
    faults = Recorder()
    volume = disk.volume(faults=faults)
    for _ in range(2):
        disk.write(0, Block())
    volume.files.shrink(0)
    written = [WritePoint.EXTENT_WRITTEN, WritePoint.SEGMENT_SYNCED]
    allocated = [WritePoint.SEGMENT_CREATED, WritePoint.SEGMENT_ALLOCATED]
    named = [WritePoint.VOLUME_ID_WRITTEN, WritePoint.VOLUME_ID_KEPT]
    assert faults.points == [*named, *allocated, *written, *written, WritePoint.SEGMENT_REMOVED]


@pytest.mark.parametrize("num_tokens", [16, 1])
def test_an_extent_is_copied_as_it_is(disk, num_tokens):
    """The copy is the same block; a source that was cut off, or whose file is gone, is CORRUPT."""
    volume = disk.volume()
    block = Block(num_tokens)
    assert disk.write(4 * WHOLE, block) is IoOutcome.OK
    copied = volume.copy(4 * WHOLE, 0, num_tokens, disk.staging)
    assert volume.sync([copied]) == [IoOutcome.OK]
    volume.files.shrink(2)
    slot = new_slot()
    assert disk.read(0, block, slot)[0] is IoOutcome.OK
    assert block.is_in(slot)
    for gone in (2 * WHOLE, 4 * WHOLE):
        assert volume.copy(gone, 0, num_tokens, disk.staging).outcome is IoOutcome.CORRUPT


def test_a_failed_copy_is_an_outcome(disk):
    """For lack of space, or because the device fails."""
    volume = disk.volume(total_bytes=EXTENT)
    block = Block()
    assert disk.write(0, block) is IoOutcome.OK
    assert volume.copy(0, WHOLE, block.num_tokens, disk.staging).outcome is IoOutcome.FULL
    volume = disk.volume(faults=Failing(errno.EIO, read=True))
    failed = volume.copy(0, WHOLE, block.num_tokens, disk.staging)
    assert failed.outcome is IoOutcome.TRANSIENT


def test_a_real_full_disk(tmp_path):
    """On a file system of two extents the third is FULL, and the first two stay readable."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    size = 2 * EXTENT + 4 * SECTOR_BYTES
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs more rights than we have")
    try:
        _fill_real_disk(mounted)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)  # noqa: S607


def _fill_real_disk(mounted):
    disk = Disk(mounted)
    volume = disk.volume(extents_per_segment=1)
    assert volume.files.physical_extents() == 2
    blocks = [Block() for _ in range(3)]
    outcomes = [disk.write(index * WHOLE, block) for index, block in enumerate(blocks)]
    assert outcomes == [IoOutcome.OK, IoOutcome.OK, IoOutcome.FULL]
    (disk.directory / "ballast").write_bytes(b"x" * 3 * SECTOR_BYTES)
    for index in (0, 1):
        assert disk.write(index * WHOLE, blocks[index]) is IoOutcome.OK  # allocated before
        assert disk.read(index * WHOLE, blocks[index], new_slot())[0] is IoOutcome.OK
    disk.close()


@pytest.mark.parametrize(("direct", "level"), [("on", "warning"), ("auto", "info")])
def test_missing_direct_io_is_a_warning_if_it_was_requested(disk, direct, level):
    """Otherwise it is information."""
    volume = disk.volume(direct=direct)
    if not volume.files.is_direct:
        pytest.skip("the file system has no direct I/O")
    block = Block()
    assert disk.write(0, block) is IoOutcome.OK
    with capture_logs() as logs:
        disk.read(0, block, memoryview(bytearray(LAYOUT.block_bytes + 1))[1:])
    assert [(log["event"], log["log_level"]) for log in logs] == [("ssd_buffered", level)]


def test_a_volume_is_removed_with_its_directory(disk):
    """Unless it still has a segment: then it is found again, by its id."""
    for num_kept, is_left in ((WHOLE, True), (0, False)):
        files = disk.volume().files
        assert disk.write(0, Block()) is IoOutcome.OK
        files.shrink(num_kept)
        files.close()
        files.remove()
        assert (disk.directory / "v").exists() is is_left
        assert (disk.directory / "v" / ID_NAME).exists() is is_left


def test_a_volume_keeps_its_id(disk):
    """The same each time it is opened."""
    files = disk.volume().files
    files.close()
    volume_id = files.open()
    assert volume_id == (disk.directory / "v" / ID_NAME).read_text().strip()
    assert files.open(volume_id, holds_rows=True) == volume_id
