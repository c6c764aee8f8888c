"""The identity of the volume in a directory: a file in it has the id, which is never guessed."""

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


def identify_volume(directory, expected="", *, holds_rows=False):
    return identify(directory, expected, NoFaults(), holds_rows=holds_rows)


def test_a_new_volume_gets_its_own_id(tmp_path):
    """It is found again, and differs from all others."""
    first, second = identify_volume(tmp_path / "a"), identify_volume(tmp_path / "b")
    assert len(first) == len(second) == 2 * ID_BYTES
    assert first != second
    assert identify_volume(tmp_path / "a", first, holds_rows=True) == first
    with pytest.raises(UnusableVolumeError, match="another volume"):
        identify_volume(tmp_path / "a", second)


def test_an_id_that_cannot_be_written_is_an_error(tmp_path):
    """Only a full disk works without one; all other failures are reported."""
    directory = tmp_path / "volume"
    (directory / ID_NAME).with_suffix(".new").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        identify_volume(directory)


class Full(NoFaults):
    """A disk without room for synced files."""

    def fsync(self, fd):
        raise OSError(errno.ENOSPC, "injected")


def test_a_full_disk_has_no_room_for_an_id(tmp_path):
    """The volume is used without one, and gets it once there is room."""
    assert identify(tmp_path, "", Full(), holds_rows=False) == ""
    assert len(identify_volume(tmp_path)) == 2 * ID_BYTES


def test_a_volume_is_removed_if_only_its_id_is_left(tmp_path):
    """A directory with other files is no empty volume, and keeps its id."""
    empty, used = tmp_path / "empty", tmp_path / "used"
    identify_volume(empty)
    used_id = identify_volume(used)
    (used / "00000.segment").write_bytes(b"data")
    remove_volume(empty)
    assert not empty.exists()
    with pytest.raises(OSError, match="not empty"):
        remove_volume(used)
    assert identify_volume(used, used_id, holds_rows=True) == used_id


@pytest.mark.parametrize("text", ["", "ab" * (ID_BYTES - 1), "ab" * (ID_BYTES + 1), "G" * 32, "é"])
def test_a_malformed_id_is_damage(tmp_path, text):
    """Too short, too long or with other characters: it is not guessed."""
    volume_id = identify_volume(tmp_path)
    (tmp_path / ID_NAME).write_text(text, encoding="utf-8")
    for expected in ("", volume_id):
        with pytest.raises(UnusableVolumeError, match=r"volume\.id is damaged"):
            identify_volume(tmp_path, expected)


def test_a_volume_without_its_id_is_unavailable(tmp_path):
    """Unless the index has nothing in it: then it gets another one."""
    volume_id = identify_volume(tmp_path)
    (tmp_path / ID_NAME).unlink()
    with pytest.raises(UnusableVolumeError, match=r"there is no volume\.id"):
        identify_volume(tmp_path, volume_id, holds_rows=True)
    assert identify_volume(tmp_path, volume_id) not in {"", volume_id}
    with pytest.raises(UnusableVolumeError, match=r"/missing does not exist$"):
        identify_volume(tmp_path / "missing", volume_id, holds_rows=True)
    assert not (tmp_path / "missing").exists()
