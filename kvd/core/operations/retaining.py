"""Retention: how long clients want their sessions to be kept after each use.

Pure. A retained session is evicted only when no other is left (Guard), until the retention has
passed since its last use; each use starts it again. Then the session ranks like others, by its last
use. A retention is a minimum life that a client wishes for, and never a maximum: an operator's
bounds hold, a TTL among them. If all sessions are retained, the usual order applies.

A *prefix* is the common beginning of several sessions: tools, a system message. Its client may want
it to outlive each of them. It becomes a session of its own on the same blocks, which costs an entry
and no further KV, and it expires with its retention.
"""

from collections.abc import Callable, Iterable

from kvd.core.records.entries import TTL_NEVER_NS
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.session_key import SessionKey

END_BATCH = 128  # retentions ended per call, so that one call stays short


def longest_retention_ns(state: CacheState, tenant: str, ttl_ns: int | None) -> int:
    """Return the longest retention of a tenant's session, in nanoseconds; a TTL bounds it, too.

    Args:
        state: the cache's tables.
        tenant: the session's tenant.
        ttl_ns: the session's own TTL; None: it inherits the tenant's or the default.
    """
    own_ns = state.tenants.limits(tenant).max_retention_ns
    most_ns = state.limits.max_retention_ns if own_ns is None else own_ns
    ttl_ns = state.inherited_ttl_ns(tenant) if ttl_ns is None else ttl_ns
    return most_ns if ttl_ns in (None, TTL_NEVER_NS) else min(most_ns, ttl_ns)


class Retainer:
    """Sets and ends retentions of one cache state's sessions.

    Args:
        state: the cache's tables.
        adopt: makes a session of stored blocks, see Publisher.
        admit: queues dirty blocks for writing where the write policy allows it.
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
        """Set how long a session is retained after each use; 0: no longer.

        It replaces an earlier wish.

        Returns:
            The granted retention in nanoseconds; 0: the session is not stored, has ended, or may
            not be retained.

        Raises:
            InvalidRequestError: a negative duration.
            ErasingError: the tenant is being erased.
        """
        session = self._state.sessions.get(key)
        ttl_ns = None if session is None else session.ttl_ns
        granted_ns = self._grant(key, retain_ns, ttl_ns)
        if session is None or session.ended:
            return 0
        self._set_retention(session, granted_ns)
        return granted_ns

    def retain_prefix(self, key: SessionKey, token_ids: bytes, retain_ns: int) -> int:
        """Retain a prefix of whole blocks as a session under that key, and record a use of it.

        Of several wishes for one prefix the longest holds.

        Returns:
            The granted retention in nanoseconds; 0: some of its tokens are not stored, or it may
            not be retained.

        Raises:
            InvalidRequestError: a negative duration, or malformed token ids.
            ErasingError: the tenant is being erased.
        """
        granted_ns = self._grant(key, retain_ns, None)
        session = self._adopt(key, token_ids) if granted_ns else None
        if session is None:
            return 0
        most_ns = longest_retention_ns(self._state, key.tenant, None)
        granted_ns = min(most_ns, max(granted_ns, session.retain_ns or 0))
        session.ttl_ns = granted_ns
        self._state.schedule_expiry(session)
        self._set_retention(session, granted_ns)
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
                self._set_retention(session, 0)
            else:
                state.retention.schedule(key, until_ns)

    def _grant(self, key: SessionKey, retain_ns: int, ttl_ns: int | None) -> int:
        """Return the part of a wished retention that is granted, and count the wish."""
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        if retain_ns < 0:
            raise InvalidRequestError(
                f"a retention of {retain_ns} ns is not valid", "give a duration, or 0 for none"
            )
        granted_ns = min(retain_ns, longest_retention_ns(state, key.tenant, ttl_ns))
        state.outbox.count("retentions", retain_ns > 0)
        state.outbox.count("retentions_cut", granted_ns < retain_ns)
        return granted_ns

    def _set_retention(self, session: Session, retain_ns: int) -> None:
        """Set a session's retention, if it differs, and record that."""
        state = self._state
        if (session.retain_ns or 0) == retain_ns:
            return
        state.retain(session, retain_ns or None)
        state.record_move(session.key, MoveKind.RETAINED if retain_ns else MoveKind.UNRETAINED)
        if retain_ns:  # SSD may have refused its blocks before, when the session ranked lower
            self._admit([state.blocks[block_key] for block_key in session.block_keys()])
