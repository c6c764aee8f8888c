"""What benches and the demo start as their children, forked with its imports done.

They start them as `shared.children.child_process` does; here it is asked for a fork instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.children.child_process import ChildProcess, Spawned
from tests.inference_processes import SERVICE
from tests.processes import KVD
from tests.warm_python import WarmPython


@contextmanager
def warm_children(kvd: WarmPython = KVD, service: WarmPython = SERVICE) -> Iterator[None]:
    """Have the children of this process forked, inside the block.

    Args:
        kvd: forks those that run a module of kvd.
        service: forks the others.
    """

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
