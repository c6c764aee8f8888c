"""IdleSessions: how long sessions have been idle, and how much keeping each of them pays.

Pure. It keeps a history of each session, and learns from all of them when sessions return. Sessions
that are not stored are watched too, at most MOST_GHOSTS of them: first turns that still wait, and
dropped sessions (*ghosts*). Otherwise no return of a dropped session would ever be seen, and only
kept sessions would be learned from.

Invariants:
1. a session is idle or busy, and only idle ones age;
2. each history is of a session that is stored or among the ghosts;
3. only sessions with a history wait to age, each once, however often they became idle and whether
   or not `pop_aged` is called.
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
TURN_GROUPS = (0, 1, 2, 3, 4, 4, 5, 5, 5)  # group by number of turns; beyond: MANY_TURNS
MANY_TURNS = 6
LEARNED_SHARE = 1 / 32  # share of new observations at which rates are computed again
LEAST_NEW, MOST_NEW = 64, 8192  # bounds of the number of new observations for that
MOST_AGED = 1024  # sessions that age per call, which bounds the call after a quiet time


@dataclass(slots=True)
class _History:
    """The history of one session.

    Attributes:
        num_turns: number of submitted turns.
        num_tokens: number of tokens stored after the last turn.
        grown_tokens: how many of them the last turn added.
        gap_ns: idle time before the last turn.
        session_class: class by its traits when it became idle, or was stored since.
        idle_ns: when it became idle; None: it is busy, or has ended.
        bucket: the bucket of its idle time.
        awaits: class of the tools that its last answer called; None: it called none.
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
        """Return its traits: groups of its turns, of the last one's size, of the gap before it."""
        is_many = self.num_turns >= len(TURN_GROUPS)
        return (
            MANY_TURNS if is_many else TURN_GROUPS[self.num_turns],
            max(0, self.grown_tokens).bit_length(),
            (self.gap_ns // NS_PER_S).bit_length() + 1 >> 1,
        )


class IdleSessions:
    """Histories of sessions. Calls are O(log sessions); `pop_aged` is amortized over idle time."""

    def __init__(self) -> None:
        self._hazards = ReturnHazards()
        self._tools = ToolReturns(self._hazards)
        self._histories: dict[SessionKey, _History] = {}
        self._ghosts: OrderedDict[SessionKey, None] = OrderedDict()
        # Number of turns of sessions that were never idle, oldest session first.
        self._new: OrderedDict[SessionKey, int] = OrderedDict()
        self._ageing = TtlClock()  # when idle sessions enter their next bucket, or earlier
        self._num_seen = 0
        self._num_learned = 0  # how many of them the rates are computed from

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
            self._advance_bucket(history, bucket_at(history.gap_ns))  # `pop_aged` may be behind
            if history.gap_ns < EDGES_NS[-1]:  # a longer gap counts as one without a return
                self._observe(history, history.bucket, has_returned=True)
        history.num_turns += 1
        history.idle_ns = history.awaits = None

    def on_busy(self, keys: Iterable[SessionKey]) -> None:
        """Record that sessions are busy, or have ended and need not be watched."""
        for key in self._histories.keys() & keys:
            self._histories[key].idle_ns = None

    def on_idle(self, key: SessionKey, now_ns: int) -> None:
        """Record that the session is idle from now on."""
        history = self._history(key)
        history.idle_ns, history.bucket = now_ns, 0
        history.session_class = self._class_of(history)
        self._schedule_ageing(key, history)

    def on_resize(self, key: SessionKey, num_tokens: int) -> None:
        """Record how much is stored of the session."""
        history = self._history(key)
        history.grown_tokens = num_tokens - history.num_tokens
        history.num_tokens = num_tokens
        history.session_class = self._class_of(history)

    def on_await(self, key: SessionKey, tools: Sequence[str]) -> None:
        """Record that the session returns with results of these tools; with none: with a person."""
        history = self._history(key)
        history.awaits = self._tools.class_of(key.tenant, tools) if tools else None
        history.session_class = self._class_of(history)

    def on_store(self, key: SessionKey) -> None:
        """Record that something of the session is stored: it is watched until it is dropped."""
        self._history(key)
        self._ghosts.pop(key, None)

    def on_drop(self, key: SessionKey) -> None:
        """Record that nothing of the session is stored any more."""
        if key in self._histories:
            self._keep_ghost(key)

    # ----------------------------------------------------------------------------------- queries

    def pop_aged(self, now_ns: int) -> Iterator[SessionKey]:
        """Advance time; yield the sessions that have entered another bucket, some per call."""
        for _ in range(MOST_AGED):
            key = self._ageing.pop_due(now_ns)
            if key is None:
                return
            history = self._histories[key]
            if history.idle_ns is None:
                continue  # it is scheduled again when it is idle again
            idle_ns = now_ns - history.idle_ns
            if idle_ns < EDGES_NS[history.bucket + 1]:
                self._schedule_ageing(key, history)  # it was used meanwhile
                continue
            self._advance_bucket(history, bucket_at(idle_ns))
            if idle_ns < EDGES_NS[-1]:
                self._schedule_ageing(key, history)
            else:
                self._observe(history, history.bucket, has_returned=False)
            yield key

    def learn_if_due(self) -> bool:
        """Compute all rates again if enough was observed since; return whether it was."""
        num_needed = min(max(LEAST_NEW, self._num_seen * LEARNED_SHARE), MOST_NEW)
        if self._num_seen - self._num_learned < num_needed:
            return False
        self._num_learned = self._num_seen
        self._hazards.learn()
        return True

    def awaits(self, key: SessionKey) -> bool:
        """Whether the session's last answer called tools and no turn has come since."""
        history = self._histories.get(key)
        return history is not None and history.awaits is not None

    def rate(self, key: SessionKey) -> float:
        """Return the session's rate in returns per second (see return_rates); 0: not known."""
        history = self._histories.get(key)
        if history is None or history.idle_ns is None or history.session_class is None:
            return 0.0
        return self._hazards.rates(history.session_class)[history.bucket]

    # ------------------------------------------------------------------------------------ inside

    def _class_of(self, history: _History) -> SessionClass:
        return history.awaits or self._hazards.class_of(history.traits())

    def _advance_bucket(self, history: _History, bucket: int) -> None:
        for earlier in range(history.bucket, bucket):
            self._observe(history, earlier, has_returned=False)
        history.bucket = bucket

    def _observe(self, history: _History, bucket: int, *, has_returned: bool) -> None:
        assert history.session_class is not None, "an idle session is of a class"
        observe(history.session_class, bucket, has_returned=has_returned)
        self._num_seen += 1

    def _schedule_ageing(self, key: SessionKey, history: _History) -> None:
        assert history.idle_ns is not None, "only idle sessions age"
        self._ageing.schedule(key, history.idle_ns + EDGES_NS[history.bucket + 1])

    def _history(self, key: SessionKey) -> _History:
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = _History(self._new.pop(key, 0))
            self._keep_ghost(key)
        return history

    def _keep_ghost(self, key: SessionKey) -> None:
        """Keep the history of a session that is not stored, as long as there is room."""
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > MOST_GHOSTS:
            oldest, _ = self._ghosts.popitem(last=False)
            del self._histories[oldest]
            self._ageing.forget(oldest)
