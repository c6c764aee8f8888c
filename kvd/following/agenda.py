"""The follower's agenda: the session to push to, or drop from, the remote store next. Pure.

    stored ─► unpushed ─ quiet for a while ─► next: Push ─► pushed, or unpushed again
    near eviction ─► unpushed ─ at once ─► the same
    deleted ─► next: Drop ─► dropped

With `writes` = "all", a session is pushed once it has been quiet for a while, the most valuable
session first. With "evicted", only sessions that kvd reports as near eviction are pushed: at once,
in kvd's order. A session that is stored again before its push is forgotten; kvd reports it when it
is near eviction again. A drain pushes all sessions. A deliberate deletion (flushed, ended) goes to
the store as well, before any push; eviction and expiry do not.

A listing of all sessions makes up for missed events: each session that is not known to be in the
store is pushed. The push sends nothing if nothing is missing there.

A session that another server owns in the store is *fenced*. It is pushed again only if it continues
on this server: a new turn was stored (perhaps before the fence was noticed), and it has more tokens
than the store has. The push then takes it over.

Invariants: 1. one step is under way at a time, so no session is pushed twice at once; 2. a session
is unpushed, or to be dropped, or neither; never both.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from typing import Literal

from kvd.following.steps import Drop, Push, Step, Terms, Unpushed, terms_of, unpushed_of
from kvd.remote.pushing import rank_of
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey

Writes = Literal["none", "drain", "evicted", "all"]
MOST_QUIETS = 10  # a session that is in use all the time is pushed after so many quiet times
BATCH = 64  # sessions that are ranked and chosen together
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0  # between two tries to push a session that failed


@dataclass
class Agenda:
    """Sessions that wait to be pushed or dropped, and the step that is under way.

    Instants are in seconds of one monotonic clock, unless they are called unix.

    Attributes:
        writes: sessions that are pushed before the drain: none, those near eviction, or all. The
            drain pushes none ("none") or all (otherwise).
        quiet_s: seconds without a turn after which a session is pushed.
        num_evicted: sessions that were evicted, wholly or in part, before they were pushed.
    """

    writes: Writes = "none"
    quiet_s: float = 0.0
    num_evicted: int = 0
    _unpushed: dict[SessionKey, Unpushed] = field(default_factory=dict)
    _drops: dict[SessionKey, Drop] = field(default_factory=dict)
    _in_store: dict[SessionKey, tuple[Terms, float]] = field(default_factory=dict)
    _fenced: dict[SessionKey, int] = field(default_factory=dict)  # tokens that the owner pushed
    # A heap of (due time, key). Its entries may be outdated: `_pick` looks up the session again.
    _due: list[tuple[float, SessionKey]] = field(default_factory=list)
    _ready: dict[SessionKey, None] = field(default_factory=dict)
    _batch: deque[SessionKey] = field(default_factory=deque)
    _under_way: tuple[Step, Unpushed | None] | None = None
    _is_draining: bool = False

    # ------------------------------------------------------------------------------------- queries

    @property
    def num_unpushed(self) -> int:
        """Sessions to push, or to look up in the store; the one under way included."""
        return len(self._unpushed) + (self._pushing is not None)

    @property
    def num_drops(self) -> int:
        """Sessions to drop from the store; the one under way excluded."""
        return len(self._drops)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, now or later, and nothing is under way."""
        return not (self._unpushed or self._drops or self._under_way)

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return self._under_way is not None

    def oldest_s(self) -> float | None:
        """Return since when the oldest new session waits for its push; None: none. O(sessions)."""
        pushing = self._pushing
        found = [session.first_s for session in self._unpushed.values() if session.is_new]
        if pushing is not None and pushing.is_new:
            found.append(pushing.first_s)
        return min(found, default=None)

    @property
    def _pushing(self) -> Unpushed | None:
        return self._under_way[1] if self._under_way else None

    # ----------------------------------------------------------------------------- events from kvd

    def on_stored(self, key: SessionKey, now_s: float, num_tokens: int | None = None) -> None:
        """Record that a session was stored, or that its tokens have changed.

        Args:
            key: the session.
            now_s: the time of the event.
            num_tokens: tokens it has now; None: the event does not say.
        """
        self.cancel_drop(key)
        if not self._pushes_all:
            self._unpushed.pop(key, None)  # kvd reports it again when it is near eviction again
            return
        session = self._unpushed.get(key)
        if session is None:
            self._add(key, Unpushed(now_s, now_s, num_tokens or 0, is_new=True))
            return
        if not session.is_new:
            session.first_s, session.is_new = now_s, True
        session.last_s = max(session.last_s, now_s)
        session.num_tokens = session.num_tokens if num_tokens is None else num_tokens
        session.num_failures, session.not_before_s, session.is_superseded = 0, 0.0, False

    def cancel_drop(self, key: SessionKey) -> None:
        """Keep a session in the store: it was stored again after it was deleted."""
        self._drops.pop(key, None)

    def on_near_eviction(
        self, key: SessionKey, now_s: float, num_tokens: int, *, is_superseded: bool
    ) -> None:
        """Record that kvd will evict a session soon."""
        if self.writes == "evicted" and key not in self._unpushed:
            self._add(
                key, Unpushed(now_s, now_s, num_tokens, is_new=True, is_superseded=is_superseded)
            )

    def on_cut(self, key: SessionKey, num_tokens: int, *, evicted: bool = False) -> None:
        """Record that a session lost its last tokens, perhaps to eviction."""
        session = self._unpushed.get(key)
        if session is not None:
            session.num_tokens = num_tokens
            self._count_eviction(session, evicted=evicted)

    def on_superseded(self, key: SessionKey) -> None:
        """Record that another session continues in this one's place: its push can wait."""
        if key in self._unpushed:
            self._unpushed[key].is_superseded = True

    def on_gone(self, key: SessionKey, *, evicted: bool = False) -> None:
        """Record that a session was evicted or has expired: nothing is left to push."""
        session = self._unpushed.pop(key, None)
        if session is not None:
            self._count_eviction(session, evicted=evicted)
        self._in_store.pop(key, None)
        self._fenced.pop(key, None)

    def on_deleted(self, key: SessionKey, unix_s: float, *, of_others: bool) -> None:
        """Record that a session was deleted deliberately; for the arguments see Drop."""
        self.on_gone(key)
        self._drops[key] = Drop(key, unix_s, of_others)

    def on_pulled(self, info: pb.SessionInfo, num_tokens: int, now_s: float) -> None:
        """Record that `num_tokens` of a session were pulled, from a pull begun at `now_s`.

        A turn may have stored more during the pull: such a session stays unpushed.
        """
        key = _key_of(info)
        newer = self._unpushed.get(key)
        self.on_gone(key)
        self._in_store[key] = (terms_of(info), now_s)
        if newer is not None and newer.num_tokens > num_tokens:
            self._add(key, newer)

    def on_listing(self, infos: Iterable[pb.SessionInfo], now_s: float, unix_s: float) -> None:
        """Compare a listing of all sessions with what is known, as events may have been missed."""
        known_before, self._in_store = self._in_store, {}
        for info in infos:
            key, terms = _key_of(info), terms_of(info)
            used_s = now_s - info.idle_s
            known = known_before.get(key)
            if known is not None and known[0] == terms and used_s <= known[1]:
                self._in_store[key] = known
            elif key in self._drops:
                continue
            elif info.ended:
                self.on_deleted(key, unix_s, of_others=True)
                self._in_store[key] = (terms, now_s)
            elif self._must_push(info) and key not in self._unpushed:
                self._add(key, unpushed_of(info, used_s))

    def drain(self) -> None:
        """Make all sessions due at once, as the follower ends."""
        self._is_draining = self.writes != "none"
        self._ready = dict.fromkeys(self._unpushed)
        self._due.clear()

    def reconfigure(self, writes: Writes, quiet_s: float) -> None:
        """Apply other settings. The caller owes a listing (`on_listing`)."""
        has_changed = writes != self.writes
        self.writes, self.quiet_s = writes, quiet_s
        if has_changed and not self._pushes_all:
            self._unpushed.clear()
            self._ready.clear()
        self._due = [(self._due_s(session), key) for key, session in self._unpushed.items()]
        heapify(self._due)

    def forget_store(self) -> None:
        """Forget what the store has: another store takes its place."""
        self._in_store.clear()
        self._fenced.clear()

    # ---------------------------------------------------------------------------------------- steps

    def next(self, now_s: float) -> Step | None:
        """Return the step to do now; None: none before `wait_until_s`, or another event.

        The caller owes its result (`on_pushed`, `on_dropped`, … or `on_postponed`) before the next
        call.
        """
        assert self._under_way is None, "one step at a time"  # noqa: S101
        if self._drops:
            step = self._drops.pop(next(iter(self._drops)))
            self._under_way = (step, None)
            return step
        while (key := self._pick(now_s)) is not None:
            session = self._unpushed.pop(key)
            takes = key in self._fenced and session.num_tokens > self._fenced[key]
            if takes or key not in self._fenced:
                push = Push(key, takes)
                self._under_way = (push, session)
                return push
        return None

    def wait_until_s(self) -> float | None:
        """Return when `next` may have a step, if no event comes before; None: never."""
        if self._drops or self._ready or self._batch:
            return 0.0
        return self._due[0][0] if self._due else None

    # ---------------------------------------------------------------------------- results of steps

    def on_pushed(self, info: pb.SessionInfo, now_s: float) -> None:
        """Record that the session is in the store as `info` describes it, at `now_s`."""
        step, _ = self._end_step()
        self._in_store[step.key] = (terms_of(info), now_s)
        self._fenced.pop(step.key, None)

    def on_dropped(self) -> None:
        """Record that the store has nothing of the session, or that it is not ours to drop."""
        self._end_step()

    def on_missing(self) -> None:
        """Record that kvd does not store the session to be pushed any more."""
        step, _ = self._end_step()
        self.on_gone(step.key)

    def on_fenced(self, owners_tokens: int) -> bool:
        """Record that another server owns the session, with so many tokens.

        Returns:
            Whether this was not known before.
        """
        step, session = self._end_step()
        is_news = step.key not in self._fenced
        self._fenced[step.key] = owners_tokens
        if is_news and session and session.is_new and session.num_tokens > owners_tokens:
            self._put_back(step, session)
        return is_news

    def on_failed(self, now_s: float) -> None:
        """Record that the step failed because of its session: a push is tried again later."""
        step, session = self._end_step()
        if session is None:
            return
        session.not_before_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**session.num_failures)
        session.num_failures += 1
        self._put_back(step, session)

    def on_postponed(self) -> None:
        """Record that the step was not done, for a reason that is not the session's."""
        step, session = self._end_step()
        self._put_back(step, session)

    # ------------------------------------------------------------------------------------ internal

    @property
    def _pushes_all(self) -> bool:
        """Whether every session is pushed, not only those near eviction."""
        return self.writes == "all" or (self._is_draining and self.writes != "none")

    def _must_push(self, info: pb.SessionInfo) -> bool:
        return self._pushes_all or (self.writes == "evicted" and info.near_eviction)

    def _count_eviction(self, session: Unpushed, *, evicted: bool) -> None:
        """Count a session evicted before its push, once; a superseded one is no loss."""
        if evicted and session.is_new and not session.is_superseded and not session.is_late:
            session.is_late = True
            self.num_evicted += 1

    def _end_step(self) -> tuple[Step, Unpushed | None]:
        assert self._under_way is not None, "nothing is under way"  # noqa: S101
        ended, self._under_way = self._under_way, None
        return ended

    def _put_back(self, step: Step, session: Unpushed | None) -> None:
        """Schedule a step again, unless an event has replaced or cancelled it meanwhile."""
        newer = self._unpushed.get(step.key)
        if session is None:
            if isinstance(step, Drop) and newer is None:
                self._drops.setdefault(step.key, step)
        elif step.key in self._drops:
            return
        elif newer is None:
            self._add(step.key, session)
        else:
            newer.first_s = min(newer.first_s, session.first_s) if session.is_new else newer.first_s

    def _add(self, key: SessionKey, session: Unpushed) -> None:
        self._unpushed[key] = session
        if self._is_draining and not session.not_before_s:
            self._ready[key] = None
        else:
            heappush(self._due, (self._due_s(session), key))

    def _due_s(self, session: Unpushed) -> float:
        if self._is_draining or self.writes == "evicted":
            return session.not_before_s
        quiet_s = min(session.last_s + self.quiet_s, session.first_s + MOST_QUIETS * self.quiet_s)
        return max(session.not_before_s, quiet_s)

    def _pick(self, now_s: float) -> SessionKey | None:
        """Return the due session that is to be pushed first; None: none is due."""
        while self._due and self._due[0][0] <= now_s:
            self._ready[heappop(self._due)[1]] = None
        while True:
            if not self._batch:
                self._fill_batch(now_s)
            if not self._batch:
                return None
            key = self._batch.popleft()
            session = self._unpushed.get(key)
            if session is None:
                continue
            if self._due_s(session) <= now_s:
                return key
            heappush(self._due, (self._due_s(session), key))  # it was stored again meanwhile

    def _fill_batch(self, now_s: float) -> None:
        """Move the ready sessions of the best rank to the batch, at most BATCH."""

        def rank(key: SessionKey) -> tuple[bool, bool, bool, float]:
            session = self._unpushed[key]
            if not self._pushes_all:  # only those near eviction: in the order kvd reported them
                return session.is_superseded, False, False, session.first_s
            return rank_of(
                is_superseded=session.is_superseded,
                is_dirty=session.is_dirty,
                is_pinned=session.is_pinned,
                num_tokens=session.num_tokens,
                idle_s=max(0.0, now_s - session.last_s),
            )

        candidates = [key for key in self._ready if key in self._unpushed]
        self._batch.extend(nsmallest(BATCH, candidates, key=rank))
        chosen = set(self._batch)
        self._ready = {key: None for key in candidates if key not in chosen}


def _key_of(info: pb.SessionInfo) -> SessionKey:
    named = info.session
    return SessionKey(named.tenant, named.model, named.session_id)
