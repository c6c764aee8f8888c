"""What is likely to become of sessions, as engines say after a turn; and where returning ones were.

Pure. Hints, never promises: a session that *awaits tools* is back when they have answered, and its
policy may hold it so long; one that is *superseded* goes before others, for another session goes on
in its place. A wrong hint costs a place in the order of eviction, never a byte, and the next use of
the session ends it. What a client or an operator wishes stays as it is: pins, TTLs, retentions.

Returns are counted here, too, by where the session was when its turn arrived. That is before
anything is read for it, so what is counted is what the order of eviction was worth. Of a turn that
comes and goes between two reports of its engine's queue nothing is counted.
"""

from collections.abc import Iterable, Sequence

from kvd.core.records.actions import SESSION_AWAITING, SESSION_SUPERSEDED
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.awaited_tools import awaited_tools
from shared.types.session_key import SessionKey

DRAM, SSD, GONE = "dram", "ssd", "gone"  # where sessions are; the last: nothing is stored any more


class Expectations:
    """What is expected of the sessions of one cache state."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def expect(self, key: SessionKey, tools: Sequence[str], *, superseded: bool) -> bool:
        """Take what its engine expects of a session after a turn; returns whether it is stored.

        A turn of it that waits already is what was expected: then this comes too late, and changes
        nothing. A policy may learn from sessions that are not stored.

        Args:
            key: whose.
            tools: names of those that its answer calls; none: it calls none.
            superseded: whether another session goes on in its place.

        Raises:
            InvalidToolNamesError: too many names, or some that cannot be.
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
        elif names:
            self._await(key, session, names)
        return session is not None

    def arrived(self, keys: Iterable[SessionKey]) -> None:
        """Record that turns of sessions have arrived: O(blocks) of those that are stored."""
        state = self._state
        for key in keys:
            session = state.sessions.get(key)
            if session is not None:
                is_awaited = session.came_back or bool(session.awaited_tools)
                self._count_return(_where(state, session), is_awaited=is_awaited)
                session.awaited_tools, session.came_back = (), False
            elif state.history.removal(key) is not None:
                self._count_return(GONE, is_awaited=state.history.awaited_tools(key))

    def _await(self, key: SessionKey, session: Session | None, names: tuple[str, ...]) -> None:
        state = self._state
        state.outbox.count("awaits")
        state.policy.on_await(key, names, state.now_ns)
        if session is not None:
            session.awaited_tools = names
            told = ", ".join(names)
            state.outbox.emit(SESSION_AWAITING, key, {"tools": told})
            state.record_move(key, MoveKind.AWAITING, why=told)

    def _supersede(self, key: SessionKey, session: Session | None) -> None:
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


def _where(state: CacheState, session: Session) -> str:
    """Say where a session is: in DRAM, if all of it is."""
    is_resident = not session.packed and all(
        state.blocks[key].slot_id is not None for key in session.block_keys()
    )
    return DRAM if is_resident else SSD
