"""Other limits, while the cache is at work.

Pure. Most limits are looked at when they matter, and simply hold from then on. What follows from
the others is brought about here, so that a cache ends up where a restart with the same limits would
have taken it: expiry times, the order of a tenant's sessions once it has a quota, the number of
sessions, and which dirty blocks are to be written. Work that grows with the number of sessions is
done a bounded amount per call. A quota that is exceeded is enforced at the tenant's next store.
"""

from typing import TYPE_CHECKING

from kvd.core.placement import Placement
from kvd.core.records import Pin
from kvd.core.state import CacheState, Limits
from kvd.core.writing import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.session import Session

RESCHEDULE_BATCH = 2048  # sessions per call, so that one call stays short
DROP_BATCH = 64  # the same; dropping one costs more


class Relimiter:
    """Changes the limits of one cache state."""

    def __init__(self, state: CacheState, placement: Placement, writer: Writer) -> None:
        self._state = state
        self._placement = placement
        self._writer = writer
        self._rescheduled: Iterator[Session] | None = None  # sessions that are to be looked at
        self._is_trimming = False

    def change(self, limits: Limits) -> None:
        """See CacheEngine.set_limits."""
        state = self._state
        before, state.limits = state.limits, limits
        state.leases.set_bound(limits.max_leases)
        self._change_tenants()
        self._rescheduled = iter(list(state.sessions.values()))
        self._is_trimming = len(state.sessions) > limits.max_sessions
        if (before.admission, before.write_back_delay_ns) != (
            limits.admission,
            limits.write_back_delay_ns,
        ):
            self._writer.admission_changed()
        self._writer.watermark_changed()
        self.go_on()

    def go_on(self) -> None:
        """Do a bounded amount of what is left to do."""
        for _ in range(RESCHEDULE_BATCH):
            session = next(self._rescheduled, None) if self._rescheduled is not None else None
            if session is None:
                self._rescheduled = None
                break
            if self._state.sessions.get(session.key) is session:
                self._state.schedule_expiry(session)
        for _ in range(DROP_BATCH):
            state = self._state
            is_over = len(state.sessions) > state.limits.max_sessions
            # What is pinned, leased or busy stays; it goes when others come.
            self._is_trimming = self._is_trimming and is_over and self._placement.drop_coldest()
            if not self._is_trimming:
                break

    def next_deadline_ns(self) -> int | None:
        """When to call `go_on`; None: nothing is left to do."""
        is_done = self._rescheduled is None and not self._is_trimming
        return None if is_done else self._state.now_ns

    def _change_tenants(self) -> None:
        state = self._state
        begun = state.tenants.change_limits(state.limits.tenant_limits)
        if not begun:
            return
        sessions = [s for s in state.sessions.values() if s.key.tenant in begun]
        for session in sorted(sessions, key=lambda session: session.last_access_ns):
            if session.pin is Pin.HARD:
                continue
            if session.pin is Pin.SOFT:
                state.tenants.guarded(session.key, is_guarded=True)
            state.tenants.entered(session.key)
            if session.ended:
                state.tenants.ended(session.key)
