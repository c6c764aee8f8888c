"""Settings that need more than the machine has."""

import os

import psutil
import pytest

from shared.config.room import Demand, check_room
from shared.config.settings import InvalidSettingsError


def test_the_machines_resources_may_be_used(tmp_path):
    """All of its memory, all of its disk, and sizes of "auto"."""
    disk = os.statvfs(tmp_path)
    check_room(
        (
            Demand("a", psutil.virtual_memory().total),
            Demand("b", disk.f_blocks * disk.f_frsize, tmp_path),
            Demand("c", None),
        )
    )


def test_more_than_the_machine_has_is_refused(tmp_path):
    """Each with its key, its value, the available size, and the remedy."""
    below = tmp_path / "not" / "there"  # measured where it will be
    disk = os.statvfs(tmp_path)
    too_much = disk.f_blocks * disk.f_frsize + 1
    with pytest.raises(InvalidSettingsError) as refused:
        check_room(
            (
                Demand("dram.bytes", 999 << 40, instead='"auto"'),
                Demand("ssd.bytes", too_much, below),
                Demand("fine", 1),
            )
        )
    memory, ssd = refused.value.problems
    assert memory.startswith("dram.bytes = 999.0 TB is more than the ")
    assert memory.endswith('of memory of this machine: write less, or "auto"')
    assert ssd.startswith("ssd.bytes = ")
    assert f"of disk under {below} of this machine: write less" in ssd
