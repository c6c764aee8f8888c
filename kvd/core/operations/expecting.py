"""Expectations: engines' hints about a session after a turn, and counts of sessions that returned.

Pure. Hints are never promises. A session that *awaits tools* is expected back when they have
answered, and the eviction policy may keep it for that long. A session that is *superseded* is
evicted before others, because another session continues in its place. A wrong hint costs a place in
the order of eviction and never any data, and the next use of the session ends it. Hints do not
change the wishes of clients and operators: pins, TTLs, retentions.

Returning sessions are counted by where they were when their turn arrived. That is before anything
is read for the turn, so the counts show how good the order of eviction was. A turn that comes and
goes between two reports of its engine's queue is not counted.
"""

from collections.abc import Iterable, Sequence

from kvd.core.records.actions import SESSION_AWAITING, SESSION_SUPERSEDED
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.awaited_tools import awaited_tools
from shared.types.session_key import SessionKey

DRAM, SSD, GONE = "dram", "ssd", "gone"  # where a session is; GONE: it is no longer stored


class Expectations:
    """Applies hints about the sessions of one cache state, and counts their returns."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> bool:
        """Apply an engine's hint about a session after a turn.

        If the session's next turn waits already, the hint comes too late and changes nothing; so
        does one about tools of a session that was superseded meanwhile. A policy may learn from
        sessions that are not stored.

        Args:
            key: the session.
            tools: names of the tools that its answer calls; empty: none.
            superseded: whether another session continues in its place.

        Returns:
            Whether the session is stored.

        Raises:
            InvalidToolNamesError: too many names, or invalid ones.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        names = awaited_tools(tools)
        state.tenants.refuse_erased(key.tenant)
        session = state.sessions.get(key)
        if state.placement.queue.is_queued(key) or (session is not None and session.ended):
            return session is not None
        if superseded:
            self._supersede(key, session)
        elif names and not (session is not None and session.superseded):
            self._await(key, session, names)
        return session is not None

    def on_arrival(self, keys: Iterable[SessionKey]) -> None:
        """Record that turns of sessions have arrived; O(blocks) of those that are stored."""
        state = self._state
        for key in keys:
            session = state.sessions.get(key)
            if session is not None:
                is_awaited = session.came_back or bool(session.awaited_tools)
                self._count_return(_location(state, session), is_awaited=is_awaited)
                session.awaited_tools, session.came_back = (), False
            elif state.history.removal(key) is not None:
                self._count_return(GONE, is_awaited=state.history.awaited_tools(key))

    def _await(self, key: SessionKey, session: Session | None, names: tuple[str, ...]) -> None:
        """Record that a session awaits tools."""
        state = self._state
        state.outbox.count("awaits")
        state.policy.on_await(key, names, state.now_ns)
        if session is not None:
            session.awaited_tools = names
            joined_names = ", ".join(names)
            state.outbox.emit(SESSION_AWAITING, key, {"tools": joined_names})
            state.record_move(key, MoveKind.AWAITING, why=joined_names)

    def _supersede(self, key: SessionKey, session: Session | None) -> None:
        """Record that another session continues in this one's place."""
        state = self._state
        if session is None or session.superseded:
            return
        state.outbox.count("supersedes")
        session.superseded, session.awaited_tools = True, ()
        state.policy.on_supersede(key)
        state.tenants.on_end(key)
        state.outbox.emit(SESSION_SUPERSEDED, key)
        state.record_move(key, MoveKind.SUPERSEDED)

    def _count_return(self, where: str, *, is_awaited: bool) -> None:
        self._state.outbox.count(f"returns_{where}")
        self._state.outbox.count(f"tool_returns_{where}", is_awaited)


def _location(state: CacheState, session: Session) -> str:
    """Return where a session is: in DRAM only if all of it is."""
    is_resident = not session.packed and all(
        state.blocks[key].slot_id is not None for key in session.block_keys()
    )
    return DRAM if is_resident else SSD
