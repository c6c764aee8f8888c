"""The environment of a run: new directories, kvds of its own, and facts about the machine."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvd.bench.figures import Comparison, Machine, comparison
from kvd.bench.floor import open_direct
from kvd.bench.options import BenchOptions
from kvd.core.records.extent_shape import ExtentShape
from shared.children.child_kvd import ChildKvd, running_child_kvd
from shared.kvd_client.client import KvdClient
from shared.measuring.statistics import Pair
from shared.measuring.workspace import NoRoomError, common_facts, directories, shared_huge_pages
from shared.types.kv_layout import KVLayout
from shared.types.units import format_bytes
from shared.version import __version__


@dataclass(frozen=True)
class Workspace:
    """The two directories of a run, which nothing else uses.

    Attributes:
        state: directory on the file system to measure.
        runtime: directory of sockets, whose paths must be short.
    """

    state: Path
    runtime: Path


@contextmanager
def workspace(directory: Path, needed_bytes: int) -> Iterator[Workspace]:
    """Create the directories for the block inside, and remove them with their content.

    Raises:
        NoRoomError: `directory` has less than twice the room that is needed.
        OSError: nothing can be created there.
    """
    free = shutil.disk_usage(directory).free
    if free < 2 * needed_bytes:
        raise NoRoomError(
            f"{directory} has {format_bytes(free)} of free space, but the bench needs "
            f"{format_bytes(2 * needed_bytes)}, half of which it uses",
            "give another directory with --directory, or measure less with --quick",
        )
    with directories(directory, "kvd-bench-") as (state, runtime):
        yield Workspace(state, runtime)


def room_of(directory: Path) -> tuple[int, int]:
    """Return the available bytes of memory, and of disk under the directory."""
    return psutil.virtual_memory().available, shutil.disk_usage(directory).free


ATTACH_S = 60.0


@dataclass(frozen=True)
class KvdSizes:
    """The settings in which the bench's kvds differ."""

    dram_bytes: int
    ssd_bytes: int
    segment_bytes: int
    io_threads: int
    prefault: bool = True
    admission: str = "write_through"
    key_file: Path | None = None

    def toml(self) -> str:
        """Return a settings file: nothing expires, and only SSD outlives the process."""
        return f"""
[dram]
bytes = {self.dram_bytes}
prefault = {str(self.prefault).lower()}
keep = "none"
[ssd]
bytes = {self.ssd_bytes}
segment_bytes = {self.segment_bytes}
io_threads = {self.io_threads}
reserve_bytes = 0
admission = "{self.admission}"
[encryption]
key_file = "{self.key_file or ""}"
[sessions]
default_ttl = "never"
max_sessions = 10000000
[log]
level = "warning"
format = "json"
"""


@asynccontextmanager
async def running_kvd(
    work: Workspace, name: str, sizes: KvdSizes, state_dir: Path | None = None
) -> AsyncIterator[ChildKvd]:
    """Run a kvd for the block inside; it keeps its state in `state_dir`, or a new directory."""
    directory, runtime_dir = work.state / name, work.runtime / name
    state_dir = state_dir or directory / "state"
    for path in (directory, runtime_dir, state_dir):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    async with running_child_kvd(sizes.toml(), directory, runtime_dir, state_dir) as kvd:
        yield kvd


@asynccontextmanager
async def attached_client(kvd: ChildKvd, layout: KVLayout) -> AsyncIterator[KvdClient]:
    """Attach a client, as an engine would: its arena is mapped."""
    client = KvdClient(kvd.runtime_dir, layout, "kvd-bench")
    running = asyncio.create_task(client.run())
    try:
        await client.wait_attached(ATTACH_S)
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


Measure = Callable[[BenchOptions, Workspace, KVLayout], Awaitable[dict[str, list[Pair]]]]


async def of_layouts(
    what: str,
    options: BenchOptions,
    work: Workspace,
    measure: Measure,
    *,
    num_threads: int = 0,
) -> tuple[Comparison, ...]:
    """Measure with the blocks of each layout; return a comparison per layout and operation.

    Args:
        what: the part's name, for people.
        options: the options of the run.
        work: the workspace of the run.
        measure: returns pairs by operation, for blocks of one layout.
        num_threads: threads that copy; 0: the disk's threads move whole extents.
    """
    found: list[Comparison] = []
    for layout in options.scale.layouts:
        options.on_progress(f"{what}, slices of {layout.slice_bytes(0) >> 10} KiB")
        found += [
            comparison(
                operation,
                pairs,
                slice_bytes=layout.slice_bytes(0),
                io_bytes=0 if num_threads else ExtentShape(layout).full_bytes,
                num_threads=num_threads or options.io_threads,
            )
            for operation, pairs in (await measure(options, work, layout)).items()
        ]
    return tuple(found)


_LIBRARIES = ("grpcio", "numpy", "protobuf", "uvloop", "xxhash")
_RESERVED = Path("/proc/sys/vm/nr_hugepages")


def machine_facts(directory: Path) -> Machine:
    """Return facts about the machine and the file system of `directory`, a writable one."""
    device, filesystem = _mounted_at(directory)
    return Machine(
        **common_facts(_LIBRARIES),
        shared_huge_pages=shared_huge_pages(),
        reserved_huge_pages=int(_RESERVED.read_text(encoding="ascii")) if _RESERVED.exists() else 0,
        filesystem=filesystem,
        device=device,
        direct_io=_supports_direct_io(directory),
        kvd=__version__,
    )


def _mounted_at(directory: Path) -> tuple[str, str]:
    """Return device and type of a directory's mount: the longest mount point above it."""
    path = directory.resolve()
    mounts = {Path(part.mountpoint): part for part in psutil.disk_partitions(all=True)}
    for candidate in (path, *path.parents):
        if candidate in mounts:
            return mounts[candidate].device, mounts[candidate].fstype
    return "", ""


def _supports_direct_io(directory: Path) -> bool:
    path = directory / "direct.probe"
    fd, is_direct = open_direct(path)
    os.close(fd)
    path.unlink()
    return is_direct
