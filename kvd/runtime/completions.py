"""Operations that end in threads, how long they took, and their way to the event loop.

There is one wake-up for all that ends together: it costs a system call and some ten microseconds of
the loop, and blocks end by the dozen.
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

LOAD, AHEAD = "load", "ahead"  # what a read is for when it begins; a load may come meanwhile
MAX_AT_ONCE = 64  # handled before other callbacks of the loop get their turn

T = TypeVar("T")
Completion: TypeAlias = Callable[["CacheEngine"], None]  # reports an end to the cache engine

log = get_logger(__name__)


@dataclass(frozen=True)
class IoHistograms:
    """How long the SSD tier of one layout takes; counted on the event loop.

    Attributes:
        read_s: of one block, from the request to its verified bytes, by purpose.
        write_s: of one block, from the request until it is durable.
        load_wait_s: of one load, from its grant until the last block it waited for was there.
    """

    read_s: Histogram = field(default_factory=Histogram)
    write_s: Histogram = field(default_factory=Histogram)
    load_wait_s: Histogram = field(default_factory=Histogram)


class Ended(NamedTuple):
    """Operations that have ended, on their way to the engine.

    Attributes:
        completion: reports them to the engine.
        op_id: of one that loads may wait for; None: there is none such.
        is_good: whether that one has brought what it was to bring.
        num_ops: how many are answered by it.
    """

    completion: Completion
    op_id: int | None = None
    is_good: bool = True
    num_ops: int = 1


def verified(op_id: int, outcome: IoOutcome) -> Ended:
    """Return the end of a verification, of a slot or of an extent."""
    return Ended(
        lambda engine: engine.arrivals.verify_done(op_id, outcome),
        op_id,
        outcome is IoOutcome.OK,
    )


def attempt(event: str, work: Callable[[], T], otherwise: T, **fields: object) -> T:
    """Do the work of an operation in a thread, at the edge: without an answer it would never end.

    Args:
        event: logged with `fields` when the work raises what it should not.
        work: returns what is to be answered.
        otherwise: the answer when it raises.
        fields: written to the log with it.
    """
    try:
        return work()
    except Exception:
        log.exception(event, **fields)
        return otherwise


class Completions(Generic[T]):
    """Calls `handle` on the loop for each item that threads put, in order."""

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
        """Open for items."""
        self._loop = loop

    def close(self) -> None:
        """Handle what is there; what is put from now on is dropped. On the loop."""
        try:
            while self._items:
                self._handle(self._items.popleft())
        finally:
            self._is_closed = True

    def put(self, item: T) -> None:
        """Queue an item for the loop; from any thread."""
        assert self._loop is not None, "completions are started before they come"  # noqa: S101
        if self._is_closed:
            return
        self._items.append(item)
        if not self._is_wake_due:  # read after the append: see _hand_over
            self._is_wake_due = True
            self._loop.call_soon_threadsafe(self._handle_items)

    def _handle_items(self) -> None:
        """Handle what is there. The flag goes down first: what is put later wakes us anew."""
        assert self._loop is not None, "completions are started before they come"  # noqa: S101
        self._is_wake_due = False
        try:
            for _ in range(MAX_AT_ONCE):
                if not self._items or self._is_closed:
                    return
                self._handle(self._items.popleft())
        finally:  # also when one of them breaks an invariant: the others have their own
            if self._items and not self._is_wake_due and not self._is_closed:
                self._is_wake_due = True
                self._loop.call_soon(self._handle_items)
