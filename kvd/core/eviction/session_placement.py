"""SessionPlacement: which sessions to evict and which to prefetch, by queue and policy.

Pure (D1). The daemon uses it to make room in blocks (kvd/core/io/placement.py), `kvd plan` to make
room in bytes: so the plan and the product decide alike. It owns the queue, the policy and the order
of prefetching. It knows no blocks, and must not know where any byte is: its callers report what
enters and leaves a tier and, by `settle` and `reopen`, which waiting sessions have something to be
read.

*Source:* CachedAttention §3.3.1 (windows, S_kv, look-ahead prefetching).
"""

from collections.abc import Callable, Collection, Iterable
from itertools import islice

from kvd.core.eviction.policy import EvictionPolicy, PolicyContext
from kvd.core.eviction.queue_window import QueueWindow, Touched
from kvd.core.eviction.session_order import SessionOrder
from shared.types.queue_delta import QueueChange
from shared.types.session_key import SessionKey

MOST_LATE = 16  # sessions that `pick` skips at most because they cannot be read in time
MEAN_SHARE = 1 / 256  # weight of the newest session's size in the running mean


class PrefetchOrder:
    """Waiting sessions that may have something to be read into DRAM, soonest needed first.

    `pick` costs O(log sessions) for each change before it.
    """

    def __init__(self, queue: QueueWindow) -> None:
        self._queue = queue
        self._open = SessionOrder(queue.place_of)

    def __len__(self) -> int:
        """Return the number of sessions that may have something to be read."""
        return len(self._open)

    def on_queue(self, keys: Touched, unqueued: Iterable[SessionKey]) -> None:
        """Consider sessions whose places have changed; some of them no longer wait. O(1) each."""
        self._open.put(keys)
        for key in unqueued:
            self._open.leave(key)

    def reopen(self, key: SessionKey) -> None:
        """Consider a session again, if it waits: bytes of it left DRAM, or came to SSD."""
        if self._queue.is_queued(key):
            self._open.put({key: None})
        else:
            self._open.leave(key)

    def settle(self, key: SessionKey) -> None:
        """Remove a session that has nothing more to be read for now."""
        self._open.leave(key)

    def pick(self, window: int, is_in_time: Callable[[SessionKey, int], bool]) -> SessionKey | None:
        """Return the session to read next; None if there is none.

        Args:
            window: how many requests of the queue are considered (the paper's L_pw).
            is_in_time: whether a session can be read within a number of nanoseconds; 0: its start
                is not known. A session that cannot yields to a later one that can. If none can, the
                first is read all the same: what is read by then need not be read on demand.
        """
        first = None
        for place, key in islice(self._open.ranked_between(), MOST_LATE):
            if self._queue.num_ahead(place) >= window:
                break
            if is_in_time(key, self._queue.starts_in_ns(place)):
                return key
            first = first or key
        return first


class SessionPlacement:
    """The queue, the eviction policy and the order of prefetching.

    Args:
        make_policy: makes the policy; called once.
        capacity_bytes: returns the current size of DRAM and SSD together.
        has_ssd: whether there is an SSD tier.

    Attributes:
        policy: ranks sessions for eviction.
        queue: the queues of all engines, merged.
        prefetching: waiting sessions that may have something to be read.
    """

    def __init__(
        self,
        make_policy: Callable[[PolicyContext], EvictionPolicy],
        capacity_bytes: Callable[[], int],
        *,
        has_ssd: bool = True,
    ) -> None:
        self.queue = QueueWindow(self._on_queue)
        self.prefetching = PrefetchOrder(self.queue)
        self._capacity_bytes = capacity_bytes
        self._mean_bytes = 0.0
        self._num_sized = 0
        self._arriving: set[SessionKey] = set()  # sessions with a new turn in the current change
        self._loaded: dict[SessionKey, bool] = {}  # whose KV an engine has, for a turn -> it runs
        self._now_ns = 0
        self.policy = make_policy(PolicyContext(self.queue, self.eviction_window, has_ssd))

    # --------------------------------------------------------------------------------------- queue

    def replace_queue(self, engine_id: int, queue: QueueChange, now_ns: int) -> int:
        """Replace an engine's queue; return its digest.

        If the engine had no queue here before, the policy gets no `on_submit` for these turns,
        because it is not known when they arrived.
        """
        is_known = self._has_requests(engine_id)
        self._prepare_change(engine_id, queue, now_ns)
        self._arriving = self._new_turns(engine_id, queue) if is_known else set()
        return self.queue.replace(engine_id, queue, now_ns)

    def change_queue(self, engine_id: int, change: QueueChange, now_ns: int) -> int:
        """Apply a change of an engine's queue; return the digest of the result."""
        self._prepare_change(engine_id, change, now_ns)
        self._arriving = self._new_turns(engine_id, change)
        return self.queue.change(engine_id, change, now_ns)

    def forget_engine(self, engine_id: int, now_ns: int) -> None:
        """Remove an engine's queue."""
        self._now_ns = now_ns
        self._arriving = set()
        self.queue.forget(engine_id)

    @property
    def arrived(self) -> Collection[SessionKey]:
        """Sessions for which the last change of a queue has brought a new turn."""
        return self._arriving

    def is_busy(self, key: SessionKey) -> bool:
        """Whether a turn of the session waits or runs."""
        return self.queue.is_queued(key) or self.queue.is_running(key)

    @property
    def has_busy(self) -> bool:
        """Whether any session has a turn that waits or runs."""
        return len(self.queue) > 0 or self.queue.num_sessions_running > 0

    def on_load(self, key: SessionKey) -> None:
        """Record that an engine has the session's stored KV, for the turn that waits or runs."""
        if self.is_busy(key):
            self._loaded[key] = self.queue.is_running(key)

    def is_released(self, key: SessionKey) -> bool:
        """Whether a turn runs in an engine that has its KV, so that DRAM need not keep it too.

        Running alone does not say so: a session begins to run before it is loaded.
        """
        return key in self._loaded and self.queue.is_running(key)

    # ------------------------------------------------------------------------------------- windows

    def observe_size(self, num_bytes: int) -> None:
        """Record the size of a session that was just stored, for the mean S_kv."""
        self._num_sized += 1
        share = max(MEAN_SHARE, 1 / self._num_sized)
        self._mean_bytes += share * (num_bytes - self._mean_bytes)

    @property
    def mean_bytes(self) -> int:
        """S_kv in bytes; 0: nothing was stored yet."""
        return int(self._mean_bytes)

    def window(self, capacity_bytes: int) -> int:
        """Return how many sessions of mean size fit a capacity; 0 if nothing was stored yet."""
        return int(capacity_bytes / self._mean_bytes) if self._mean_bytes else 0

    def eviction_window(self) -> int:
        """Return the paper's L_ew: how many sessions of mean size fit in both tiers."""
        return self.window(self._capacity_bytes())

    # -------------------------------------------------------------------------------------- inside

    def _prepare_change(self, engine_id: int, change: QueueChange, now_ns: int) -> None:
        """Record, before a change is applied, what can no longer be seen afterwards."""
        self._now_ns = now_ns
        for request in change.running:
            if self.queue.is_running(request.key) and not self.queue.runs(
                engine_id, request.number
            ):
                self._loaded.pop(request.key, None)  # the turn that it was loaded for has ended

    def _new_turns(self, engine_id: int, change: QueueChange) -> set[SessionKey]:
        """Return the sessions with a new request, even if the same change reports its end."""
        if not self._has_requests(engine_id):
            return {*change.waiting.keys, *(request.key for request in change.running)}
        holds = self.queue.holds
        waiting = zip(change.waiting.numbers, change.waiting.keys, strict=True)
        return {key for number, key in waiting if not holds(engine_id, number)} | {
            request.key for request in change.running if not holds(engine_id, request.number)
        }

    def _has_requests(self, engine_id: int) -> bool:
        return bool(self.queue.num_waiting(engine_id) or self.queue.num_running(engine_id))

    def _on_queue(self, touched: Touched, unqueued: list[SessionKey]) -> None:
        """Update everything that depends on the queue, after a change of these sessions."""
        for key in self._loaded.keys() & touched.keys():
            is_running = self.queue.is_running(key)
            if (self._loaded[key] and not is_running) or not self.is_busy(key):
                del self._loaded[key]
            else:
                self._loaded[key] = is_running
        for key in touched if self._arriving else ():
            if key in self._arriving:
                self.policy.on_submit(key, self._now_ns)
        self.policy.on_queue(touched, unqueued, self._now_ns)
        self.prefetching.on_queue(touched, unqueued)
