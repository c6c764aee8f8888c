"""Other limits, while the cache is at work.

Pure. Most limits are looked at when they matter, and simply hold from then on. What follows from
the others is brought about here, so that a cache ends up where a restart with the same limits would
have taken it: expiry times, retentions, the order of a tenant's sessions once it has a quota, the
number of sessions, and which dirty blocks are to be written. Work that grows with the number of
sessions is done a bounded amount per call. A quota that is exceeded is enforced at the tenant's
next store; one that begins, once all its tenant's sessions are in order.
"""

from array import array
from collections.abc import Iterator
from heapq import merge
from itertools import islice

from kvd.core.io.placement import Placement
from kvd.core.io.writing import Writer
from kvd.core.operations.retaining import longest_retention_ns
from kvd.core.records.entries import Pin
from kvd.core.state.cache_state import CacheState
from kvd.core.state.limits import Limits
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey

RESCHEDULE_BATCH = 1024  # sessions per call, so that one call stays short
DROP_BATCH = 64  # the same; dropping one costs more

_ENDED = 1 << 62  # nanoseconds by which a session that has ended is colder than its last use

_Use = tuple[int, SessionKey]  # how warm a session is


class Reconfigurer:
    """Brings other limits about in one cache state."""

    def __init__(self, state: CacheState, placement: Placement, writer: Writer) -> None:
        self._state = state
        self._placement = placement
        self._writer = writer
        self._rescheduled: Iterator[SessionKey] | None = None  # sessions that are to be looked at
        self._begun: frozenset[str] = frozenset()  # tenants whose quotas are to begin
        self._runs: list[Iterator[_Use]] = []  # their sessions so far, each run warmest first
        self._to_enter: Iterator[_Use] | None = None  # all of them, warmest first
        self._is_trimming = False

    def change(self, limits: Limits) -> None:
        """Hold other limits from now on; what they ask of stored sessions comes by `resume`."""
        state = self._state
        before, state.limits = state.limits, limits
        state.leases.set_bound(limits.max_leases)
        self._begun = state.tenants.change_limits(limits.tenant_limits)
        self._runs, self._to_enter = [], None
        self._rescheduled = iter(list(state.sessions))
        self._is_trimming = len(state.sessions) > limits.max_sessions
        if (before.admission, before.write_back_delay_ns) != (
            limits.admission,
            limits.write_back_delay_ns,
        ):
            self._writer.admission_changed()
        self._writer.watermark_changed()
        self.resume()

    def resume(self) -> None:
        """Do a bounded amount of what is left to do."""
        if self._rescheduled is not None:
            self._reschedule(self._rescheduled)
        elif self._to_enter is not None:
            self._enter(self._to_enter)
        for _ in range(DROP_BATCH):
            state = self._state
            is_over = len(state.sessions) > state.limits.max_sessions
            # What is pinned, leased or busy stays; it goes when others come.
            self._is_trimming = self._is_trimming and is_over and self._placement.drop_victim()
            if not self._is_trimming:
                break

    def next_deadline_ns(self) -> int | None:
        """Return when to call `resume`; None: nothing is left to do."""
        is_looking = self._rescheduled is not None or self._to_enter is not None
        return self._state.now_ns if is_looking or self._is_trimming else None

    def _reschedule(self, keys: Iterator[SessionKey]) -> None:
        """Look at some sessions: they expire by the new limits, and are ranked for new quotas."""
        some = list(islice(keys, RESCHEDULE_BATCH))
        run: list[_Use] = []
        for session in filter(None, map(self._state.sessions.get, some)):
            self._state.schedule_expiry(session)
            self._bound_retention(session)
            if session.key.tenant in self._begun:
                run.append((_rank(session), session.key))
        if run:
            run.sort(reverse=True)
            # By columns: a pair for each of very many sessions takes a hundred bytes.
            ranks, keys_in_order = zip(*run, strict=True)
            self._runs.append(zip(array("q", ranks), keys_in_order, strict=True))
        if len(some) < RESCHEDULE_BATCH:
            self._rescheduled = None
            self._to_enter = merge(*self._runs, reverse=True) if self._begun else None
            self._runs = []

    def _bound_retention(self, session: Session) -> None:
        """Cut a retention that is longer than it may be now."""
        state = self._state
        most_ns = longest_retention_ns(state, session.key.tenant, session.ttl_ns)
        if session.retain_ns is not None and session.retain_ns > most_ns:
            state.retain(session, most_ns or None)

    def _enter(self, uses: Iterator[_Use]) -> None:
        """Put some sessions in order, before those that were used since or are warmer."""
        tenants = self._state.tenants
        some = list(islice(uses, RESCHEDULE_BATCH))
        for _, key in some:
            session = self._state.sessions.get(key)
            if session is None or session.pin is Pin.HARD:
                continue
            tenants.guard(key, session.guard)
            tenants.insert_before(key)
        if len(some) < RESCHEDULE_BATCH:
            self._to_enter = None
            tenants.begin_quotas()


def _rank(session: Session) -> int:
    """Rank a session by its last use; what has ended before all others."""
    return session.last_access_ns - (_ENDED if session.ended else 0)
