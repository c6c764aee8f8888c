"""Directories are claimed before any other file is made."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvd.errors import RunningError, UnusableDirectoryError
from kvd.host.directories import check_socket_paths, claim_directory


def test_a_claimed_directory_is_private_and_locked(tmp_path):
    """A new directory belongs to the owner only; a second claim is refused until the first ends."""
    path = tmp_path / "a" / "b"
    lock_fd = claim_directory(path, "state", "--state-dir")
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(RunningError, match="--state-dir"):
        claim_directory(path, "state", "--state-dir")
    os.close(lock_fd)
    os.close(claim_directory(path, "state", "--state-dir"))


def test_an_existing_directory_keeps_its_mode(tmp_path):
    """A directory that the supervisor has made for a group stays open to it."""
    path = tmp_path / "run"
    path.mkdir(mode=0o750)
    os.close(claim_directory(path, "runtime", "--runtime-dir"))
    assert path.stat().st_mode & 0o777 == 0o750


def test_unusable_directories(tmp_path):
    """World-writable directories and those that cannot be made are refused with the option."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "file").write_text("")
    for path in (open_to_all, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UnusableDirectoryError, match="--state-dir"):
            claim_directory(path, "state", "--state-dir")


def test_a_directory_that_others_write_to_can_be_corrected(tmp_path):
    """The remedy is the command; after it the directory is accepted."""
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(UnusableDirectoryError, match=f"chmod 700 {path}"):
        claim_directory(path, "state", "--state-dir")
    path.chmod(0o700)
    os.close(claim_directory(path, "state", "--state-dir"))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_created_directory_is_reported(tmp_path, is_there):
    """A typing error creates one in an unexpected place."""
    path = tmp_path / "a" / "b"
    if is_there:
        path.mkdir(parents=True)
    with capture_logs() as lines:
        os.close(claim_directory(path, "runtime", "--runtime-dir"))
    made = [line["directory"] for line in lines if line["event"] == "directory_made"]
    assert made == ([] if is_there else [str(path)])


def test_socket_paths_have_a_limit():
    """The kernel's 107 bytes are checked with the longest name."""
    check_socket_paths(Path("/" + "x" * 92))
    with pytest.raises(UnusableDirectoryError, match="107"):
        check_socket_paths(Path("/" + "x" * 93))
