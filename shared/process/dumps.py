"""Core dumps: keep the contents of conversations out of dumps, and from tracing by our own user.

A dump of a process would contain KV, tokens and tenants' keys, and would outlive their erasure. So
a serving process is not dumpable, unless its settings ask for it: [process] dumps. Even then the
memory of KV is excluded: each mapping of it is marked (`exclude_from_dumps`).

For a process that is not dumpable, files in /proc/PID that are not for everybody belong to root,
and only root may attach a debugger or a profiler. Its name, command, state and memory use stay
readable as before; signals, pidfds and passed descriptors are not affected.
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
    """Make this process not dumpable, for good; to be called at its start.

    Raises:
        OSError: the kernel refuses.
    """
    # The limit is inherited by children, which become dumpable again with an exec.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def may_be_dumped() -> bool:
    """Whether the kernel would write a dump of this process."""
    return bool(_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0))


def exclude_from_dumps(memory: mmap.mmap) -> None:
    """Exclude a mapping from core dumps, if the kernel can do that."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)
