"""Which sessions are wanted and not stored: whoever can fetch them elsewhere is told by an event.

Pure. A turn that waits in an engine's queue wants its history long before it is loaded. An engine
that knows of no history asks, too: the conversation may have begun elsewhere, and come whole. Each
session is asked for once in a while; of very many only so many a second, known histories first.

So is a session of which less is stored than a turn's history: it went on elsewhere and came back,
or has lost its end. It may come whole, so that this has to be a good part of the history. While
it is being stored it is not asked for; a queue does not ask for one that was in use just now
either, whose last tokens may be on their way: its turn's load, which comes behind them, does.

    asked ─► coming ─┬──────────────► stored   whoever fetches answers each ask: "coming", or
      │         │    └─► growing ─┬─► stored   "absent" (it is not there, or cannot be fetched);
      │         └─► absent        └─► partly   how a session grows: growing.py
      ├─► absent
      └─► unanswered for ANSWER_NS

A load may wait for a session that is asked for, coming or growing; whoever waits says when that
ends. It waits only for somebody who answers: until the first answer nobody waits, and none that was
asked for is waited for longer than ANSWER_NS without one. If nobody has answered anything
meanwhile, nobody waits until somebody does. What grows is waited for until all of the history is
there, no more comes, or it comes more slowly than it would be computed; what has come is there
whenever the wait ends. What a wait was in vain for is not waited for again before it is asked for
again; nor is what has come, and is less than the turn's history all the same. While a session grows
it is not asked for again. A longer history than it was asked for says that it went on elsewhere
since: it is asked for at once.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvd.core.operations.growing import Growing
from kvd.core.records.actions import SESSION_WANTED
from kvd.core.state.cache_state import CacheState
from shared.types.queue_delta import QueuedRequest
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

ASK_AGAIN_NS = 30 * NS_PER_S
ANSWER_NS = 3 * NS_PER_S  # a look into a store takes a fraction of it, even a slow one
MOST_PER_S = 100
MOST_REMEMBERED = 10_000  # sessions that were asked for
# Of a history that is stored in part this part is missing, and a block, or it is not asked for: a
# look into the store costs requests, and of some sessions all comes (kvd/remote/pulling.py), which
# takes hardly less than an eighth of what computing it does.
LEAST_SHARE = 1 / 8
REST_NS = 3 * NS_PER_S  # by then an engine has stored what a turn has left behind
FETCHED, ABSENT, UNANSWERED = "fetched", "absent", "unanswered"
LATE, PARTLY = "late", "partly"  # when time is up nothing has come, or not all of the history


@dataclass(slots=True)
class _Ask:
    """A session that was asked for; what became of that.

    Attributes:
        asked_ns: when, the last time.
        history_tokens: of the turn that wanted it.
        stored_tokens: of it then: when there are more it has come, from wherever, or comes.
        is_coming: the answer was that it is on its way.
        ended: why it is not waited for; "": it may be.
    """

    asked_ns: int
    history_tokens: int
    stored_tokens: int
    is_coming: bool = False
    ended: str = ""


class Wanting:
    """Asks for sessions of one cache state, where its limits say so.

    Invariants: 1. who is in `_unanswered` is in `_asks`, asked for at that time, and has no answer;
    2. loads wait for what was asked for, and of which nothing has come since, or more comes.

    Args:
        state: the cache's tables.
        growing: lets sessions have what of them has come.
    """

    def __init__(self, state: CacheState, growing: Growing) -> None:
        self._state = state
        self._growing = growing
        self._is_growing = growing.is_growing
        self._asks: OrderedDict[SessionKey, _Ask] = OrderedDict()  # the latest last
        self._unanswered: OrderedDict[SessionKey, int] = OrderedDict()  # since when, likewise
        self._second_ns = 0
        self._num_this_second = 0
        self._answered_ns = -1  # when the last answer came; -1: none
        self._is_answered = False

    # ------------------------------------------------------------------------------------- asking

    def queued(self, requests: Iterable[QueuedRequest]) -> None:
        """Ask for the sessions of requests that wait and are not stored, or not all of them."""
        if not self._state.limits.wants_sessions:
            return
        missing = [
            request
            for request in requests
            if self._lacks(request.key, request.history_tokens) and self._is_at_rest(request.key)
        ]
        for request in sorted(missing, key=lambda one: not one.history_tokens):
            self._want(request.key, request.history_tokens)

    def _num_stored(self, key: SessionKey) -> int:
        session = self._state.sessions.get(key)
        return 0 if session is None else session.num_tokens

    def _lacks(self, key: SessionKey, history_tokens: int) -> bool:
        """Whether enough of a history is missing; all of it, be it of no tokens that are known."""
        if key not in self._state.sessions:
            return True
        least = max(self._state.layout.block_tokens, LEAST_SHARE * history_tokens)
        return history_tokens - self._num_stored(key) >= least

    def _is_at_rest(self, key: SessionKey) -> bool:
        session = self._state.sessions.get(key)
        return session is None or self._state.now_ns >= session.last_access_ns + REST_NS

    def _is_being_stored(self, key: SessionKey) -> bool:
        """Whether a turn adds to a session that is stored, right now."""
        return key in self._state.sessions and self._state.leases.is_storing(key)

    def _has_come(self, key: SessionKey, ask: _Ask) -> bool:
        """Whether anything has come since it was asked for; more may be on its way."""
        return self._num_stored(key) > ask.stored_tokens

    def _was_asked(self, key: SessionKey, history_tokens: int) -> bool:
        """Whether there is an ask that holds: what was nowhere may have gone on here, and away.

        So may what has come: its history is then longer.
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
        now_ns = self._state.now_ns
        if self._was_asked(key, history_tokens) or self._is_being_stored(key):
            return
        if now_ns >= self._second_ns + NS_PER_S:
            self._second_ns, self._num_this_second = now_ns, 0
        if self._num_this_second == MOST_PER_S:
            return
        self._num_this_second += 1
        self._state.outbox.on_fetch_end(key)  # who waits for an earlier ask looks at this one
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

    def answered(self, key: SessionKey, *, is_coming: bool) -> None:
        """Take what became of an ask; of one that is not known only that somebody answers."""
        self._answered_ns, self._is_answered = self._state.now_ns, True
        ask = self._asks.get(key)
        self._unanswered.pop(key, None)
        if ask is None or ask.ended in (LATE, FETCHED, PARTLY):
            return
        ask.is_coming, ask.ended = is_coming, "" if is_coming else ABSENT
        if not is_coming:
            self._state.outbox.on_fetch_end(key)

    def next_deadline_ns(self) -> int | None:
        """Return when to call `end_due`; None: nobody owes an answer."""
        for asked_ns in self._unanswered.values():
            return asked_ns + ANSWER_NS
        return None

    def end_due(self) -> None:
        """End what has stayed without an answer for too long."""
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
        """Return which part of its tokens a load would lack without a fetch; 0: it wants none.

        Args:
            key: whose.
            num_tokens: that the load asks for.
            history_tokens: that the session had before the load's turn; the others are new.
        """
        if not self._lacks(key, history_tokens):
            return 0.0
        num_stored = self._num_stored(key)
        return (history_tokens - num_stored) / num_tokens if num_stored else 1.0

    def is_awaited(self, key: SessionKey, history_tokens: int, token_ns: float) -> bool:
        """Whether a load is to wait for a session; if nobody has asked for it, this does.

        While it is, FetchEnded says when to ask again. The caller owes `wait_ended`.

        Args:
            key: whose.
            history_tokens: that it is to have.
            token_ns: what a token's coming may take: more than that is not worth a wait.
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
        """Record that a load does not wait any more, and how that ended."""
        state, ask = self._state, self._asks.get(key)
        session = state.sessions.get(key)
        if not self._lacks(key, history_tokens):
            result = FETCHED
            self._asks.pop(key, None)
            self._unanswered.pop(key, None)
        elif session is not None and ask is not None and self._has_come(key, ask):
            result = ask.ended = PARTLY if session.lost else FETCHED  # that is all that there is
        elif ask is not None and ask.ended:
            result = ask.ended
        elif ask is None or not (ask.is_coming or self._is_answered):
            result = UNANSWERED
        else:
            result = ask.ended = LATE
        state.outbox.count(f"fetch_waits_{result}")
        state.histograms.fetch_wait_s.observe((state.now_ns - since_ns) / NS_PER_S, result)
        state.outbox.on_fetch_end(key)  # others who wait for it are still to be told of its end
