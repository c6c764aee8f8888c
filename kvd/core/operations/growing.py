"""Growing: a session that is being fetched has what of it has come; kvd/session_files asks for it.

Pure. An import stores under a name of its own. Now and then the session is given all that is there,
as by a turn, if nothing is stored of it, or its first tokens, fewer of them:

    nothing ─► growing ─► whole
       │          ├─► not_fetched: the import ends before; what has come stays
       │          └─► changed: a turn stores it, or somebody flushes, ends or cuts it; it is left
       └─► other tokens are stored of it: these stay until the import ends (session_files.py)

Until it is whole it says that it has lost its end (`Session.lost`): whoever else has more of it is
not to take this for all. Where models have states or windows no session grows: what a load ends at
comes last.

Invariant: what a session is given are the first tokens of what is imported, all of them stored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import match_session, runs_of
from kvd.core.records.entries import Span
from kvd.core.records.errors import SessionChangedError
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import Part, StoreLease
from kvd.core.state.session import Session
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

PACE_NS = NS_PER_S // 4  # for which a session has grown before its pace says anything
NOT_FETCHED = "not_fetched"  # why a session has less than was stored: the rest has not come


@dataclass(slots=True, eq=False)
class Growth:
    """How far a session has grown by one import.

    Attributes:
        key: the session that grows.
        source: the name that the import stores under: all of its tokens so far.
        lineage: of these.
        most_tokens: a session that has more before is left alone.
        is_refused: what is stored of the session is of other tokens: it waits for the end.
        spans: that the session was given last; (): none yet.
        first_ns, first_tokens: when it was given some first, and how many.
    """

    key: SessionKey
    source: SessionKey
    lineage: Lineage
    most_tokens: int
    is_refused: bool = False
    spans: Sequence[Span] = ()
    first_ns: int = 0
    first_tokens: int = 0


class Growing:
    """Lets sessions of one cache state grow.

    Args:
        state: the cache's tables.
        publish: makes what is stored a session's.
    """

    def __init__(
        self, state: CacheState, publish: Callable[[StoreLease, Sequence[Part]], None]
    ) -> None:
        self._state = state
        self._publish = publish
        self._growths: dict[SessionKey, Growth] = {}  # by session, each import's that is under way

    def is_growing(self, key: SessionKey) -> bool:
        """Whether a session has what of an import has come, and more is on its way.

        Not if it has changed since, though the import does not know it yet.
        """
        session = self._state.sessions.get(key)
        return key in self._growths and session is not None and session.lost == NOT_FETCHED

    def token_ns(self, key: SessionKey) -> float | None:
        """Return in how long a token of a session that grows has come so far.

        None: nobody knows, or not yet.
        """
        growth, session = self._growths.get(key), self._state.sessions.get(key)
        if growth is None or session is None:
            return None
        num_come = session.num_tokens - growth.first_tokens
        took_ns = self._state.now_ns - growth.first_ns
        if num_come <= 0 or took_ns < PACE_NS:
            return None
        return took_ns / num_come

    def grow(self, growth: Growth, token_ids: bytes) -> bool:
        """Give the session all that the import has stored; returns whether it has that now.

        It costs O(spans), and the first time as much hashing as there is of the session before.

        Args:
            growth: of the import.
            token_ids: of what it has stored, at least.

        Raises:
            SessionChangedError: the session has grown, and is another one by now.
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
        for _, block in parts:  # room for the session must not come from them
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
        """Take that the import is over; `is_whole`: the session has just been given all of it."""
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
        """Raise AssertionError if a session was given anything but the first of what has come."""
        for key, growth in self._growths.items():
            assert growth.key == key, "it is its session's"
            source = self._state.sessions.get(growth.source)
            there = [] if source is None else self._spans(source)  # it may have lost its end
            pairs = zip(growth.spans, there, strict=False)
            assert all(given == stored for given, stored in pairs), "it was given what has come"

    def _may_begin(
        self, growth: Growth, session: Session | None, source: Session, token_ids: bytes
    ) -> bool:
        """Whether the session is not stored, or what is stored of it is less, and of these."""
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
        growth.is_refused = not match.covers(session, runs_of(state, session))
        return not growth.is_refused

    def _check_unchanged(self, growth: Growth, session: Session | None) -> None:
        state, key = self._state, growth.key
        is_ours = session is not None and not session.ended and not state.leases.is_storing(key)
        if session is None or not is_ours or self._spans(session) != growth.spans:
            raise SessionChangedError(
                f"session {key} has changed here meanwhile", "there is nothing to be done: it stays"
            )

    def _spans(self, session: Session) -> list[Span]:
        self._state.tails.unpack(session)
        return list(session.spans)
