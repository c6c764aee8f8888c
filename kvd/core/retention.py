"""How long sessions stay: TTLs, pins, ends, flushes.

Pure. Invariants: 1. a leased, queued or pinned session does not expire; 2. a pinned session is in
no eviction order;
3. a flush never touches a leased session.
"""

from kvd.core.actions import SESSION_ENDED, SESSION_EXPIRED, SESSION_FLUSHED
from kvd.core.errors import InvalidRequestError, UnknownSessionError
from kvd.core.records import TTL_NEVER_NS, FlushAnswer
from kvd.core.session import Session
from kvd.core.state import CacheState
from shared.session_key import SessionKey
from shared.units import NS_PER_S

EXPIRE_BATCH = (
    256  # sessions per call, so that one call stays short; the next deadline is then already due
)
RECHECK_NS = NS_PER_S  # when to look again at a session whose TTL passed while it was in use


def find_session(state: CacheState, key: SessionKey) -> Session:
    """Find a session that an operator names.

    Raises:
        UnknownSessionError: if there is none.
    """
    session = state.sessions.get(key)
    if session is None:
        raise UnknownSessionError(
            f"session {key} is not stored", "see `kvd ls` for the sessions there are"
        )
    return session


def expire(state: CacheState) -> None:
    """Drop sessions whose TTL has passed; a bounded number per call."""
    for _ in range(EXPIRE_BATCH):
        key = state.ttl.pop_due(state.now_ns)
        if key is None:
            return
        session = state.sessions.get(key)
        if session is None:
            continue
        deadline_ns = session.expires_at_ns(state.limits.default_ttl_ns)
        if deadline_ns is None or deadline_ns > state.now_ns:
            state.ttl.schedule(key, deadline_ns)
        elif state.leases.num_of_session(key) or state.queue.is_queued(key):
            state.ttl.schedule(key, state.now_ns + RECHECK_NS)
        else:
            state.outbox.count("sessions_expired")
            state.drop_session(session, SESSION_EXPIRED, "ttl")


def pin(state: CacheState, key: SessionKey) -> None:
    """Protect a session from eviction and expiry."""
    session = find_session(state, key)
    session.pinned = True
    state.policy.removed(key)
    state.outbox.session_changed(key)


def unpin(state: CacheState, key: SessionKey) -> None:
    """End the protection; counts as a use."""
    session = find_session(state, key)
    session.pinned = False
    state.touch(session)
    state.outbox.session_changed(key)


def set_ttl(state: CacheState, key: SessionKey, ttl_ns: int | None) -> None:
    """Set a session's own TTL; None is the default, TTL_NEVER_NS never."""
    if ttl_ns is not None and ttl_ns != TTL_NEVER_NS and ttl_ns <= 0:
        raise InvalidRequestError(
            f"a TTL of {ttl_ns} ns", "give a positive duration, or never, or the default"
        )
    session = find_session(state, key)
    session.ttl_ns = ttl_ns
    state.schedule_expiry(session)
    state.outbox.session_changed(key)


def end_session(state: CacheState, key: SessionKey) -> bool:
    """Note that a session will not come back: the first to go; returns whether it is stored."""
    session = state.sessions.get(key)
    if session is None:
        return False
    session.ended = True
    state.policy.ended(key)
    state.outbox.session_changed(key)
    state.outbox.emit(SESSION_ENDED, key)
    return True


def flush(state: CacheState, key: SessionKey | None, *, dry_run: bool) -> FlushAnswer:
    """Drop one session, or all, except leased ones; a dry run only says what would go."""
    candidates = list(state.sessions) if key is None else [find_session(state, key).key]
    leased = tuple(key for key in candidates if state.leases.num_of_session(key))
    flushed = dict.fromkeys(key for key in candidates if key not in frozenset(leased))
    freed_bytes = _freed_bytes(state, flushed)
    if not dry_run:
        for session_key in flushed:
            state.outbox.count("sessions_flushed")
            state.drop_session(state.sessions[session_key], SESSION_FLUSHED, "flush")
    return FlushAnswer(len(flushed), freed_bytes, leased)


def _freed_bytes(state: CacheState, flushed: dict[SessionKey, None]) -> int:
    """Bytes, over all tiers, of the blocks that only these sessions use."""
    block_keys = {
        key for session_key in flushed for key in state.sessions[session_key].block_keys()
    }
    num_copies = 0
    for block_key in block_keys:
        block = state.blocks[block_key]
        if not block.readers and not block.holders and all(user in flushed for user in block.users):
            num_copies += (block.slot_id is not None) + (block.extent is not None)
    return num_copies * state.layout.block_bytes
