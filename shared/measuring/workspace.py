"""Where a measurement keeps its files, and how it ends: whatever it made is removed."""

import asyncio
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop

from shared.types.errors import ExhaustedError
from shared.types.units import format_bytes

T = TypeVar("T")


class NoRoomError(ExhaustedError):
    """The memory, or the disk, does not hold what is to be measured."""

    reason = "no_room"


@contextmanager
def directories(parent: Path, prefix: str) -> Iterator[tuple[Path, Path]]:
    """Make two directories that nobody else uses, removed with all that is in them at the end.

    Returns:
        One in `parent`, on the disk to measure; and one for sockets, whose paths must be short.

    Raises:
        OSError: nothing can be made there.
    """
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as state,
        tempfile.TemporaryDirectory(prefix=prefix) as runtime,
    ):
        yield Path(state), Path(runtime)


def check_memory(needed_bytes: int, what: str, remedy: str) -> None:
    """Raise NoRoomError unless the machine has that much memory to give."""
    available = psutil.virtual_memory().available
    if available < needed_bytes:
        raise NoRoomError(
            f"{what} would take {format_bytes(needed_bytes)}, {format_bytes(available)} of memory"
            " are available",
            remedy,
        )


def run_until_signal(measure: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a measurement; SIGTERM ends it as Ctrl-C does, so that everything is removed.

    Raises:
        KeyboardInterrupt: one of the two came.
    """

    async def measured() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "the runner runs a task"  # noqa: S101
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            return await measure()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(measured())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
