"""How long sessions stay: TTLs, pins, ends, flushes.

Pure. Invariants: 1. a leased, queued or pinned session does not expire; 2. a hard-pinned session is
in no eviction order, a soft-pinned one is guarded in every one; 3. a flush never touches a leased
session.
"""

from collections import Counter
from collections.abc import Iterable

from kvd.core.inspection.session_filter import SessionFilter, selects
from kvd.core.records.actions import SESSION_ENDED, SESSION_EXPIRED, SESSION_FLUSHED
from kvd.core.records.errors import InvalidRequestError, UnknownSessionError
from kvd.core.records.records import FlushAnswer, Tier
from kvd.core.records.rows import TTL_NEVER_NS, Pin
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

EXPIRE_BATCH = (
    128  # sessions per call, so that one call stays short; the next deadline is then already due
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
        deadline_ns = state.expires_at_ns(session)
        if deadline_ns is None or deadline_ns > state.now_ns:
            state.ttl.schedule(key, deadline_ns)
        elif state.leases.num_of_session(key) or state.placement.is_busy(key):
            state.ttl.schedule(key, state.now_ns + RECHECK_NS)
        else:
            state.outbox.count("sessions_expired")
            state.drop_session(session, SESSION_EXPIRED, "ttl")


def pin(state: CacheState, key: SessionKey, pin: Pin) -> None:
    """Change how a session is protected from expiry and eviction; the end of a pin is a use."""
    session = find_session(state, key)
    answered = state.users.answers(session)
    state.count_pin(session, -1)
    session.pin = pin
    state.count_pin(session, 1)
    if pin is Pin.HARD:
        state.policy.on_remove(key)
        state.tenants.on_remove(key)
    state.users.recount(session, answered)
    if pin is not Pin.HARD:
        _rank(state, session)
    state.outbox.index.session_changed(key)
    kind = MoveKind.UNPINNED if pin is Pin.NONE else MoveKind.PINNED
    state.note(key, kind, why="" if pin is Pin.NONE else pin.name.lower())


def _rank(state: CacheState, session: Session) -> None:
    """Give a session its place in the orders, where it may have had none."""
    is_guarded = session.pin is Pin.SOFT
    state.policy.guard(session.key, is_guarded=is_guarded)
    state.tenants.guard(session.key, is_guarded=is_guarded)
    if is_guarded:
        for tier in Tier:
            state.users.on_insert(session, tier)
        for block_key in session.block_keys():  # a clean one needs a user that offers it
            state.settle(state.blocks[block_key])
        state.tenants.on_insert(session.key)
    else:
        state.touch(session)


def set_ttl(state: CacheState, key: SessionKey, ttl_ns: int | None) -> None:
    """Set a session's own TTL; None is the default, TTL_NEVER_NS never."""
    if ttl_ns is not None and ttl_ns != TTL_NEVER_NS and ttl_ns <= 0:
        raise InvalidRequestError(
            f"a TTL of {ttl_ns} ns", "give a positive duration, or never, or the default"
        )
    session = find_session(state, key)
    session.ttl_ns = ttl_ns
    state.schedule_expiry(session)
    state.outbox.index.session_changed(key)
    state.note(key, MoveKind.TTL_SET)


def end_session(state: CacheState, key: SessionKey) -> bool:
    """Note that a session will not come back: the first to go; returns whether it is stored."""
    state.policy.on_end(key)  # be it stored: it may learn from it
    session = state.sessions.get(key)
    if session is None:
        return False
    session.ended = True
    state.tenants.on_end(key)
    state.outbox.index.session_changed(key)
    state.outbox.emit(SESSION_ENDED, key)
    state.note(key, MoveKind.ENDED)
    return True


def flush(state: CacheState, key: SessionKey | None, *, dry_run: bool) -> FlushAnswer:
    """Drop one session, or all, except leased ones; a dry run only says what would go."""
    candidates = list(state.sessions) if key is None else [find_session(state, key).key]
    leased = tuple(filter(state.leases.num_of_session, candidates))
    flushed = dict.fromkeys(candidates)
    for leased_key in leased:
        del flushed[leased_key]
    return _flush(state, flushed, leased, dry_run=dry_run)


def flush_selected(
    state: CacheState, keys: Iterable[SessionKey], wanted: SessionFilter
) -> FlushAnswer:
    """Drop those of the sessions that are still there, meant, and not leased."""
    flushed, leased = flushable(state, keys, wanted)
    return _flush(state, dict.fromkeys(flushed), leased, dry_run=False)


def flushable(
    state: CacheState, keys: Iterable[SessionKey], wanted: SessionFilter
) -> tuple[tuple[SessionKey, ...], tuple[SessionKey, ...]]:
    """Tell which of the sessions a flush would drop, and which it would not: they are leased."""
    flushed: list[SessionKey] = []
    leased: list[SessionKey] = []
    for key in keys:
        session = state.sessions.get(key)
        if session is None or not selects(state, wanted, session):
            continue
        (leased if state.leases.num_of_session(key) else flushed).append(key)
    return tuple(flushed), tuple(leased)


def _flush(
    state: CacheState,
    flushed: dict[SessionKey, None],
    leased: tuple[SessionKey, ...],
    *,
    dry_run: bool,
) -> FlushAnswer:
    num_bytes = freed_bytes(state, flushed, Counter())
    if not dry_run:
        for key in flushed:
            state.outbox.count("sessions_flushed")
            state.drop_session(state.sessions[key], SESSION_FLUSHED, "flush")
    return FlushAnswer(len(flushed), num_bytes, leased)


def freed_bytes(state: CacheState, keys: Iterable[SessionKey], counted: Counter[bytes]) -> int:
    """Bytes, over all tiers, that go with these sessions, and with others before: O(their blocks).

    A block that several sessions share goes with the last of them.

    Args:
        state: of the cache.
        keys: of the sessions, each once; those that are gone free nothing.
        counted: how many users of each shared block have been looked at. Empty at first; the calls
            that add up one flush bit by bit hand it on.
    """
    sessions = [state.sessions[key] for key in keys if key in state.sessions]
    num_copies = sum(session.num_packed for session in sessions)
    for block_key in (key for session in sessions for key in session.block_keys()):
        block = state.blocks[block_key]
        if len(block.users) > 1:
            counted[block_key] += 1
            if counted[block_key] < len(block.users):
                continue
        if not block.readers and not block.holders:
            num_copies += (block.slot_id is not None) + (block.extent is not None)
    return num_copies * state.layout.block_bytes
