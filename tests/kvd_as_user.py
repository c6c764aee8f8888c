"""`kvd` as an unprivileged user of one group, started by root.

    python -m tests.kvd_as_user GID COMMAND ...

Modules are loaded by root, because the other user may not be able to read them.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

from kvd.cli.main import main as kvd

NOBODY_UID = 65534


def let_others_enter(directory: Path) -> None:
    """Let other users enter a test's directory: pytest creates its parents for one user only."""
    for part in (directory, *directory.parents):
        if part == Path(tempfile.gettempdir()):
            return
        part.chmod(part.stat().st_mode | 0o011)


@contextmanager
def without_root(directory: Path) -> Iterator[None]:
    """Become an unprivileged user who may enter the directory; do nothing if not root."""
    let_others_enter(directory)
    user = os.geteuid()
    os.seteuid(user or NOBODY_UID)
    try:
        yield
    finally:
        os.seteuid(user)


def main() -> None:
    """Run `kvd` as the command line says."""
    gid, *command = sys.argv[1:]
    try:
        with redirect_stdout(StringIO()):
            kvd([command[0], "--help"])
    except SystemExit:
        pass
    os.setgroups([])
    os.setresgid(*[int(gid)] * 3)
    os.setresuid(*[NOBODY_UID] * 3)
    kvd(command)


if __name__ == "__main__":
    main()
