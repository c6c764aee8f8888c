"""Completions: passes operations that ended in threads to the event loop, in batches.

Operations that end together share one wake-up of the loop, because a wake-up costs a system call
and some ten microseconds of the loop, and blocks end by the dozen.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from kvd.core.records.actions import IoOutcome
from shared.process.log import get_logger
from shared.types.histogram import Histogram

if TYPE_CHECKING:
    from kvd.core.engine import CacheEngine

LOAD, AHEAD = "load", "ahead"  # purpose of a read when it begins; a load may wait for it later
MAX_AT_ONCE = 64  # items handled before other callbacks of the loop run

T = TypeVar("T")
Completion: TypeAlias = Callable[["CacheEngine"], None]  # reports an ended operation to the engine

log = get_logger(__name__)


@dataclass(frozen=True)
class IoHistograms:
    """Durations of the SSD tier of one layout, in seconds; updated on the event loop.

    Attributes:
        read_s: read of one block, from the request to its verified bytes, by purpose.
        write_s: write of one block, from the request until it is durable.
        load_wait_s: wait of one load, from its grant until the last block that it waits for.
    """

    read_s: Histogram = field(default_factory=Histogram)
    write_s: Histogram = field(default_factory=Histogram)
    load_wait_s: Histogram = field(default_factory=Histogram)


class EndedOperations(NamedTuple):
    """Operations that have ended in a thread, to be reported to the engine together.

    Attributes:
        completion: reports them to the engine.
        op_id: an operation among them that loads may wait for; None: there is none.
        is_good: whether the operation `op_id` has succeeded.
        num_ops: number of the operations.
    """

    completion: Completion
    op_id: int | None = None
    is_good: bool = True
    num_ops: int = 1


def verification_ended(op_id: int, outcome: IoOutcome) -> EndedOperations:
    """Return the ended verification of a slot or an extent."""
    return EndedOperations(
        lambda engine: engine.arrivals.verify_done(op_id, outcome),
        op_id,
        outcome is IoOutcome.OK,
    )


def run_guarded(event: str, work: Callable[[], T], fallback: T, **fields: object) -> T:
    """Do an operation's work in a thread; log any exception, so that the operation always ends.

    Args:
        event: log event of an exception.
        work: does the work, and returns its result.
        fallback: result if the work raises.
        fields: fields of the log event.
    """
    try:
        return work()
    except Exception:
        log.exception(event, **fields)
        return fallback


class Completions(Generic[T]):
    """A queue from threads to the event loop, which calls `handle` with each item in order."""

    def __init__(self, handle: Callable[[T], None]) -> None:
        self._handle = handle
        self._items: deque[T] = deque()
        self._is_wake_due = False
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        """Count the items that are not handled yet."""
        return len(self._items)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Accept items, to be handled on this loop."""
        self._loop = loop

    def close(self) -> None:
        """Handle all queued items, and drop later ones. Called on the loop."""
        try:
            while self._items:
                self._handle(self._items.popleft())
        finally:
            self._is_closed = True

    def put(self, item: T) -> None:
        """Queue an item for the loop. Any thread may call this."""
        assert self._loop is not None, "completions are started before they come"  # noqa: S101
        if self._is_closed:
            return
        self._items.append(item)
        if not self._is_wake_due:  # read after the append: see _handle_items
            self._is_wake_due = True
            self._loop.call_soon_threadsafe(self._handle_items)

    def _handle_items(self) -> None:
        """Handle queued items.

        The flag is cleared before the queue is read, and put() reads it after it has appended. So
        an item is handled here, or put() wakes the loop again.
        """
        assert self._loop is not None, "completions are started before they come"  # noqa: S101
        self._is_wake_due = False
        try:
            for _ in range(MAX_AT_ONCE):
                if not self._items or self._is_closed:
                    return
                self._handle(self._items.popleft())
        finally:  # also if `handle` raises: the other items must still be handled
            if self._items and not self._is_wake_due and not self._is_closed:
                self._is_wake_due = True
                self._loop.call_soon(self._handle_items)
