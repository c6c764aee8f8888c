"""What the daemon does about its own memory: the garbage collector and the C allocator."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def building_up() -> Iterator[None]:
    """For making very many objects that stay: hundreds of thousands of sessions, say.

    The collector would walk over all of them again and again and find nothing; afterwards it leaves
    them alone. What was freed on the way is given back to the system, which glibc does not do by
    itself.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
