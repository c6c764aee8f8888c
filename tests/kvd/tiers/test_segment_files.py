"""Segments: allocated when needed, within a budget that volumes share, and given back."""

import os

import numpy as np
import pytest

from kvd.core.records.actions import IoOutcome
from kvd.tiers.faults import NoFaults, WritePoint
from kvd.tiers.segment_files import SegmentFiles
from kvd.tiers.space_budget import SpaceBudget
from kvd.tiers.volume import SegmentVolume
from tests.kvd.tiers.blocks_on_disk import EXTENT, WHOLE
from tests.kvd.tiers.disk import LAYOUT, Block, Disk, new_slot


def test_segments_are_allocated_when_needed(disk):
    """Only segments that are written to exist, at their full size."""
    disk.volume()
    assert disk.segments() == {}
    disk.write(7 * WHOLE, Block())
    assert disk.segments() == {"00002.segment": 3 * EXTENT}
    disk.write(0, Block())
    assert disk.segments() == {"00000.segment": 3 * EXTENT, "00002.segment": 3 * EXTENT}


def test_the_budget_is_never_exceeded(disk):
    """Segments grow up to it; beyond is FULL; with more budget they continue to grow."""
    volume = disk.volume(total_bytes=5 * EXTENT + 1)
    assert volume.files.physical_extents() == 5
    assert [disk.write(index * WHOLE, Block()) for index in range(5)] == [IoOutcome.OK] * 5
    assert disk.segments() == {"00000.segment": 3 * EXTENT, "00001.segment": 2 * EXTENT}
    assert disk.write(5 * WHOLE, Block()) is IoOutcome.FULL
    assert (volume.files.allocated_bytes >= 5 * EXTENT, volume.files.physical_extents()) == (
        True,
        5,
    )
    volume = disk.volume(total_bytes=6 * EXTENT)
    assert volume.files.physical_extents() == 6
    assert disk.write(5 * WHOLE, Block()) is IoOutcome.OK
    assert disk.segments() == {"00000.segment": 3 * EXTENT, "00001.segment": 3 * EXTENT}


def test_a_growing_segment_does_not_count_twice(disk):
    """A measurement at that moment finds as much room as before, and nothing is evicted for it."""
    volume = disk.volume(total_bytes=6 * EXTENT)
    found = []

    class Measured(NoFaults):
        def reach(self, point: WritePoint) -> None:
            if point is WritePoint.SEGMENT_CREATED:
                found.append(volume.files.physical_extents())

    volume.files.faults = Measured()
    for index in range(6):
        disk.write(index * WHOLE, Block())
    assert found == [6] * len(found) != []


def test_a_smaller_budget_takes_effect(disk):
    """With less allowed than is allocated there is only room for the allowed size."""
    volume = disk.volume(total_bytes=6 * EXTENT)
    for index in range(6):
        disk.write(index * WHOLE, Block())
    volume = disk.volume(total_bytes=2 * EXTENT)
    assert volume.files.physical_extents() == 2
    volume.files.shrink(2)
    assert disk.segments() == {"00000.segment": 2 * EXTENT}
    assert volume.files.physical_extents() == 2


def test_a_small_budget_gives_single_extents(disk):
    """One write takes its extent of it, not a whole segment."""
    volume = disk.volume(total_bytes=6 * EXTENT)
    disk.write(0, Block())
    assert disk.segments() == {"00000.segment": EXTENT}
    assert volume.files.physical_extents() == 6


def small_volume(directory, budget):
    """Return a volume with segments of three extents."""
    files = SegmentFiles(directory, EXTENT, 3, budget, "auto", NoFaults())
    return SegmentVolume(LAYOUT, files)


def test_volumes_share_a_budget(tmp_path):
    """Space that one has taken is not available to the other."""
    budget = SpaceBudget(4 * EXTENT, 0, tmp_path)
    pair = [small_volume(tmp_path / name, budget) for name in "ab"]
    for volume in pair:
        volume.files.open()
    disk = Disk(tmp_path)
    for volume, extent, outcome in (
        (pair[0], 0, IoOutcome.OK),
        (pair[0], 2, IoOutcome.OK),
        (pair[1], 0, IoOutcome.OK),
        (pair[1], 1, IoOutcome.FULL),
    ):
        disk.made = [volume]
        assert disk.write(extent * WHOLE, Block()) is outcome
    assert [volume.files.physical_extents() for volume in pair] == [3, 1]
    pair[0].files.shrink(0)
    assert [volume.files.physical_extents() for volume in pair] == [3, 4]
    for volume in pair:
        volume.files.close()
    assert budget.allocated_bytes == 0


def test_volumes_give_back_the_same_share_of_a_smaller_budget(tmp_path):
    """Whichever of them gives first; what one may not have in any case, no other gives for it."""
    for name, num_extents in (("a", 8), ("b", 4), ("c", 6)):
        files = small_volume(tmp_path / name, SpaceBudget(None, 0, tmp_path)).files
        files.open()
        for extent in range(num_extents):
            files.fd_for_writing(extent // 3, (extent % 3 + 1) * EXTENT)
        files.shrink(num_extents)
        files.close()
    budget = SpaceBudget(7 * EXTENT, 0, tmp_path)
    a, b, c = (small_volume(tmp_path / name, budget).files for name in "abc")
    a.open()
    assert a.physical_extents() == 7  # alone
    b.open()
    c.open(most_bytes=2 * EXTENT)  # of 14 extents that they may have, half stays
    assert [files.physical_extents() for files in (a, b, c)] == [4, 2, 1]
    b.shrink(2)
    a.shrink(4)
    assert [files.physical_extents() for files in (a, b, c)] == [4, 2, 1]
    assert budget.reserve(tmp_path / "b", EXTENT, EXTENT, EXTENT) == 0
    c.shrink(0)
    assert [files.physical_extents() for files in (a, b, c)] == [5, 3, 1]
    for files in (a, b, c):
        files.close()


def test_a_descriptor_is_not_closed_while_io_may_use_it(disk):
    """Its segment is removed and takes no space; the next one of that name is another file."""
    volume = disk.volume()
    assert disk.write(0, Block()) is IoOutcome.OK
    fd = volume.files.fd_for_reading(0)
    volume.files.shrink(0)
    assert (os.fstat(fd).st_nlink, os.fstat(fd).st_blocks) == (0, 0)
    block = Block()
    assert disk.write(0, block) is IoOutcome.OK
    assert volume.files.fd_for_reading(0) != fd
    volume.files.close_removed()
    assert disk.read(0, block, new_slot())[0] is IoOutcome.OK
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_the_reserve_stays_free(tmp_path):
    """With a reserve larger than the disk nothing is allocated."""
    budget = SpaceBudget(None, 1 << 60, tmp_path)
    volume = small_volume(tmp_path / "v", budget)
    volume.files.open()
    disk = Disk(tmp_path)
    disk.made = [volume]
    assert disk.write(0, Block()) is IoOutcome.FULL
    assert volume.files.physical_extents() == 0
    volume.files.close()


def test_shrinking_frees_space(disk):
    """Files wholly beyond are removed, a partial one is cut; the rest stays as it is."""
    volume = disk.volume()
    block = Block()
    for index in (0, 4, 8):
        disk.write(index * WHOLE, block)
    (disk.directory / "v" / "notes.txt").write_text("not ours")
    volume.files.shrink(5, at_most=1)
    assert [*disk.segments()].count("00002.segment") == 0
    assert disk.segments()["00001.segment"] == 3 * EXTENT
    volume.files.shrink(5)
    expected = {"00000.segment": 3 * EXTENT, "00001.segment": 2 * EXTENT, "notes.txt": 8}
    assert disk.segments() == expected
    assert disk.read(4 * WHOLE, block, new_slot())[0] is IoOutcome.OK
    assert disk.write(8 * WHOLE, block) is IoOutcome.OK  # it is created again when it is needed
    assert disk.segments() == expected | {"00002.segment": 3 * EXTENT}


def test_allocated_bytes_are_those_of_the_file_system(disk):
    """Of existing segments; one that somebody has removed takes nothing."""
    volume = disk.volume()
    assert disk.write(0, Block()) is IoOutcome.OK
    segments = list((disk.directory / "v").glob("*.segment"))
    assert segments
    assert volume.files.allocated_bytes == sum(path.stat().st_blocks for path in segments) * 512
    for path in segments:
        path.unlink()
    assert volume.files.allocated_bytes == 0


def test_extents_of_missing_and_truncated_segments_are_missing(disk):
    """Extents that nothing can have are not checked."""
    volume = disk.volume()
    assert disk.write(0, Block()) is IoOutcome.OK
    whole = volume.shape.sectors_per_extent
    behind = 3 * whole  # of another segment
    extents = np.array([0, -1, -whole, behind, 4 * whole, 1 << 61], np.int64)
    assert volume.find_missing(extents).tolist() == [False, False, False, True, True, True]
    (segment,) = (disk.directory / "v").glob("*.segment")
    os.truncate(segment, EXTENT)  # the first one is complete
    inside = np.array([0, whole // 2, whole, whole + 1], np.int64)
    assert disk.volume().find_missing(inside).tolist() == [False, False, True, True]
    os.truncate(segment, 1)
    assert disk.volume().find_missing(extents[:1]).tolist() == [True]
