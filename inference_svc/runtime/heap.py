"""The process's heap: what was freed is kept for the next step.

Every layer of a step makes tensors of some megabytes and frees them. By default the C library gives
such memory back to the system at once, or not, depending on what else lies beside it, and the next
layer has it faulted in and zeroed anew: up to 1 % of a step, and more where a host must find the
page first.
"""

import ctypes

from shared.types.units import MIB

# Of mallopt (glibc's malloc.h); other C libraries have no such function, and no such habit.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 1024 * MIB  # free memory at the end of a heap, above which it is given back
HEAP_BYTES = 32 * MIB  # larger pieces are mapped one by one; glibc's own bound


def keep_freed_memory() -> bool:
    """Have the heap keep what is freed; from now on, in every thread.

    Returns:
        whether the C library does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # Whichever is set, glibc adapts neither by itself any more: so both are.
    is_kept = [
        mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES),
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES),
    ]
    return all(is_kept)
