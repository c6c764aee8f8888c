"""Requests that change stored sessions: discards, grafts, ends, pins, TTLs, flushes; expiry.

Pure. Invariants: 1. a leased, queued or pinned session does not expire; 2. a hard-pinned session is
in no eviction order, and a soft-pinned one is guarded in each; 3. an ended session is not retained;
4. a flush never touches a leased session.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from kvd.core.inspection.descriptions import Inspector
from kvd.core.inspection.session_filter import SessionFilter, find_session, selects
from kvd.core.operations import discarding, grafting
from kvd.core.records.actions import SESSION_ENDED, SESSION_EXPIRED, SESSION_FLUSHED
from kvd.core.records.entries import TTL_NEVER_NS, Pin
from kvd.core.records.errors import InvalidRequestError
from kvd.core.records.records import FlushAnswer, SessionInfo
from kvd.core.records.tier import Tier
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.graft_source import GraftSource
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

# Sessions per call, so that one call stays short. If more have expired the next deadline is due at
# once.
EXPIRE_BATCH = 128
FLUSH = "flush"  # why a session was dropped: an operator flushed it
RECHECK_NS = NS_PER_S  # when to check again a session whose TTL passed while it was in use


class Sessions:
    """Changes sessions of one cache state on request of engines and operators.

    Args:
        state: the cache's tables.
        inspector: describes a session whose TTL was set.
        consider_compaction: called with each session after a discard or graft.
        reschedule_prefetch: called when a session ends, as there may be room to read ahead.
    """

    def __init__(
        self,
        state: CacheState,
        inspector: Inspector,
        consider_compaction: Callable[[SessionKey], None],
        reschedule_prefetch: Callable[[], None],
    ) -> None:
        self._state = state
        self._inspector = inspector
        self._consider_compaction = consider_compaction
        self._reschedule_prefetch = reschedule_prefetch

    def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[tuple[int, int]],
        *,
        lineage: Lineage | None = None,
    ) -> int:
        """Drop token ranges from a session; changes metadata only.

        Stores of the session that are under way publish nothing any more. A session whose lineage
        says that it is after this discard already, or after other ones, is left as it is.

        Args:
            key: the session.
            token_ids: all tokens of its context before the discard, however few are stored.
            ranges: half-open ranges of token positions to drop.
            lineage: lineage of `token_ids`; None: not named.

        Returns:
            Stored tokens of what the discard leaves, contiguous from the first kept one.

        Raises:
            InvalidRequestError: a range is empty or outside the tokens.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        num_kept = discarding.discard(state, key, token_ids, ranges, lineage)
        session = state.sessions.get(key)
        if session is not None:
            state.turns.on_discard(key, session.num_tokens)
            self._consider_compaction(key)
        return num_kept

    def graft(
        self, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
    ) -> int:
        """Append KV of another session's tokens to a session; changes metadata only.

        The session must have exactly `token_ids` stored, or these and what the same graft gave it
        before; otherwise it is left as it is. Stores under way publish nothing any more.

        Args:
            key: the session.
            token_ids: all its tokens before the graft.
            lineage: their lineage.
            source: the other session and its tokens.

        Returns:
            How many of the other session's tokens follow; 0: nothing has changed.

        Raises:
            InvalidRequestError: the source has another tenant or model, its range is invalid, or
                positions are baked into keys.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        num_grafted = grafting.graft(state, key, token_ids, lineage, source)
        if num_grafted:
            self._consider_compaction(key)
        return num_grafted

    def end(self, key: SessionKey) -> bool:
        """Record that a session will not return: evict it first. Returns whether it is stored."""
        state = self._state
        state.turns.on_end(key)
        self._reschedule_prefetch()
        state.policy.on_end(key)  # stored or not: the policy may learn from it
        state.outbox.emit(SESSION_ENDED, key)  # stored or not: a remote store may have it
        session = state.sessions.get(key)
        if session is None:
            return False
        state.retain(session, None)
        session.ended = True
        state.tenants.on_end(key)
        state.outbox.index.put_session(key)
        state.record_move(key, MoveKind.ENDED)
        return True

    def pin(self, key: SessionKey, pin: Pin) -> None:
        """Protect a session from eviction and expiry; Pin.NONE ends that and counts as a use.

        Raises:
            UnknownSessionError: the session is not stored.
        """
        state = self._state
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
            _insert(state, session)
        state.outbox.index.put_session(key)
        kind = MoveKind.UNPINNED if pin is Pin.NONE else MoveKind.PINNED
        state.record_move(key, kind, why="" if pin is Pin.NONE else pin.name.lower())

    def set_ttl(self, key: SessionKey, ttl_ns: int | None) -> SessionInfo:
        """Set a session's own TTL (None: the default; TTL_NEVER_NS: never).

        Raises:
            InvalidRequestError: the TTL is not positive.
            UnknownSessionError: the session is not stored.
        """
        if ttl_ns is not None and ttl_ns != TTL_NEVER_NS and ttl_ns <= 0:
            raise InvalidRequestError(
                f"a TTL of {ttl_ns} ns is not valid",
                'give a positive duration, "never" or "default"',
            )
        state = self._state
        session = find_session(state, key)
        session.ttl_ns = ttl_ns
        state.schedule_expiry(session)
        state.outbox.index.put_session(key)
        state.record_move(key, MoveKind.TTL_SET)
        return self._inspector.summarize(session)

    def expire(self) -> None:
        """Drop sessions whose TTL has passed; a bounded number per call."""
        state = self._state
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

    # ------------------------------------------------------------------------------------- flushes

    def flush(self, key: SessionKey | None, *, dry_run: bool, why: str = FLUSH) -> FlushAnswer:
        """Drop one session, or all (None), from every tier; leased ones stay.

        To drop very many at once takes long; `flush_selected` does it in steps.

        Args:
            key: the session; None: all.
            dry_run: only report what would be dropped.
            why: the reason in the event and in the session's history.

        Raises:
            UnknownSessionError: the named session is not stored.
        """
        state = self._state
        candidates = list(state.sessions) if key is None else [find_session(state, key).key]
        leased = tuple(filter(state.leases.num_of_session, candidates))
        flushed = dict.fromkeys(candidates)
        for leased_key in leased:
            del flushed[leased_key]
        if dry_run:
            return FlushAnswer(len(flushed), self.freed_bytes(flushed, Counter()), leased)
        return self.drop(flushed, leased, why)

    def flush_selected(self, keys: Iterable[SessionKey], wanted: SessionFilter) -> FlushAnswer:
        """Drop those of the sessions that match the filter (still); leased ones stay."""
        flushed, leased = self.flushable(keys, wanted)
        return self.drop(dict.fromkeys(flushed), leased)

    def flushable(
        self, keys: Iterable[SessionKey], wanted: SessionFilter
    ) -> tuple[tuple[SessionKey, ...], tuple[SessionKey, ...]]:
        """Return the sessions that a flush would drop, and the leased ones that it would leave."""
        state = self._state
        flushed: list[SessionKey] = []
        leased: list[SessionKey] = []
        for key in keys:
            session = state.sessions.get(key)
            if session is None or not selects(state, wanted, session):
                continue
            (leased if state.leases.num_of_session(key) else flushed).append(key)
        return tuple(flushed), tuple(leased)

    def drop(
        self, keys: Collection[SessionKey], leased: tuple[SessionKey, ...], why: str = FLUSH
    ) -> FlushAnswer:
        """Drop stored sessions from every tier, in use or not; `leased` is only reported."""
        num_bytes = self.freed_bytes(keys, Counter())
        for key in keys:
            self._state.outbox.count("sessions_flushed")
            self._state.drop_session(self._state.sessions[key], SESSION_FLUSHED, why)
        return FlushAnswer(len(keys), num_bytes, leased)

    def freed_bytes(self, keys: Iterable[SessionKey], counted: Counter[bytes]) -> int:
        """Return the bytes, over all tiers, that dropping these sessions frees; O(their blocks).

        A block that several sessions share is freed with the last of them; see `counted`.

        Args:
            keys: the sessions, each once; those that are not stored free nothing.
            counted: how many users of each shared block were counted so far; changed here. Empty
                at first; calls that add up one flush in steps pass the same counter.
        """
        state = self._state
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


def _insert(state: CacheState, session: Session) -> None:
    """Give a session its place in the eviction orders, where it may have had none."""
    state.policy.guard(session.key, session.guard)
    state.tenants.guard(session.key, session.guard)
    if session.pin is Pin.SOFT:
        for tier in Tier:
            state.users.on_insert(session, tier)
        for block_key in session.block_keys():  # a clean block needs a user that ranks with it
            state.settle(state.blocks[block_key])
        state.tenants.on_insert(session.key)
    else:
        state.touch(session)
