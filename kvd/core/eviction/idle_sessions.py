"""IdleSessions: what sessions did so far, how long they have been idle, what keeping them pays.

Pure. Sessions that are not stored (first turns that still wait, and *ghosts*, that were dropped)
are watched too, at most MOST_GHOSTS of them: else no return of a dropped session would ever be
seen, and only sessions that were kept would be learned from.

Invariants: 1. a session is idle or busy, and only idle ones age; 2. a history is of a session that
is stored or among the ghosts; 3. only sessions with a history wait to age, each once, however often
they became idle and whether or not anybody asks who has aged.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvd.core.eviction.return_hazards import (
    EDGES_NS,
    ReturnHazards,
    SessionClass,
    Traits,
    bucket_at,
    observe,
)
from kvd.core.eviction.tool_returns import ToolReturns
from kvd.core.eviction.ttl import TtlClock
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MOST_GHOSTS = 65_536
TURN_GROUPS = (0, 1, 2, 3, 4, 4, 5, 5, 5)  # group of so many turns; more: MANY_TURNS
MANY_TURNS = 6
LEARNED_SHARE = 1 / 32  # of all that was seen, new: then rates are made up again
LEAST_NEW, MOST_NEW = 64, 8192  # bounds of it
MOST_AGED = 1024  # sessions that get older per look, so that none is long after a quiet time


@dataclass(slots=True)
class _History:
    """Of one session.

    Attributes:
        num_turns: that were submitted.
        num_tokens: stored after the last one.
        grown_tokens: how many of them the last one added.
        gap_ns: idle time before the last one.
        session_class: by its traits when it became idle, or was stored since.
        idle_ns: since when it is idle; None: it is not, or has ended.
        bucket: the bucket of idle time that it is in.
        awaits: the class of the tools that its last answer called; None: it called none.
    """

    num_turns: int = 0
    num_tokens: int = 0
    grown_tokens: int = 0
    gap_ns: int = 0
    session_class: SessionClass | None = None
    idle_ns: int | None = None
    bucket: int = 0
    awaits: SessionClass | None = None

    def traits(self) -> Traits:
        """Return the session's class: turns so far, size of the last one, idle time before it."""
        is_many = self.num_turns >= len(TURN_GROUPS)
        return (
            MANY_TURNS if is_many else TURN_GROUPS[self.num_turns],
            max(0, self.grown_tokens).bit_length(),
            (self.gap_ns // NS_PER_S).bit_length() + 1 >> 1,
        )


class IdleSessions:
    """See the module docstring. Calls are O(log sessions), `aged` amortized over idle time."""

    def __init__(self) -> None:
        self._hazards = ReturnHazards()
        self._tools = ToolReturns(self._hazards)
        self._histories: dict[SessionKey, _History] = {}
        self._ghosts: OrderedDict[SessionKey, None] = OrderedDict()
        # Turns of sessions that were never idle, those that came first before the others.
        self._new: OrderedDict[SessionKey, int] = OrderedDict()
        self._ageing = TtlClock()  # when idle sessions come to another bucket, or earlier
        self._num_seen = 0
        self._num_learned = 0  # of these

    # ------------------------------------------------------------------------------------ events

    def on_submit(self, key: SessionKey, now_ns: int) -> None:
        """Record that a turn was submitted."""
        history = self._histories.get(key)
        if history is None:
            self._new[key] = self._new.get(key, 0) + 1
            if len(self._new) > MOST_GHOSTS:
                self._new.popitem(last=False)
            return
        if history.idle_ns is not None:
            history.gap_ns = now_ns - history.idle_ns
            self._grow_older(history, bucket_at(history.gap_ns))  # `aged` may not have come to it
            if history.gap_ns < EDGES_NS[-1]:  # else it counts as one that does not return
                self._observe(history, history.bucket, has_returned=True)
        history.num_turns += 1
        history.idle_ns = history.awaits = None

    def busy(self, keys: Iterable[SessionKey]) -> None:
        """Record that sessions are not idle now; or have ended, and need not be watched."""
        for history in filter(None, map(self._histories.get, keys)):
            history.idle_ns = None

    def idle(self, key: SessionKey, now_ns: int) -> None:
        """Record that the session is idle from now on."""
        history = self._history(key)
        history.idle_ns, history.bucket = now_ns, 0
        history.session_class = self._class_of(history)
        self._age_later(key, history)

    def on_resize(self, key: SessionKey, num_tokens: int) -> None:
        """Record how much is stored of the session."""
        history = self._history(key)
        history.grown_tokens = num_tokens - history.num_tokens
        history.num_tokens = num_tokens
        history.session_class = self._class_of(history)

    def on_await(self, key: SessionKey, tools: Sequence[str]) -> None:
        """Record that the session returns with what these tools say; with none: with a person."""
        history = self._history(key)
        history.awaits = self._tools.class_of(key.tenant, tools) if tools else None
        history.session_class = self._class_of(history)

    def stored(self, key: SessionKey) -> None:
        """Record that something of the session is stored: it is watched until it is dropped."""
        self._history(key)
        self._ghosts.pop(key, None)

    def dropped(self, key: SessionKey) -> None:
        """Record that nothing of the session is stored any more."""
        if key in self._histories:
            self._haunt(key)

    # ------------------------------------------------------------------------------------- asked

    def aged(self, now_ns: int) -> Iterator[SessionKey]:
        """Let time pass; yield the sessions that are of another age now, some at a time."""
        for _ in range(MOST_AGED):
            key = self._ageing.pop_due(now_ns)
            if key is None:
                return
            history = self._histories[key]
            if history.idle_ns is None:
                continue  # it ages again when it is idle again
            idle_ns = now_ns - history.idle_ns
            if idle_ns < EDGES_NS[history.bucket + 1]:
                self._age_later(key, history)  # it was used meanwhile
                continue
            self._grow_older(history, bucket_at(idle_ns))
            if idle_ns < EDGES_NS[-1]:
                self._age_later(key, history)
            else:
                self._observe(history, history.bucket, has_returned=False)
            yield key

    def has_learned(self) -> bool:
        """Whether so much was seen that all rates may be others now; they are, from now on."""
        wanted = min(max(LEAST_NEW, self._num_seen * LEARNED_SHARE), MOST_NEW)
        if self._num_seen - self._num_learned < wanted:
            return False
        self._num_learned = self._num_seen
        self._hazards.learn()
        return True

    def awaits(self, key: SessionKey) -> bool:
        """Whether the session's last answer has called tools that it is not back from."""
        history = self._histories.get(key)
        return history is not None and history.awaits is not None

    def rate(self, key: SessionKey) -> float:
        """Returns per second that keeping the session pays, see return_rates; 0: not known."""
        history = self._histories.get(key)
        if history is None or history.idle_ns is None or history.session_class is None:
            return 0.0
        return self._hazards.rates(history.session_class)[history.bucket]

    # ------------------------------------------------------------------------------------ inside

    def _class_of(self, history: _History) -> SessionClass:
        return history.awaits or self._hazards.class_of(history.traits())

    def _grow_older(self, history: _History, bucket: int) -> None:
        for earlier in range(history.bucket, bucket):
            self._observe(history, earlier, has_returned=False)
        history.bucket = bucket

    def _observe(self, history: _History, bucket: int, *, has_returned: bool) -> None:
        assert history.session_class is not None, "an idle session is of a class"
        observe(history.session_class, bucket, has_returned=has_returned)
        self._num_seen += 1

    def _age_later(self, key: SessionKey, history: _History) -> None:
        assert history.idle_ns is not None, "only idle sessions age"
        self._ageing.schedule(key, history.idle_ns + EDGES_NS[history.bucket + 1])

    def _history(self, key: SessionKey) -> _History:
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = _History(self._new.pop(key, 0))
            self._haunt(key)
        return history

    def _haunt(self, key: SessionKey) -> None:
        """Keep the history of a session that is not stored, as long as there is room."""
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > MOST_GHOSTS:
            oldest, _ = self._ghosts.popitem(last=False)
            del self._histories[oldest]
            self._ageing.forget(oldest)
