"""Default directories."""

import os
from pathlib import Path

from shared.process.runtime_dir import default_runtime_dir, default_state_dir


def test_runtime_dir_is_the_systems_or_the_users():
    """Root and users who may enter it use /run/kvd, others their own."""
    found = default_runtime_dir({"XDG_RUNTIME_DIR": "/run/user/7"})
    may_enter = os.geteuid() == 0 or os.access("/run/kvd", os.X_OK)
    assert found == Path("/run/kvd" if may_enter else "/run/user/7/kvd")


def test_state_dir_follows_the_supervisor():
    """The directory assigned by systemd is used, the first if there are several."""
    assert default_state_dir({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}) == Path("/var/lib/a")


def test_state_dir_without_a_supervisor():
    """Otherwise the system's for root, and the user's own for anybody else."""
    found = default_state_dir({"XDG_STATE_HOME": "/home/a/state"})
    assert found == Path("/var/lib/kvd" if os.geteuid() == 0 else "/home/a/state/kvd")
