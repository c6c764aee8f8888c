"""Sockets that are given to a group."""

import grp
import os
import socket
import stat

import pytest

from shared.access.sockets import SocketGroupError, open_to_group


@pytest.fixture
def bound(short_dir):
    """Bind a socket that only its owner can open, and return its path."""
    path = short_dir / "s"
    before = os.umask(0o077)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        os.umask(before)
        yield path


def test_a_group_may_open_a_socket(bound):
    """By name or number; without one it keeps its group."""
    gid = os.getgroups()[-1] if os.getgroups() else os.getegid()
    for group in ("", str(gid), grp.getgrgid(gid).gr_name):
        open_to_group(bound, group)
        assert stat.S_IMODE(bound.stat().st_mode) == 0o660
    assert bound.stat().st_gid == gid


def test_a_missing_group_is_named(bound):
    """With the command that creates it; the socket stays closed."""
    with pytest.raises(SocketGroupError, match="groupadd --system no-such-group"):
        open_to_group(bound, "no-such-group")
    assert stat.S_IMODE(bound.stat().st_mode) & 0o077 == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give files to anybody")
def test_a_foreign_group_is_refused(bound):
    """Users can give files only to their own groups."""
    other = max(os.getgroups(), default=0) + 12345
    with pytest.raises(SocketGroupError, match="SupplementaryGroups"):
        open_to_group(bound, str(other))
