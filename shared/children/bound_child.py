"""Become a program that ends with its parent, however the parent ends.

    python bound_child.py PARENT_PID PROGRAM ARGUMENT...

A parent that is killed cannot end its children, and a kvd that is left over would hold memory and
disk for ever. So Linux is asked to send SIGTERM when the parent dies; more exactly, when the thread
dies that started this process. Only the standard library is imported: this runs with -I -S.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the program, unless the parent is dead already."""
    parent, *program = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() == int(parent):
        os.execv(program[0], program)  # noqa: S606  # our own arguments


if __name__ == "__main__":
    main()
