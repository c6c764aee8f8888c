"""Children of benches and of the demo, forked from a process with its imports done.

They start their children with `shared.children.child_process`; here that forks instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.children.child_process import ChildProcess, Spawned
from tests.inference_processes import SERVICE
from tests.processes import KVD
from tests.warm_python import WarmPython


@contextmanager
def warm_children(kvd: WarmPython = KVD, service: WarmPython = SERVICE) -> Iterator[None]:
    """Fork this process's children, inside the block, from processes with their imports done."""

    def spawn(child: ChildProcess, log: int) -> Spawned:
        module, *arguments = map(str, child._arguments)
        if module == "kvd":
            return kvd.spawn("kvd.__main__", arguments, child._whole_environ, log)
        return service.spawn(module, arguments, child._whole_environ, log)

    before = ChildProcess._spawn
    ChildProcess._spawn = spawn
    try:
        yield
    finally:
        ChildProcess._spawn = before
