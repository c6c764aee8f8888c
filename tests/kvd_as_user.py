"""`kvd` as somebody else: what root starts goes on as a user of one group.

    python -m tests.kvd_as_user GID COMMAND ...

Modules are loaded by root, because others may not be able to read them.
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
    """Open the way to a test's directory: those above it are pytest's own, more with workers."""
    for part in (directory, *directory.parents):
        if part == Path(tempfile.gettempdir()):
            return
        part.chmod(part.stat().st_mode | 0o011)


@contextmanager
def without_root(directory: Path) -> Iterator[None]:
    """Go on as somebody else, who may enter the directory; who is not root stays themselves."""
    let_others_enter(directory)
    user = os.geteuid()
    os.seteuid(user or NOBODY_UID)
    try:
        yield
    finally:
        os.seteuid(user)


def main() -> None:
    """Run it as its command line says."""
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
