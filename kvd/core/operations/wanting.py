"""Wanted sessions: turns need them, they are not stored here, and a remote store may have them.

Pure. Each wanted session is asked for by an event, and a *fetcher* outside of the core (a follower
of the events) answers: the session is coming, or absent. This module decides which sessions to ask
for, and whether a load waits for one.

Asking: a turn that waits in an engine's queue wants its history long before it is loaded. An engine
that knows of no history asks, too, because the conversation may have begun on another server. Each
session is asked for once in a while. There is a bound per second, and known histories come first.

A session is also wanted if less of it is stored than the turn's history: it continued on another
server and came back, or it has lost its end. As the fetch may bring all of the session again, the
missing part has to be a good share of the history. A session is not asked for while it is being
stored. A queue also does not ask for one that was in use a moment ago, whose last tokens may still
be on their way to the store; its turn's load does, which comes behind them.

    asked ─► coming ─┬──────────────► stored   the fetcher answers each ask: "coming", or "absent"
      │         │    └─► growing ─┬─► stored   (the remote store does not have the session, or it
      │         └─► absent        └─► partly   cannot be fetched); how a session grows: growing.py
      ├─► absent
      └─► unanswered for ANSWER_NS

Waits: a load may wait for a session that is asked for, coming or growing. Its caller reports when
the wait has ended. Loads wait only if there is a fetcher that answers: not before its first answer,
and not for an ask that has no answer after ANSWER_NS. If no answer at all has come in that time,
loads stop waiting until there is one again. A load waits for a growing session until all of its
history is there, no more of it comes, or it comes more slowly than it would be computed. The part
that has come by then can be loaded, however the wait ends. After a wait without success there is no
other wait for that session before it is asked for again; nor after a session has come that has less
than the turn's history all the same.

A growing session is not asked for again. If a turn has a longer history than the last ask, the
session has continued on another server since, and is asked for at once.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvd.core.operations.growing import GrowingSessions
from kvd.core.records.actions import SESSION_WANTED
from kvd.core.state.cache_state import CacheState
from shared.types.queue_delta import QueuedRequests
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

ASK_AGAIN_NS = 30 * NS_PER_S
ANSWER_NS = 3 * NS_PER_S  # a lookup takes a fraction of it, even in a slow remote store
MOST_PER_S = 100  # asks
MOST_REMEMBERED = 10_000  # asks that are remembered
# The least missing share of a history, and at least a block, for which a partly stored session is
# asked for. A lookup costs requests, and some sessions come whole (kvd/remote/pulling.py): to fetch
# one takes hardly less than an eighth of the time of computing it.
LEAST_SHARE = 1 / 8
REST_NS = 3 * NS_PER_S  # by then an engine has stored the last tokens of a turn
FETCHED, ABSENT, UNANSWERED = "fetched", "absent", "unanswered"  # results of waits
LATE, PARTLY = "late", "partly"  # when the wait ended nothing had come, or not all of the history


@dataclass(slots=True)
class _Ask:
    """The last ask for a session, and its state.

    Attributes:
        asked_ns: time of the ask.
        history_tokens: length of the history of the turn that wanted it.
        stored_tokens: tokens of the session that were stored then. If there are more now it has
            come, or is coming, from wherever.
        is_coming: the answer was "coming".
        ended: why loads do not wait for it; "": they may.
    """

    asked_ns: int
    history_tokens: int
    stored_tokens: int
    is_coming: bool = False
    ended: str = ""


class WantedSessions:
    """Asks for wanted sessions of one cache state, if its limits enable that.

    Invariants: 1. each session in `_unanswered` is in `_asks` with the same time and without an
    answer; 2. loads wait only for sessions that were asked for, and of which nothing has come
    since, or more is coming.

    Args:
        state: the cache's tables.
        growing: the sessions that grow while they are being imported.
    """

    def __init__(self, state: CacheState, growing: GrowingSessions) -> None:
        self._state = state
        self._growing = growing
        self._is_growing = growing.is_growing
        self._asks: OrderedDict[SessionKey, _Ask] = OrderedDict()  # latest last
        self._unanswered: OrderedDict[SessionKey, int] = OrderedDict()  # asked_ns, latest last
        self._second_ns = 0  # begin of the second that _num_this_second counts
        self._num_this_second = 0
        self._answered_ns = -1  # time of the last answer; -1: none
        self._is_answered = False  # whether there is a fetcher that answers

    # ------------------------------------------------------------------------------------- asking

    def on_queue(self, requests: QueuedRequests) -> None:
        """Ask for those of the waiting requests' sessions that lack history here."""
        if not self._state.limits.wants_sessions:
            return
        missing = [
            (key, history_tokens)
            for key, history_tokens in zip(requests.keys, requests.history_tokens, strict=True)
            if self._lacks(key, history_tokens) and self._is_at_rest(key)
        ]
        for key, history_tokens in sorted(missing, key=lambda request: not request[1]):
            self._want(key, history_tokens)

    def _num_stored(self, key: SessionKey) -> int:
        session = self._state.sessions.get(key)
        return 0 if session is None else session.num_tokens

    def _lacks(self, key: SessionKey, history_tokens: int) -> bool:
        """Whether enough of a history is missing to ask for it.

        A session that is not stored at all lacks it even if the engine knows of no history.
        """
        if key not in self._state.sessions:
            return True
        least = max(self._state.layout.block_tokens, LEAST_SHARE * history_tokens)
        return history_tokens - self._num_stored(key) >= least

    def _is_at_rest(self, key: SessionKey) -> bool:
        session = self._state.sessions.get(key)
        return session is None or self._state.now_ns >= session.last_access_ns + REST_NS

    def _is_being_stored(self, key: SessionKey) -> bool:
        """Whether a turn is adding to a stored session right now."""
        return key in self._state.sessions and self._state.leases.is_storing(key)

    def _has_come(self, key: SessionKey, ask: _Ask) -> bool:
        """Whether anything has come since the session was asked for; more may be coming."""
        return self._num_stored(key) > ask.stored_tokens

    def _has_valid_ask(self, key: SessionKey, history_tokens: int) -> bool:
        """Whether the last ask for a session is still valid.

        A session that was absent, or that has come, may have continued here and then on another
        server. Then its history is longer, and it is asked for again.
        """
        ask = self._asks.get(key)
        if ask is None:
            return False
        if self._is_growing(key):
            return True
        if self._state.now_ns >= ask.asked_ns + ASK_AGAIN_NS:
            return False
        if not self._has_come(key, ask):
            return True
        return ask.ended != ABSENT and history_tokens <= ask.history_tokens

    def _want(self, key: SessionKey, history_tokens: int) -> None:
        """Ask for a session, unless a valid ask exists or the bound per second is reached."""
        now_ns = self._state.now_ns
        if self._has_valid_ask(key, history_tokens) or self._is_being_stored(key):
            return
        if now_ns >= self._second_ns + NS_PER_S:
            self._second_ns, self._num_this_second = now_ns, 0
        if self._num_this_second == MOST_PER_S:
            return
        self._num_this_second += 1
        self._state.outbox.on_fetch_end(key)  # loads that wait for an earlier ask check again
        stored_tokens = self._num_stored(key)
        self._asks[key] = _Ask(now_ns, history_tokens, stored_tokens)
        self._asks.move_to_end(key)
        self._unanswered[key] = now_ns
        self._unanswered.move_to_end(key)
        if len(self._asks) > MOST_REMEMBERED:
            forgotten, _ = self._asks.popitem(last=False)
            self._unanswered.pop(forgotten, None)
            self._state.outbox.on_fetch_end(forgotten)
        self._state.outbox.count("sessions_wanted")
        fields = {"num_tokens": history_tokens, "stored_tokens": stored_tokens}
        self._state.outbox.emit(SESSION_WANTED, key, fields)

    # ------------------------------------------------------------------------------------ answers

    def on_answer(self, key: SessionKey, *, is_coming: bool) -> None:
        """Take the answer to an ask; if that is unknown, note only that there is a fetcher."""
        self._answered_ns, self._is_answered = self._state.now_ns, True
        ask = self._asks.get(key)
        self._unanswered.pop(key, None)
        if ask is None or ask.ended in (LATE, FETCHED, PARTLY):
            return
        ask.is_coming, ask.ended = is_coming, "" if is_coming else ABSENT
        if not is_coming:
            self._state.outbox.on_fetch_end(key)

    def next_deadline_ns(self) -> int | None:
        """Return when to call `end_due`; None: no answer is owed."""
        for asked_ns in self._unanswered.values():
            return asked_ns + ANSWER_NS
        return None

    def end_due(self) -> None:
        """End the asks that have been without an answer for ANSWER_NS."""
        given_up = False
        while self._unanswered:
            key, asked_ns = next(iter(self._unanswered.items()))
            if self._state.now_ns < asked_ns + ANSWER_NS:
                break
            del self._unanswered[key]
            self._asks[key].ended = UNANSWERED
            self._state.outbox.on_fetch_end(key)
            given_up = given_up or self._answered_ns <= asked_ns
        if given_up and self._is_answered:
            self._is_answered = False
            for key in self._unanswered:
                self._state.outbox.on_fetch_end(key)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        asked = {key: ask.asked_ns for key, ask in self._asks.items()}
        assert self._unanswered.items() <= asked.items(), "an answer is owed to the last ask"
        assert not any(self._asks[key].is_coming for key in self._unanswered), "it has its answer"
        for key in self._state.outbox.awaited:
            is_over = self._has_come(key, self._asks[key]) and not self._is_growing(key)
            assert not is_over, "it has come"

    # -------------------------------------------------------------------------------------- waits

    def missing_share(self, key: SessionKey, num_tokens: int, history_tokens: int) -> float:
        """Return the share of a load's tokens that is missing without a fetch; 0: no fetch needed.

        Args:
            key: the session.
            num_tokens: number of tokens that the load asks for.
            history_tokens: length of the session's history before the load's turn; the others are
                new.
        """
        if not self._lacks(key, history_tokens):
            return 0.0
        num_stored = self._num_stored(key)
        return (history_tokens - num_stored) / num_tokens if num_stored else 1.0

    def is_awaited(self, key: SessionKey, history_tokens: int, token_ns: float) -> bool:
        """Whether a load is to wait for a session; asks for the session if needed.

        If so, the caller calls it again after FetchEnded, and owes `wait_ended` once it does not
        wait any more.

        Args:
            key: the session.
            history_tokens: length of the history that the load needs.
            token_ns: the most nanoseconds that a token's arrival may take for the wait to pay.
        """
        state = self._state
        if not state.limits.wants_sessions or not self._lacks(key, history_tokens):
            return False
        self._want(key, history_tokens)
        self.end_due()
        ask = self._asks.get(key)
        if ask is None or ask.ended or not (ask.is_coming or self._is_answered):
            return False
        if self._has_come(key, ask) and not self._is_growing(key):
            return False
        if (self._growing.token_ns(key) or 0.0) > token_ns:
            return False
        state.outbox.awaited.add(key)
        return True

    def wait_ended(self, key: SessionKey, history_tokens: int, since_ns: int) -> None:
        """Record that a load does not wait any more, and the result of the wait."""
        state, ask = self._state, self._asks.get(key)
        session = state.sessions.get(key)
        if not self._lacks(key, history_tokens):
            result = FETCHED
            self._asks.pop(key, None)
            self._unanswered.pop(key, None)
        elif session is not None and ask is not None and self._has_come(key, ask):
            result = ask.ended = PARTLY if session.lost else FETCHED  # no more of it will come
        elif ask is not None and ask.ended:
            result = ask.ended
        elif ask is None or not (ask.is_coming or self._is_answered):
            result = UNANSWERED
        else:
            result = ask.ended = LATE
        state.outbox.count(f"fetch_waits_{result}")
        state.histograms.fetch_wait_s.observe((state.now_ns - since_ns) / NS_PER_S, result)
        state.outbox.on_fetch_end(key)  # other loads that wait for it have to check again, too
