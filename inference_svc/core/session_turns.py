"""Which turn of each session runs and which wait behind it: one at a time, in order.

Pure. Invariants: 1. the first turn of a session's queue runs, the others wait; 2. a session without
turns has no entry; 3. the bounds hold.

Who is refused is told when to come back, each later than the one before: a thousand clients that
came back together would all but one be refused again.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from inference_svc.core.errors import QueueFullError, SessionBusyError
from shared.session_key import SessionKey

MAX_RETRY_S = 10.0  # by then things look different, and estimates are only estimates

T = TypeVar("T")


class SessionTurns(Generic[T]):
    """See the module docstring.

    Args:
        max_turns: of all sessions together, running and waiting.
        max_turns_per_session: running and waiting.
        retry_after_s: when the next place is likely free.
    """

    def __init__(
        self, max_turns: int, max_turns_per_session: int, retry_after_s: Callable[[], float]
    ) -> None:
        self._max_turns = max_turns
        self._max_turns_per_session = max_turns_per_session
        self._retry_after_s = retry_after_s
        self._num_sent_away = 0  # refused, less one for each place that has become free since
        self._queues: dict[SessionKey, deque[T]] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return self._num_turns

    def __iter__(self) -> Iterator[T]:
        return (turn for queue in self._queues.values() for turn in queue)

    def of(self, key: SessionKey) -> tuple[T, ...]:
        """Turns of a session: the running one, then those that wait."""
        return tuple(self._queues.get(key, ()))

    def enter(self, key: SessionKey, turn: T, *, wait: bool) -> bool:
        """Add a turn; return whether it runs now.

        Raises:
            SessionBusyError: a turn runs and this one does not want to wait.
            QueueFullError: a bound is reached.
        """
        queue = self._queues.get(key, ())
        if queue and not wait:
            raise SessionBusyError(
                f"session {key.session_id} has a turn under way",
                "submit again when it has finished, or with wait = true",
            )
        if self._num_turns >= self._max_turns or len(queue) >= self._max_turns_per_session:
            raise self._refusal(len(queue))
        self._queues.setdefault(key, deque()).append(turn)
        self._num_turns += 1
        return not queue

    def leave(self, key: SessionKey, turn: T) -> T | None:
        """Remove a turn that ended or gave up; return the one that runs now, if that changed."""
        queue = self._queues[key]
        was_running = queue[0] is turn
        queue.remove(turn)
        self._num_turns -= 1
        # Who was sent away need not have waited: nobody is expected at an empty service.
        self._num_sent_away = max(0, self._num_sent_away - 1) if self._num_turns else 0
        if not queue:
            del self._queues[key]
            return None
        return queue[0] if was_running else None

    def _refusal(self, num_in_session: int) -> QueueFullError:
        self._num_sent_away += 1
        retry_after_s = min(self._num_sent_away * self._retry_after_s(), MAX_RETRY_S)
        if num_in_session >= self._max_turns_per_session:
            remedy = "submit again later, or raise scheduler.max_turns_per_session"
        else:
            remedy = "submit again later, or raise scheduler.max_turns"
        return QueueFullError(
            f"{self._num_turns} turns are under way, {num_in_session} of this session",
            remedy,
            queue_length=self._num_turns,
            retry_after_s=retry_after_s,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        sizes = [len(queue) for queue in self._queues.values()]
        assert all(0 < size <= self._max_turns_per_session for size in sizes)
        assert sum(sizes) == self._num_turns <= self._max_turns
