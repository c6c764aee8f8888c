"""Which turn of each session runs and which wait behind it: one at a time, in order.

Pure. Invariants: 1. the first turn of a session's queue runs, the others wait; 2. a session without
turns has no entry; 3. the bounds hold.

Who is refused is told when to come back, each later than the one before by what a place takes to
become free: a thousand clients that came back together would nearly all be refused again. After
MAX_RETRY_S it begins anew: the pace may be estimated too slow, and places must not stay empty.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from inference_svc.core.errors import QueueFullError, SessionBusyError
from shared.session_key import SessionKey
from shared.units import NS_PER_S

MAX_RETRY_S = 10.0
MIN_PACE_S = 0.005  # between two clients that come back: refusing them costs something, too

T = TypeVar("T")


class SessionTurns(Generic[T]):
    """See the module docstring.

    Args:
        max_turns: of all sessions together, running and waiting.
        max_turns_per_session: running and waiting.
        retry_after_s: how long until the next place is likely free.
    """

    def __init__(
        self, max_turns: int, max_turns_per_session: int, retry_after_s: Callable[[], float]
    ) -> None:
        self._max_turns = max_turns
        self._max_turns_per_session = max_turns_per_session
        self._retry_after_s = retry_after_s
        self._last_return_ns = 0  # when the client that was refused last may come back
        self._queues: dict[SessionKey, deque[T]] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return self._num_turns

    def __iter__(self) -> Iterator[T]:
        return (turn for queue in self._queues.values() for turn in queue)

    def of(self, key: SessionKey) -> tuple[T, ...]:
        """Turns of a session: the running one, then those that wait."""
        return tuple(self._queues.get(key, ()))

    def enter(self, key: SessionKey, turn: T, now_ns: int, *, wait: bool) -> bool:
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
            raise self._refusal(len(queue), now_ns)
        self._queues.setdefault(key, deque()).append(turn)
        self._num_turns += 1
        return not queue

    def leave(self, key: SessionKey, turn: T) -> T | None:
        """Remove a turn that ended or gave up; return the one that runs now, if that changed."""
        queue = self._queues[key]
        was_running = queue[0] is turn
        queue.remove(turn)
        self._num_turns -= 1
        if not queue:
            del self._queues[key]
            return None
        return queue[0] if was_running else None

    def _refusal(self, num_in_session: int, now_ns: int) -> QueueFullError:
        latest_ns = now_ns + int(MAX_RETRY_S * NS_PER_S)
        pace_ns = int(max(MIN_PACE_S, self._retry_after_s()) * NS_PER_S)
        return_ns = max(now_ns, self._last_return_ns) + pace_ns
        if return_ns > latest_ns:
            return_ns = min(now_ns + pace_ns, latest_ns)
        self._last_return_ns = return_ns
        if num_in_session >= self._max_turns_per_session:
            remedy = "submit again later, or raise scheduler.max_turns_per_session"
        else:
            remedy = "submit again later, or raise scheduler.max_turns"
        return QueueFullError(
            f"{self._num_turns} turns are under way, {num_in_session} of this session",
            remedy,
            queue_length=self._num_turns,
            retry_after_s=(return_ns - now_ns) / NS_PER_S,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        sizes = [len(queue) for queue in self._queues.values()]
        assert all(0 < size <= self._max_turns_per_session for size in sizes)
        assert sum(sizes) == self._num_turns <= self._max_turns
