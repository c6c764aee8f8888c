"""`kvd` as somebody else: what root starts goes on as a user of one group.

    python -m tests.kvd_as_user GID COMMAND ...

Modules are loaded by root, because others may not be able to read them.
"""

import os
import sys
from contextlib import redirect_stdout
from io import StringIO

from kvd.cli.main import main as kvd

NOBODY_UID = 65534


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
