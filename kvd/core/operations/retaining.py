"""Retention: for how long clients want sessions to be kept, as they say with a turn.

Pure. A session that is retained goes when nothing is left that is not (Guard), until its last use
is so long ago; each use begins that anew. Then it is as others are, by that last use. It is a least
life that a client wishes, and never a most one: an operator's bounds hold, a TTL among them, and
where all are retained the usual order does.

A *prefix* is what sessions begin with in common: tools, a system message. Its client may want it to
outlive each of them. It is a session of its own, of the same blocks, which costs an entry and no
bytes; and it goes with its retention.
"""

from collections.abc import Callable, Iterable

from kvd.core.records.entries import TTL_NEVER_NS
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.session_key import SessionKey

END_BATCH = 128  # retentions per call, so that one call stays short


def longest_retention_ns(state: CacheState, tenant: str, ttl_ns: int | None) -> int:
    """Return how long a tenant's session may be retained at most.

    Args:
        state: the cache's tables.
        tenant: whose session it is.
        ttl_ns: of its own; None: it inherits one. Whoever sets a TTL means it.
    """
    own_ns = state.tenants.limits(tenant).max_retention_ns
    most_ns = state.limits.max_retention_ns if own_ns is None else own_ns
    ttl_ns = state.inherited_ttl_ns(tenant) if ttl_ns is None else ttl_ns
    return most_ns if ttl_ns in (None, TTL_NEVER_NS) else min(most_ns, ttl_ns)


class Retainer:
    """Retains sessions of one cache state.

    Args:
        state: the cache's tables.
        adopt: makes a session of stored blocks, see Publisher.
        admit: has dirty blocks written, as far as they may be.
    """

    def __init__(
        self,
        state: CacheState,
        adopt: Callable[[SessionKey, bytes], Session | None],
        admit: Callable[[Iterable[Block]], None],
    ) -> None:
        self._state = state
        self._adopt = adopt
        self._admit = admit

    def retain(self, key: SessionKey, retain_ns: int) -> int:
        """Retain a session for so long after each use, in place of an earlier wish; 0: no longer.

        Returns:
            For how long it is; 0: it is not stored, or has ended, or may not be.

        Raises:
            InvalidRequestError: a negative time.
            ErasingError: the tenant is being erased.
        """
        session = self._state.sessions.get(key)
        ttl_ns = None if session is None else session.ttl_ns
        granted_ns = self._granted(key, retain_ns, ttl_ns)
        if session is None or session.ended:
            return 0
        self._set(session, granted_ns)
        return granted_ns

    def retain_prefix(self, key: SessionKey, token_ids: bytes, retain_ns: int) -> int:
        """Retain a prefix of whole blocks as a session of that name, which is a use of it.

        The longest of all wishes holds.

        Returns:
            For how long it is; 0: some of its tokens are not stored, or it may not be.

        Raises:
            InvalidRequestError: a negative time, or token ids that cannot be.
            ErasingError: the tenant is being erased.
        """
        granted_ns = self._granted(key, retain_ns, None)
        session = self._adopt(key, token_ids) if granted_ns else None
        if session is None:
            return 0
        most_ns = longest_retention_ns(self._state, key.tenant, None)
        granted_ns = min(most_ns, max(granted_ns, session.retain_ns or 0))
        session.ttl_ns = granted_ns
        self._state.schedule_expiry(session)
        self._set(session, granted_ns)
        return granted_ns

    def end_due(self) -> None:
        """End retentions whose time has passed; a bounded number per call."""
        state = self._state
        for _ in range(END_BATCH):
            key = state.retention.pop_due(state.now_ns)
            if key is None:
                return
            session = state.sessions[key]
            until_ns = session.retained_until_ns
            if until_ns is not None and until_ns <= state.now_ns:
                self._set(session, 0)
            else:
                state.retention.schedule(key, until_ns)

    def _granted(self, key: SessionKey, retain_ns: int, ttl_ns: int | None) -> int:
        """Return how much of a wish is granted, and count it."""
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        if retain_ns < 0:
            raise InvalidRequestError(
                f"a retention of {retain_ns} ns", "give a duration, 0 for none"
            )
        granted_ns = min(retain_ns, longest_retention_ns(state, key.tenant, ttl_ns))
        state.outbox.count("retentions", retain_ns > 0)
        state.outbox.count("retentions_cut", granted_ns < retain_ns)
        return granted_ns

    def _set(self, session: Session, retain_ns: int) -> None:
        state = self._state
        if (session.retain_ns or 0) == retain_ns:
            return
        state.retain(session, retain_ns or None)
        state.record_move(session.key, MoveKind.RETAINED if retain_ns else MoveKind.UNRETAINED)
        if retain_ns:  # SSD may have refused blocks that have come before the wish
            self._admit([state.blocks[block_key] for block_key in session.block_keys()])
