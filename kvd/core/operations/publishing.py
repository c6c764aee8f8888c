"""Publishing: make stored blocks a session's, which counts as a use of the session.

Pure. Where a model has states or windows, the session gets those of its tokens that it is to keep,
whichever session has stored them, and loses those that newer ones supersede.
"""

from collections.abc import Sequence

from kvd.core.io.placement import Placement
from kvd.core.io.verifying import Hasher
from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import match_tokens, num_tokens_of, token_spans
from kvd.core.operations.state_matching import StateChain, spans_with_states
from kvd.core.operations.window_matching import spans_with_windows
from kvd.core.records.actions import SESSION_STORED
from kvd.core.records.entries import Span
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import Part, StoreLease
from kvd.core.state.session import Session
from shared.types.lineage import WHOLE
from shared.types.session_key import SessionKey


class Publisher:
    """Gives stored blocks to sessions of one cache state.

    Args:
        state: the cache's tables.
        placement: makes room for another session.
        hasher: requests that new blocks are hashed, and then written.
    """

    def __init__(self, state: CacheState, placement: Placement, hasher: Hasher) -> None:
        self._state = state
        self._placement = placement
        self._hasher = hasher

    def adopt(self, key: SessionKey, token_ids: bytes) -> Session | None:
        """Make a session of stored whole blocks: of all these tokens, or of none.

        It counts as a use of the session, but not as a turn.

        Returns:
            The session; None if some tokens are not stored, or there is no room for it.
        """
        state = self._state
        chaining = Chaining(state.layout, state.salt_of(key.tenant), WHOLE)
        match = match_tokens(state, key, token_ids, chaining)
        if match.end < num_tokens_of(token_ids):
            return None
        blocks = [piece.block for piece in match.pieces]
        for block in blocks:  # room for the session must not come from them
            block.holders += 1
        lease = StoreLease(0, 0, key, token_ids=token_ids, lineage=WHOLE)
        session = self._give(lease, [piece.span for piece in match.pieces])
        for block in blocks:
            block.holders -= 1
            state.settle(block)
        return session

    def publish(self, lease: StoreLease, parts: Sequence[Part]) -> None:
        """Make the parts the session's spans, and request the hashing of its new blocks.

        The session is created if it is not stored.
        """
        state, key = self._state, lease.key
        session = self._give(lease, [span for span, _ in parts])
        if session is None:
            return
        state.outbox.count("stores")
        num_tokens, num_blocks = session.num_tokens, len(session.spans)
        state.policy.on_resize(key, num_tokens)
        state.placement.observe_size(num_blocks * state.layout.block_bytes)
        fields = {"num_tokens": num_tokens, "num_blocks": num_blocks}
        state.outbox.emit(SESSION_STORED, key, fields)
        self._hasher.request([state.blocks[block_key] for block_key in session.block_keys()])

    def _give(self, lease: StoreLease, runs: Sequence[Span]) -> Session | None:
        """Give a session these token spans, creating it if needed, and record a use of it.

        The states or windows that it is to keep, new or stored already, are put among its spans.

        Returns:
            The session; None if it is not stored and there is no room for another one.
        """
        state, key = self._state, lease.key
        session = state.sessions.get(key)
        if not runs or (session is None and not self._has_room_for_session()):
            return None
        if session is None:
            session = Session(key, state.now_ns)
            state.add_session(session)
        state.tails.unpack(session)
        there = token_spans(state, session)
        if there[: len(runs)] != runs:
            session.lost = ""
            there = runs
            if state.stored_parts is None:
                state.set_spans(session, runs)
        if state.stored_parts is not None:
            spans = self._with_parts(lease, session, there)
            if spans != session.spans:
                state.set_spans(session, spans)
        if lease.lineage is not None and len(there) == len(runs):
            session.lineage = lease.lineage
        state.touch(session)
        state.outbox.index.put_use(key, state.now_ns)
        return session

    def _with_parts(self, lease: StoreLease, session: Session, runs: Sequence[Span]) -> list[Span]:
        """Return the session's token spans with the states or windows that it is to keep."""
        state = self._state
        new = [span for span, part in lease.side_parts if isinstance(part, Block)]
        if state.layout.window:
            return spans_with_windows(state, session, runs, new, lease.load_ends)
        chaining = Chaining(state.layout, state.salt_of(lease.key.tenant), lease.lineage)
        chain = StateChain(chaining, state.layout.block_tokens, lease.token_ids)
        return spans_with_states(state, lease.key, runs, chain, new)

    def _has_room_for_session(self) -> bool:
        state = self._state
        return len(state.sessions) < state.limits.max_sessions or self._placement.drop_victim()
