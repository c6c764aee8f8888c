"""Sockets that are given to a group."""

import grp
import os
import socket
import stat

import pytest

from shared.access.sockets import SocketGroupError, open_to_group


@pytest.fixture
def bound(short_dir):
    """The path of a socket that has just been bound, which nobody else may open yet."""
    path = short_dir / "s"
    before = os.umask(0o077)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        os.umask(before)
        yield path


def test_a_group_may_open_a_socket(bound):
    """By name or number; without one it keeps the group that it has."""
    gid = os.getgroups()[-1] if os.getgroups() else os.getegid()
    for group in ("", str(gid), grp.getgrgid(gid).gr_name):
        open_to_group(bound, group)
        assert stat.S_IMODE(bound.stat().st_mode) == 0o660
    assert bound.stat().st_gid == gid


def test_a_group_that_is_not_there_is_named(bound):
    """With the command that makes it; the socket stays closed."""
    with pytest.raises(SocketGroupError, match="groupadd --system no-such-group"):
        open_to_group(bound, "no-such-group")
    assert stat.S_IMODE(bound.stat().st_mode) & 0o077 == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give files to anybody")
def test_a_group_of_others_is_refused(bound):
    """A user gives files to its own groups only."""
    other = max(os.getgroups(), default=0) + 12345
    with pytest.raises(SocketGroupError, match="SupplementaryGroups"):
        open_to_group(bound, str(other))
