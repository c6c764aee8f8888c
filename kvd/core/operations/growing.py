"""Growing sessions: make the imported part of a session usable while its import runs.

The importer (kvd/session_files) drives it.

Pure. An import stores its KV under a session key of its own. From time to time the session itself
is given all that is imported so far, as a turn's store would do it. That requires that nothing is
stored of the session, or only fewer of its first tokens:

    nothing ─► growing ─► whole
       │          ├─► not_fetched: the import ends early; what is imported stays
       │          └─► changed: a turn stores it, or it is flushed, ended or cut; it is left as it is
       └─► other tokens are stored of it: these stay until the import ends (session_files.py)

Until the session is whole it is marked as having lost its end (`Session.lost`), so that no other
server takes it for all of the session. With states or windows no session grows, because the parts
that a load ends with are imported last.

Invariant: a growing session has the first tokens of the import, all of them stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import match_session, token_spans
from kvd.core.records.entries import Span
from kvd.core.records.errors import SessionChangedError
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import Part, StoreLease
from kvd.core.state.session import Session
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

PACE_NS = NS_PER_S // 4  # shortest time of growth from which its pace is estimated
NOT_FETCHED = "not_fetched"  # why a session has lost its end: it was not imported (yet)


@dataclass(slots=True, eq=False)
class Growth:
    """The progress of one growing session.

    Attributes:
        key: the session that grows.
        source: the session key under which the import stores its KV.
        lineage: lineage of the imported tokens.
        most_tokens: a session that has more tokens before it grows is left as it is.
        is_refused: the session has other tokens: it does not grow before the import ends.
        spans: the spans that the session was given last; (): none yet.
        first_ns: time at which it was first given some.
        first_tokens: number of tokens that it had then.
    """

    key: SessionKey
    source: SessionKey
    lineage: Lineage
    most_tokens: int
    is_refused: bool = False
    spans: Sequence[Span] = ()
    first_ns: int = 0
    first_tokens: int = 0


class GrowingSessions:
    """The growing sessions of one cache state.

    Args:
        state: the cache's tables.
        publish: makes stored blocks a session's, see Publisher.
    """

    def __init__(
        self, state: CacheState, publish: Callable[[StoreLease, Sequence[Part]], None]
    ) -> None:
        self._state = state
        self._publish = publish
        self._growths: dict[SessionKey, Growth] = {}  # of imports under way, by session

    def is_growing(self, key: SessionKey) -> bool:
        """Whether a session is given the KV of an import under way.

        It is not once it has changed otherwise, though the import may not know it yet.
        """
        session = self._state.sessions.get(key)
        return key in self._growths and session is not None and session.lost == NOT_FETCHED

    def token_ns(self, key: SessionKey) -> float | None:
        """Return the mean nanoseconds per token at which a session has grown; None: not known."""
        growth, session = self._growths.get(key), self._state.sessions.get(key)
        if growth is None or session is None:
            return None
        num_come = session.num_tokens - growth.first_tokens
        took_ns = self._state.now_ns - growth.first_ns
        if num_come <= 0 or took_ns < PACE_NS:
            return None
        return took_ns / num_come

    def grow(self, growth: Growth, token_ids: bytes) -> bool:
        """Give the session all that the import has stored so far.

        Costs O(spans), and the first time a hash of all tokens that the session had before.

        Args:
            growth: the progress of the session; changed here.
            token_ids: the imported tokens, at least those that are stored.

        Returns:
            Whether the session has all that the import has stored.

        Raises:
            SessionChangedError: the session has grown and was changed otherwise since.
            ErasingError: the tenant is being erased.
        """
        state, key = self._state, growth.key
        state.tenants.refuse_erased(key.tenant)
        session, source = state.sessions.get(key), state.sessions.get(growth.source)
        if growth.spans:
            self._check_unchanged(growth, session)
        if source is None:
            return False
        spans = self._spans(source)
        if not growth.spans and not self._may_begin(growth, session, source, token_ids):
            return False
        if len(spans) > len(growth.spans):
            self._give(growth, spans)
        return growth.spans == spans

    def _give(self, growth: Growth, spans: list[Span]) -> None:
        """Make the spans the session's, unless there is no room for another one."""
        state = self._state
        parts = [(span, state.blocks[span.block_key]) for span in spans]
        for _, block in parts:  # making room for the session must not evict them
            block.holders += 1
        self._publish(StoreLease(0, 0, growth.key, lineage=growth.lineage), parts)
        session = state.sessions.get(growth.key)
        if session is not None:
            session.lost = NOT_FETCHED
            if not growth.spans:
                growth.first_ns, growth.first_tokens = state.now_ns, session.num_tokens
            growth.spans = spans
            self._growths[growth.key] = growth
        for _, block in parts:
            block.holders -= 1
            state.settle(block)

    def end(self, growth: Growth, *, is_whole: bool) -> None:
        """Record that the import has ended; `is_whole`: the session was given all of it."""
        state, key = self._state, growth.key
        if self._growths.get(key) is not growth:
            return
        del self._growths[key]
        session = state.sessions.get(key)
        if is_whole and session is not None:
            session.lost = ""
            state.outbox.index.put_session(key)
        state.outbox.on_fetch_end(key)

    def check(self) -> None:
        """Raise AssertionError if a session has anything but the first spans of its import."""
        for key, growth in self._growths.items():
            assert growth.key == key, "it is its session's"
            source = self._state.sessions.get(growth.source)
            there = [] if source is None else self._spans(source)  # it may have lost its end
            pairs = zip(growth.spans, there, strict=False)
            assert all(given == stored for given, stored in pairs), "it was given what has come"

    def _may_begin(
        self, growth: Growth, session: Session | None, source: Session, token_ids: bytes
    ) -> bool:
        """Whether the session is not stored, or has fewer tokens and all are of the import."""
        state = self._state
        if session is None:
            return True
        there = session.num_tokens
        if growth.is_refused or not there < source.num_tokens or there > growth.most_tokens:
            return False
        if state.leases.is_storing(growth.key):
            return False
        chaining = Chaining(state.layout, state.salt_of(growth.key.tenant), growth.lineage)
        match = match_session(state, session, token_ids, chaining)
        growth.is_refused = not match.covers(session, token_spans(state, session))
        return not growth.is_refused

    def _check_unchanged(self, growth: Growth, session: Session | None) -> None:
        """Raise SessionChangedError if the session differs from what it was last given."""
        state, key = self._state, growth.key
        is_ours = session is not None and not session.ended and not state.leases.is_storing(key)
        if session is None or not is_ours or self._spans(session) != growth.spans:
            raise SessionChangedError(
                f"session {key} has changed on this server in the meantime",
                "nothing needs to be done: the session stays as it is",
            )

    def _spans(self, session: Session) -> list[Span]:
        self._state.tails.unpack(session)
        return list(session.spans)
