"""What a process does about its own memory: the garbage collector and the C allocator."""

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

LONG_PASS_S = 0.01  # a full pass of the collector stops everybody
_FULL = 2  # the generation of a full pass


@contextmanager
def building_up() -> Iterator[None]:
    """For making very many objects that stay: hundreds of thousands of sessions, torch's modules.

    The collector would walk over all of them again and again and find nothing; afterwards it leaves
    them alone. What was freed on the way is returned to the system, which glibc does not do by
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


@contextmanager
def sparing_survivors(long_pass_s: float = LONG_PASS_S) -> Iterator[None]:
    """Have the garbage collector leave alone what a long full pass of it did not free.

    Sessions that come while kvd serves are millions of objects in the end, without a cycle among
    them: each full pass over them would stop every engine for a second. So a pass looks at what has
    come since the last long one, which is a bounded number of objects. What is freed without the
    collector, as sessions are, is freed as ever. The price: a cycle that was in use during a long
    pass stays for good, be it garbage later: those few of connections and calls under way.
    """
    began_s = 0.0

    def passed(phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        nonlocal began_s
        if info["generation"] < _FULL:
            return
        if phase == "start":
            began_s = time.thread_time()
        elif time.thread_time() - began_s >= long_pass_s:
            gc.freeze()

    gc.callbacks.append(passed)
    try:
        yield
    finally:
        gc.callbacks.remove(passed)
