"""The turns under way by session: one runs at a time, the others wait behind it in order.

A turn that was cancelled ends at once, and leaves its session as it was. So its client may submit
the next turn without waiting for that.

Pure. Invariants: 1. the first turn of a session's queue runs, the others wait; 2. a session without
turns has no entry; 3. the bounds hold.

A refused client gets a time to return at (`ReturnTimes`). Each tenant has its own, so that a tenant
that retries again and again does not delay others.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from inference_svc.core.errors import QueueFullError, SessionBusyError
from inference_svc.core.tenant_limits import ReturnTimes
from shared.types.session_key import SessionKey

MAX_RETRY_S = 10.0
MAX_RETURNS = 1024  # tenants whose return times are kept; more if their times are to come
MIN_PACE_S = 0.005  # between two clients that return: refusing them costs time, too

T = TypeVar("T")


class SessionTurns(Generic[T]):
    """The queues of turns, one for each session.

    Args:
        max_turns: most turns of all sessions together, running and waiting.
        max_turns_per_session: most turns of one session, running and waiting.
        retry_after_s: returns in how many seconds the next place will likely be free.
        is_leaving: returns whether a turn was cancelled and ends at once, so that it blocks no
            other.
    """

    def __init__(
        self,
        max_turns: int,
        max_turns_per_session: int,
        retry_after_s: Callable[[], float],
        is_leaving: Callable[[T], bool] = lambda _: False,
    ) -> None:
        self._max_turns = max_turns
        self._max_turns_per_session = max_turns_per_session
        self._retry_after_s = retry_after_s
        self._is_leaving = is_leaving
        self._returns: dict[str, ReturnTimes] = {}  # by tenant
        self._queues: dict[SessionKey, deque[T]] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return self._num_turns

    def __iter__(self) -> Iterator[T]:
        return (turn for queue in self._queues.values() for turn in queue)

    def of(self, key: SessionKey) -> tuple[T, ...]:
        """List the turns of a session: the running one, then the waiting ones."""
        return tuple(self._queues.get(key, ()))

    def is_busy(self, key: SessionKey) -> bool:
        """Return whether a session has a turn that does not end at once."""
        return not all(map(self._is_leaving, self.of(key)))

    def enter(self, key: SessionKey, turn: T, now_ns: int, *, wait: bool) -> bool:
        """Add a turn; return whether it runs now.

        Args:
            key: the session's key.
            turn: the turn.
            now_ns: the time.
            wait: whether it may wait behind other turns of its session.

        Raises:
            SessionBusyError: a turn runs, and this one may not wait.
            QueueFullError: a bound is reached.
        """
        queue = self._queues.get(key, ())
        if not wait and self.is_busy(key):
            raise SessionBusyError(
                f"session {key.session_id} already has a turn that runs or waits",
                "submit again when it has finished, or with wait = true",
            )
        if self._num_turns >= self._max_turns or len(queue) >= self._max_turns_per_session:
            raise self._refusal(key.tenant, len(queue), now_ns)
        self._queues.setdefault(key, deque()).append(turn)
        self._num_turns += 1
        return not queue

    def leave(self, key: SessionKey, turn: T) -> T | None:
        """Remove a turn that ended or was cancelled.

        Returns:
            The turn that runs in its place from now on; None: there is none.
        """
        queue = self._queues[key]
        was_running = queue[0] is turn
        queue.remove(turn)
        self._num_turns -= 1
        if not queue:
            del self._queues[key]
            return None
        return queue[0] if was_running else None

    def _refusal(self, tenant: str, num_in_session: int, now_ns: int) -> QueueFullError:
        if len(self._returns) >= MAX_RETURNS:
            self._returns = {n: r for n, r in self._returns.items() if r.last_ns > now_ns}
        returns = self._returns.setdefault(tenant, ReturnTimes())
        pace_s = min(max(MIN_PACE_S, self._retry_after_s()), MAX_RETRY_S)
        if num_in_session >= self._max_turns_per_session:
            remedy = "submit again later, or raise scheduler.max_turns_per_session"
        else:
            remedy = "submit again later, or raise scheduler.max_turns"
        return QueueFullError(
            f"{self._num_turns} turns run or wait, {num_in_session} of them in this session",
            remedy,
            queue_length=self._num_turns,
            retry_after_s=returns.next_s(now_ns, pace_s, pace_s, MAX_RETRY_S),
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        sizes = [len(queue) for queue in self._queues.values()]
        assert all(0 < size <= self._max_turns_per_session for size in sizes)
        assert sum(sizes) == self._num_turns <= self._max_turns
