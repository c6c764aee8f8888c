"""Explanations why a user cannot open a socket."""

import grp
import os
import socket
import subprocess
import sys

import pytest

from shared.access.denials import denial_of
from tests.kvd_as_user import let_others_enter

NOBODY = 65534
GROUP = grp.getgrgid(1).gr_name
AS_NOBODY = """
import os, sys
from pathlib import Path
from shared.access.denials import denial_of
denial_of(Path("/"))  # modules are loaded by root
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
denial = denial_of(Path(sys.argv[1]))
print("" if denial is None else f"{denial.what}: {denial.remedy}")
"""


@pytest.fixture
def bound(short_dir):
    """Bind a socket of root's and of a group, in a directory that every user may enter."""
    let_others_enter(short_dir)
    path = short_dir / "d" / "s"
    path.parent.mkdir()
    path.parent.chmod(0o711)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        os.chown(path, 0, 1)
        path.chmod(0o660)
        yield path


def remedy_without_groups(path):
    """Return the remedy for a user without groups."""
    command = [sys.executable, "-c", AS_NOBODY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_owner_and_group_are_named(bound):
    """Of the socket, or of a closed directory above it; with the access that a group gives."""
    said = remedy_without_groups(bound)
    assert f"may not open {bound} (root:{GROUP}, mode 660)" in said
    assert f"become a member of group {GROUP} (sudo usermod -aG {GROUP} nobody" in said
    bound.chmod(0o600)
    said = remedy_without_groups(bound)
    assert "mode 600): use sudo, or be root" in said
    bound.parent.chmod(0o700)
    said = remedy_without_groups(bound)
    assert f"may not enter {bound.parent} (root:root, mode 700): use sudo" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_an_accessible_or_missing_socket_is_not_denied(bound):
    """And what is not there is not denied to anybody: nobody listens."""
    bound.chmod(0o666)
    assert remedy_without_groups(bound) == ""
    assert remedy_without_groups(bound.with_name("none")) == ""
    assert denial_of(bound) is None
