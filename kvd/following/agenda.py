"""The agenda: which session is pushed, or dropped from the store, next; and when. Pure.

    stored ─► unpushed ─ quiet for a while ─► next: Push ─► pushed, or back among the unpushed
    near eviction ─► unpushed ─ at once ─► the same
    deleted ─► next: Drop ─► dropped

Sessions that were stored are pushed once they have been left alone, most valuable first; or only
those that kvd says are near eviction, at once and in that order, unless they are stored again
before: then kvd says so again when they are near it again. At the end all are. What is dropped
deliberately, flushed or ended, goes from the store, too, and before all else; what is evicted or
expires does not. A listing of all sessions makes good what was not heard of: whatever is not known
to be in the store is looked at there, by a push that sends nothing if nothing is missing.

A session that another server owns in the store is *fenced*. It is pushed again only if it goes on
here, stored anew, also before that was known, with more tokens than there: then it is taken over.

Invariants: 1. one step is under way at a time, so that no session is pushed twice at once; 2. a
session is unpushed, or to be dropped, or neither.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from typing import Literal

from kvd.following.steps import Drop, Push, Step, Terms, Unpushed, found, terms_of
from kvd.remote.pushing import rank_of
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey

Writes = Literal["none", "drain", "evicted", "all"]
MOST_QUIETS = 10  # a session that is never left alone is pushed after so many times that
BATCH = 64  # sessions that are chosen together
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0  # after a session's push failed


@dataclass
class Agenda:
    """See the module docstring. All instants are of one clock, in seconds, unless they say unix.

    Attributes:
        writes: what is pushed before the end: nothing, what is near eviction, or everything; at the
            end everything, or nothing.
        quiet_s: how long a session is left alone before.
        num_evicted: sessions that were evicted, or a part of them was, before they were pushed.
    """

    writes: Writes = "none"
    quiet_s: float = 0.0
    num_evicted: int = 0
    _unpushed: dict[SessionKey, Unpushed] = field(default_factory=dict)
    _drops: dict[SessionKey, Drop] = field(default_factory=dict)
    _there: dict[SessionKey, tuple[Terms, float]] = field(default_factory=dict)
    _fenced: dict[SessionKey, int] = field(default_factory=dict)  # tokens that the owner has
    _due: list[tuple[float, SessionKey]] = field(default_factory=list)  # a heap; may be outdated
    _ready: dict[SessionKey, None] = field(default_factory=dict)
    _batch: deque[SessionKey] = field(default_factory=deque)
    _under_way: tuple[Step, Unpushed | None] | None = None
    _is_draining: bool = False

    # ------------------------------------------------------------------------------ what is known

    @property
    def num_unpushed(self) -> int:
        """Sessions that are to be pushed, or looked at, that under way included."""
        return len(self._unpushed) + (self._pushing is not None)

    @property
    def num_drops(self) -> int:
        """Sessions that are to be dropped from the store."""
        return len(self._drops)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, or under way, whenever that would be."""
        return not (self._unpushed or self._drops or self._under_way)

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return self._under_way is not None

    def oldest_s(self) -> float | None:
        """Return since when something is not in the store that was stored here; O(sessions)."""
        pushing = self._pushing
        found = [one.first_s for one in self._unpushed.values() if one.is_new]
        if pushing is not None and pushing.is_new:
            found.append(pushing.first_s)
        return min(found, default=None)

    @property
    def _pushing(self) -> Unpushed | None:
        return self._under_way[1] if self._under_way else None

    # ------------------------------------------------------------------------------- what happens

    def stored(self, key: SessionKey, now_s: float, num_tokens: int | None = None) -> None:
        """Take that a session was stored, or its tokens are others.

        Args:
            key: whose.
            now_s: when.
            num_tokens: of it now; None: not told.
        """
        self.lives(key)
        if not self._follows:
            self._unpushed.pop(key, None)  # kvd says so if it is near eviction again
            return
        one = self._unpushed.get(key)
        if one is None:
            self._put(key, Unpushed(now_s, now_s, num_tokens or 0, is_new=True))
            return
        if not one.is_new:
            one.first_s, one.is_new = now_s, True
        one.last_s = max(one.last_s, now_s)
        one.num_tokens = one.num_tokens if num_tokens is None else num_tokens
        one.num_failures, one.not_before_s, one.is_over = 0, 0.0, False

    def lives(self, key: SessionKey) -> None:
        """Take that a session was stored again after it was dropped."""
        self._drops.pop(key, None)

    def near_eviction(
        self, key: SessionKey, now_s: float, num_tokens: int, *, is_over: bool
    ) -> None:
        """Take that kvd evicts a session next; `is_over`: another one goes on in its place."""
        if self.writes == "evicted" and key not in self._unpushed:
            self._put(key, Unpushed(now_s, now_s, num_tokens, is_new=True, is_over=is_over))

    def cut(self, key: SessionKey, num_tokens: int, *, evicted: bool = False) -> None:
        """Take that a session has lost its end, perhaps to eviction."""
        one = self._unpushed.get(key)
        if one is not None:
            one.num_tokens = num_tokens
            self._count(one, evicted=evicted)

    def superseded(self, key: SessionKey) -> None:
        """Take that another session goes on in a session's place: it can wait."""
        if key in self._unpushed:
            self._unpushed[key].is_over = True

    def gone(self, key: SessionKey, *, evicted: bool = False) -> None:
        """Take that a session was evicted, or has expired: there is nothing left to push."""
        one = self._unpushed.pop(key, None)
        if one is not None:
            self._count(one, evicted=evicted)
        self._there.pop(key, None)
        self._fenced.pop(key, None)

    def deleted(self, key: SessionKey, unix_s: float, *, of_others: bool) -> None:
        """Take that a session was dropped deliberately; see Drop."""
        self.gone(key)
        self._drops[key] = Drop(key, unix_s, of_others)

    def pulled(self, info: pb.SessionInfo, num_tokens: int, now_s: float) -> None:
        """Take that so many tokens were fetched: a turn may have stored more before we know."""
        key = _key_of(info)
        newer = self._unpushed.get(key)
        self.gone(key)
        self._there[key] = (terms_of(info), now_s)
        if newer is not None and newer.num_tokens > num_tokens:
            self._put(key, newer)

    def listed(self, infos: Iterable[pb.SessionInfo], now_s: float, unix_s: float) -> None:
        """Take all sessions, as they were listed after events were heard of again."""
        there, self._there = self._there, {}
        for info in infos:
            key, terms = _key_of(info), terms_of(info)
            used_s = now_s - info.idle_s
            known = there.get(key)
            if known is not None and known[0] == terms and used_s <= known[1]:
                self._there[key] = known
            elif key in self._drops:
                continue
            elif info.ended:
                self.deleted(key, unix_s, of_others=True)
                self._there[key] = (terms, now_s)
            elif self._is_pushed(info) and key not in self._unpushed:
                self._put(key, found(info, used_s))

    def drain(self) -> None:
        """Hold nothing back from now on: the end is near."""
        self._is_draining = self.writes != "none"
        self._ready = dict.fromkeys(self._unpushed)
        self._due.clear()

    def follow(self, writes: Writes, quiet_s: float) -> None:
        """Go by other settings; a listing is to follow."""
        has_changed = writes != self.writes
        self.writes, self.quiet_s = writes, quiet_s
        if has_changed and not self._follows:
            self._unpushed.clear()
            self._ready.clear()
        self._due = [(self._due_s(one), key) for key, one in self._unpushed.items()]
        heapify(self._due)

    def forget_store(self) -> None:
        """Know nothing of the store any more: it is another one."""
        self._there.clear()
        self._fenced.clear()

    # --------------------------------------------------------------------------- what is to be done

    def next(self, now_s: float) -> Step | None:
        """Return what to do now; then one of `pushed`, `dropped`, … is owed before the next call.

        None: nothing before `wait_until_s`, or another event.
        """
        assert self._under_way is None, "one step at a time"  # noqa: S101
        if self._drops:
            step = self._drops.pop(next(iter(self._drops)))
            self._under_way = (step, None)
            return step
        while (key := self._pick(now_s)) is not None:
            one = self._unpushed.pop(key)
            takes = key in self._fenced and one.num_tokens > self._fenced[key]
            if takes or key not in self._fenced:
                push = Push(key, takes)
                self._under_way = (push, one)
                return push
        return None

    def wait_until_s(self) -> float | None:
        """Return when `next` may have something, if nothing happens before; None: never."""
        if self._drops or self._ready or self._batch:
            return 0.0
        return self._due[0][0] if self._due else None

    # ---------------------------------------------------------------------------- what became of it

    def pushed(self, info: pb.SessionInfo, now_s: float) -> None:
        """Take that the session is in the store as it was then."""
        step, _ = self._ended()
        self._there[step.key] = (terms_of(info), now_s)
        self._fenced.pop(step.key, None)

    def dropped(self) -> None:
        """Take that nothing of the session is in the store, or is none of ours to drop."""
        self._ended()

    def missing(self) -> None:
        """Take that the session to be pushed is not stored here any more."""
        step, _ = self._ended()
        self.gone(step.key)

    def fenced(self, owners_tokens: int) -> bool:
        """Take that another server owns the session; returns whether that is news."""
        step, one = self._ended()
        is_news = step.key not in self._fenced
        self._fenced[step.key] = owners_tokens
        if is_news and one and one.is_new and one.num_tokens > owners_tokens:
            self._put_back(step, one)
        return is_news

    def failed(self, now_s: float) -> None:
        """Take that it could not be done, because of the session: it is tried again later."""
        step, one = self._ended()
        if one is None:
            return
        one.not_before_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**one.num_failures)
        one.num_failures += 1
        self._put_back(step, one)

    def postponed(self) -> None:
        """Take that it was not done, which is not the session's fault."""
        step, one = self._ended()
        self._put_back(step, one)

    # -------------------------------------------------------------------------------------- inside

    @property
    def _follows(self) -> bool:
        """Whether everything is pushed."""
        return self.writes == "all" or (self._is_draining and self.writes != "none")

    def _is_pushed(self, info: pb.SessionInfo) -> bool:
        return self._follows or (self.writes == "evicted" and info.near_eviction)

    def _count(self, one: Unpushed, *, evicted: bool) -> None:
        """Count a session that is evicted too early, once; one that is over is no loss."""
        if evicted and one.is_new and not one.is_over and not one.is_late:
            one.is_late = True
            self.num_evicted += 1

    def _ended(self) -> tuple[Step, Unpushed | None]:
        assert self._under_way is not None, "nothing is under way"  # noqa: S101
        ended, self._under_way = self._under_way, None
        return ended

    def _put_back(self, step: Step, one: Unpushed | None) -> None:
        newer = self._unpushed.get(step.key)
        if one is None:
            if isinstance(step, Drop) and newer is None:
                self._drops.setdefault(step.key, step)
        elif step.key in self._drops:
            return
        elif newer is None:
            self._put(step.key, one)
        else:
            newer.first_s = min(newer.first_s, one.first_s) if one.is_new else newer.first_s

    def _put(self, key: SessionKey, one: Unpushed) -> None:
        self._unpushed[key] = one
        if self._is_draining and not one.not_before_s:
            self._ready[key] = None
        else:
            heappush(self._due, (self._due_s(one), key))

    def _due_s(self, one: Unpushed) -> float:
        if self._is_draining or self.writes == "evicted":
            return one.not_before_s
        quiet_s = min(one.last_s + self.quiet_s, one.first_s + MOST_QUIETS * self.quiet_s)
        return max(one.not_before_s, quiet_s)

    def _pick(self, now_s: float) -> SessionKey | None:
        """Take the session that is to be pushed first, of those that are due."""
        while self._due and self._due[0][0] <= now_s:
            self._ready[heappop(self._due)[1]] = None
        while True:
            if not self._batch:
                self._choose(now_s)
            if not self._batch:
                return None
            key = self._batch.popleft()
            one = self._unpushed.get(key)
            if one is None:
                continue
            if self._due_s(one) <= now_s:
                return key
            heappush(self._due, (self._due_s(one), key))  # it was stored again meanwhile

    def _choose(self, now_s: float) -> None:
        """Take the first of those that are ready."""

        def rank(key: SessionKey) -> tuple[bool, bool, bool, float]:
            one = self._unpushed[key]
            if not self._follows:  # who is near eviction, in this order
                return one.is_over, False, False, one.first_s
            return rank_of(
                is_over=one.is_over,
                is_dirty=one.is_dirty,
                is_pinned=one.is_pinned,
                num_tokens=one.num_tokens,
                idle_s=max(0.0, now_s - one.last_s),
            )

        there = [key for key in self._ready if key in self._unpushed]
        self._batch.extend(nsmallest(BATCH, there, key=rank))
        chosen = set(self._batch)
        self._ready = {key: None for key in there if key not in chosen}


def _key_of(info: pb.SessionInfo) -> SessionKey:
    named = info.session
    return SessionKey(named.tenant, named.model, named.session_id)
