"""Which volume a directory holds: a file in it says so, and it is never guessed."""

import errno

import pytest

from kvd.tiers.faults import NoFaults
from kvd.tiers.volume_identity import (
    ID_BYTES,
    ID_NAME,
    UnusableVolumeError,
    identify,
    remove_volume,
)


def identified(directory, expected="", *, holds_rows=False):
    return identify(directory, expected, NoFaults(), holds_rows=holds_rows)


def test_a_new_volume_has_an_id_of_its_own(tmp_path):
    """It is found again, and told from every other."""
    first, second = identified(tmp_path / "a"), identified(tmp_path / "b")
    assert len(first) == len(second) == 2 * ID_BYTES
    assert first != second
    assert identified(tmp_path / "a", first, holds_rows=True) == first
    with pytest.raises(UnusableVolumeError, match="another volume"):
        identified(tmp_path / "a", second)


def test_an_id_that_cannot_be_written_is_no_volume_without_one(tmp_path):
    """Only a full disk goes without; whatever else is wrong is reported."""
    directory = tmp_path / "volume"
    (directory / ID_NAME).with_suffix(".new").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        identified(directory)


class Full(NoFaults):
    """A disk without room for what is synced."""

    def fsync(self, fd):
        raise OSError(errno.ENOSPC, "injected")


def test_a_full_disk_has_no_room_for_an_id(tmp_path):
    """The volume is used without one, and gets it once there is room."""
    assert identify(tmp_path, "", Full(), holds_rows=False) == ""
    assert len(identified(tmp_path)) == 2 * ID_BYTES


def test_a_volume_is_removed_if_only_its_id_is_left(tmp_path):
    """Where something else is, it is no empty volume, and keeps its id."""
    empty, used = tmp_path / "empty", tmp_path / "used"
    identified(empty)
    used_id = identified(used)
    (used / "00000.segment").write_bytes(b"data")
    remove_volume(empty)
    assert not empty.exists()
    with pytest.raises(OSError, match="not empty"):
        remove_volume(used)
    assert identified(used, used_id, holds_rows=True) == used_id


@pytest.mark.parametrize("text", ["", "ab" * (ID_BYTES - 1), "ab" * (ID_BYTES + 1), "G" * 32, "é"])
def test_an_id_that_is_none_is_damage(tmp_path, text):
    """Too short, too long or of other letters: nobody guesses what it was."""
    volume_id = identified(tmp_path)
    (tmp_path / ID_NAME).write_text(text, encoding="utf-8")
    for expected in ("", volume_id):
        with pytest.raises(UnusableVolumeError, match=r"volume\.id is damaged"):
            identified(tmp_path, expected)


def test_a_volume_that_lost_its_id_is_not_there(tmp_path):
    """Unless the index has nothing in it: then it gets another one."""
    volume_id = identified(tmp_path)
    (tmp_path / ID_NAME).unlink()
    with pytest.raises(UnusableVolumeError, match=r"there is no volume\.id"):
        identified(tmp_path, volume_id, holds_rows=True)
    assert identified(tmp_path, volume_id) not in {"", volume_id}
    with pytest.raises(UnusableVolumeError, match=r"/missing does not exist$"):
        identified(tmp_path / "missing", volume_id, holds_rows=True)
    assert not (tmp_path / "missing").exists()
