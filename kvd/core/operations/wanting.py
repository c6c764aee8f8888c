"""Which sessions are wanted and not stored: whoever can fetch them elsewhere is told by an event.

Pure. A turn that waits in an engine's queue wants its history long before it is loaded. Nobody here
waits for what may come: a turn whose history is not there in time computes it anew. An engine that
knows of no history asks, too: the conversation may have begun elsewhere, and come whole. Each
session is asked for once in a while; of very many only so many a second, known histories first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvd.core.records.actions import SESSION_WANTED
from kvd.core.state.cache_state import CacheState
from shared.types.queue_delta import QueuedRequest
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

ASK_AGAIN_NS = 30 * NS_PER_S
MOST_PER_S = 100
MOST_REMEMBERED = 10_000  # sessions that were asked for


class Wanting:
    """Asks for sessions of one cache state, where its limits say so."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._asked: OrderedDict[SessionKey, int] = OrderedDict()  # when, the latest last
        self._second_ns = 0
        self._num_this_second = 0

    def queued(self, requests: Iterable[QueuedRequest]) -> None:
        """Ask for the sessions of requests that wait and are not stored."""
        state = self._state
        if not state.limits.wants_sessions:
            return
        missing = [request for request in requests if request.key not in state.sessions]
        for request in sorted(missing, key=lambda one: not one.history_tokens):
            self._want(request.key, request.history_tokens)

    def _want(self, key: SessionKey, num_tokens: int) -> None:
        now_ns = self._state.now_ns
        asked_ns = self._asked.get(key)
        if asked_ns is not None and now_ns < asked_ns + ASK_AGAIN_NS:
            return
        if now_ns >= self._second_ns + NS_PER_S:
            self._second_ns, self._num_this_second = now_ns, 0
        if self._num_this_second == MOST_PER_S:
            return
        self._num_this_second += 1
        self._asked[key] = now_ns
        self._asked.move_to_end(key)
        if len(self._asked) > MOST_REMEMBERED:
            self._asked.popitem(last=False)
        self._state.outbox.count("sessions_wanted")
        self._state.outbox.emit(SESSION_WANTED, key, {"num_tokens": num_tokens})
