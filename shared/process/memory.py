"""A process's own memory: control of the garbage collector and the C allocator."""

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

LONG_PASS_S = 0.01  # a full pass of the collector stops all threads
_FULL = 2  # the generation of a full pass


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector while very many objects are made that stay.

    Those are hundreds of thousands of sessions, or torch's modules. The collector would walk over
    all of them again and again and find nothing. At the end they are frozen, so that it ignores
    them from then on. Memory that was freed meanwhile is returned to the system, which glibc does
    not do by itself.
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
def freezing_survivors(long_pass_s: float = LONG_PASS_S) -> Iterator[None]:
    """Freeze, after each long full pass of the garbage collector, the objects that it did not free.

    Sessions that come while kvd serves are millions of objects in the end, without any reference
    cycle. Each full pass over them would stop every engine for a second. So a pass looks only at
    objects that were made since the last long one, a bounded number. Objects that are freed by
    reference counting, as sessions are, are freed as before. The price: a cycle that was in use
    during a long pass is never freed, even if it becomes garbage later. Those are few, of
    connections and calls under way.
    """
    began_s = 0.0

    def on_pass(phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        nonlocal began_s
        if info["generation"] < _FULL:
            return
        if phase == "start":
            began_s = time.thread_time()
        elif time.thread_time() - began_s >= long_pass_s:
            gc.freeze()

    gc.callbacks.append(on_pass)
    try:
        yield
    finally:
        gc.callbacks.remove(on_pass)
