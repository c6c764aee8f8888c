"""Keeps what conversations say out of core dumps, and from whoever may trace processes of our user.

A dump of a process would have keys and values, tokens and tenants' keys in it, and would outlive
whatever is done to erase them. So a serving process is not dumpable, unless its settings say that
it is to be: [process] dumps. Even then the memory of KV is left out: each mapping of it is marked
(`leave_out`).

Not dumpable also means: files in /proc/PID are root's, where they are not for everybody, and only
root may attach a debugger or a profiler. What others read of a process (its name, command, state,
memory) they still can; signals, pidfds and descriptors that are passed on are not affected.
"""

import ctypes
import mmap
import os
import resource
from contextlib import suppress

_PR_GET_DUMPABLE = 3
_PR_SET_DUMPABLE = 4

_libc = ctypes.CDLL(None, use_errno=True)


def forbid_dumps() -> None:
    """Make this process undumpable for good. At its start.

    Raises:
        OSError: the kernel refuses.
    """
    # The limit is for children too, which are dumpable again after an exec.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def may_be_dumped() -> bool:
    """Whether the kernel would write a dump of this process."""
    return bool(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))


def leave_out(memory: mmap.mmap) -> None:
    """Leave a mapping out of dumps; a kernel that cannot do that is not worth failing for."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)
