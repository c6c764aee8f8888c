"""The workspace of a measurement: directories, memory, an end on Ctrl-C, facts of the machine.

Everything that is made is removed at the end. Without the facts of the machine, measurements cannot
be compared.
"""

import asyncio
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop

from shared.types.errors import ExhaustedError
from shared.types.units import format_bytes

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def common_facts(libraries: Iterable[str]) -> dict[str, Any]:
    """Return the facts of the machine for every report, by their names in the document.

    Args:
        libraries: names of libraries whose versions matter.
    """
    return {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": private_huge_pages(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in libraries},
    }


def cpu_name() -> str:
    """Return the processor's name, as the kernel reports it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def private_huge_pages() -> str:
    """Return when private memory gets transparent huge pages: "always", "madvise" or "never"."""
    return _selected(_HUGE_PAGES / "enabled")


def shared_huge_pages() -> str:
    """Return when shared memory gets transparent huge pages: "advise", "never", …."""
    return _selected(_HUGE_PAGES / "shmem_enabled")


def _selected(setting: Path) -> str:
    """Return the mode in brackets of "always [madvise] never"; "" without such a setting."""
    text = setting.read_text(encoding="ascii") if setting.exists() else ""
    return text.partition("[")[2].partition("]")[0]


T = TypeVar("T")


class NoRoomError(ExhaustedError):
    """The memory, or the disk, is too small for what is to be measured."""

    reason = "no_room"


@contextmanager
def directories(parent: Path, prefix: str) -> Iterator[tuple[Path, Path]]:
    """Make two temporary directories, which are removed with their contents at the end.

    Returns:
        One in `parent`, on the disk to measure; and one for sockets, whose paths must be short.

    Raises:
        OSError: no directory can be made there.
    """
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as state,
        tempfile.TemporaryDirectory(prefix=prefix) as runtime,
    ):
        yield Path(state), Path(runtime)


def check_memory(needed_bytes: int, what: str, remedy: str) -> None:
    """Raise NoRoomError unless this much memory is available."""
    available = psutil.virtual_memory().available
    if available < needed_bytes:
        raise NoRoomError(
            f"{what} would take {format_bytes(needed_bytes)}, but only "
            f"{format_bytes(available)} of memory are available",
            remedy,
        )


def run_until_signal(measure: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a measurement. SIGTERM ends it like Ctrl-C, so that everything is removed.

    Raises:
        KeyboardInterrupt: one of the two came.
    """

    async def run() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "the runner runs a task"  # noqa: S101
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            return await measure()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(run())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
