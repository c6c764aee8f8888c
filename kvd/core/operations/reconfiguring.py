"""Reconfiguration: apply changed limits to a running cache.

Pure. Most limits are read when they matter, and so hold at once. The others are applied to the
stored sessions here, so that the cache ends up as after a restart with the same limits: expiry
times, retentions, the order of a tenant's sessions once it has a quota, the number of sessions, and
which dirty blocks are to be written. Work that grows with the number of sessions is done in bounded
steps, one per call. An exceeded quota is enforced at the tenant's next store; a new quota, once all
sessions of its tenant are in order.
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
DROP_BATCH = 64  # sessions dropped per call; to drop one costs more

_ENDED = 1 << 62  # nanoseconds that an ended session ranks below its last use

_Use = tuple[int, SessionKey]  # a session and its eviction rank: the higher, the later it goes


class Reconfigurer:
    """Applies changed limits to one cache state, in bounded steps."""

    def __init__(self, state: CacheState, placement: Placement, writer: Writer) -> None:
        self._state = state
        self._placement = placement
        self._writer = writer
        self._rescheduled: Iterator[SessionKey] | None = None  # sessions still to be looked at
        self._begun: frozenset[str] = frozenset()  # tenants whose new quotas are to begin
        self._runs: list[Iterator[_Use]] = []  # their sessions so far, each run highest rank first
        self._to_enter: Iterator[_Use] | None = None  # all of them, highest rank first
        self._is_trimming = False

    def change(self, limits: Limits) -> None:
        """Use other limits from now on; `resume` applies them to stored sessions step by step."""
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
            self._writer.on_admission_change()
        self._writer.on_watermark_change()
        self.resume()

    def resume(self) -> None:
        """Do a bounded amount of the remaining work."""
        if self._rescheduled is not None:
            self._reschedule(self._rescheduled)
        elif self._to_enter is not None:
            self._enter(self._to_enter)
        for _ in range(DROP_BATCH):
            state = self._state
            is_over = len(state.sessions) > state.limits.max_sessions
            # Pinned, leased and busy sessions stay; they are dropped when new sessions come.
            self._is_trimming = self._is_trimming and is_over and self._placement.drop_victim()
            if not self._is_trimming:
                break

    def next_deadline_ns(self) -> int | None:
        """Return when to call `resume`: now, or never (None) if nothing is left to do."""
        is_looking = self._rescheduled is not None or self._to_enter is not None
        return self._state.now_ns if is_looking or self._is_trimming else None

    def _reschedule(self, keys: Iterator[SessionKey]) -> None:
        """Apply the limits to some sessions: expiry, retention, and ranks for new quotas."""
        some = list(islice(keys, RESCHEDULE_BATCH))
        run: list[_Use] = []
        for session in filter(None, map(self._state.sessions.get, some)):
            self._state.schedule_expiry(session)
            self._bound_retention(session)
            if session.key.tenant in self._begun:
                run.append((_rank(session), session.key))
        if run:
            run.sort(reverse=True)
            # Kept as columns: a pair for each of very many sessions would take a hundred bytes.
            ranks, keys_in_order = zip(*run, strict=True)
            self._runs.append(zip(array("q", ranks), keys_in_order, strict=True))
        if len(some) < RESCHEDULE_BATCH:
            self._rescheduled = None
            self._to_enter = merge(*self._runs, reverse=True) if self._begun else None
            self._runs = []

    def _bound_retention(self, session: Session) -> None:
        """Shorten a retention that is longer than it may be now."""
        state = self._state
        most_ns = longest_retention_ns(state, session.key.tenant, session.ttl_ns)
        if session.retain_ns is not None and session.retain_ns > most_ns:
            state.retain(session, most_ns or None)

    def _enter(self, uses: Iterator[_Use]) -> None:
        """Put some sessions into their tenants' orders, before those already there."""
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
    """Return a session's eviction rank: its last use; ended sessions rank below all others."""
    return session.last_access_ns - (_ENDED if session.ended else 0)
