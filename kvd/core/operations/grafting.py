"""Grafts: append KV of another session's tokens to a session, without copying it.

Pure. A discard leaves out what stood between two runs of tokens. A graft joins two runs of tokens
of two sessions: a client has edited its conversation, and what follows the edit is the same. Keys
are stored before RoPE, so the spans are valid at their new positions. They were computed over other
tokens; that is the client's choice. The session gets spans on the other session's blocks and counts
as one of their users, so it keeps them when the other session loses them.

What is behind the *seam* is chained to the lineage after the graft, which names both contexts and
the tokens: it is shared only with sessions of the same graft (D5). The graft gives as much as the
other session has without a gap, from the first token on; what follows a gap is missing, as if it
were evicted.

The retry of a turn may repeat a graft: a session that is after it already is left as it is. A store
that was prepared before a graft publishes nothing after it. Grafts are refused where positions are
baked into keys (`coupled`, `naive`), and give nothing where layers have windows.

Cost: O(spans), and digests over the tokens of both contexts.
"""

from collections.abc import Iterator

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.kept_spans import Change, KeptSpans
from kvd.core.operations.matching import (
    Piece,
    match_session,
    match_tokens,
    num_tokens_of,
    slice_tokens,
)
from kvd.core.records.actions import SESSION_GRAFTED
from kvd.core.records.entries import Span
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.graft_source import GraftSource
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey


def graft(
    state: CacheState, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
) -> int:
    """Append KV of another session to a session; see `Sessions.graft` for the contract.

    Args:
        state: the cache's tables.
        key: the session that grows.
        token_ids: all its tokens; they end at the seam.
        lineage: its lineage before the graft.
        source: the other session, its context, and the range of tokens to append.

    Returns:
        How many of the source's tokens follow the seam now; 0: the session has not changed.
    """
    seam = num_tokens_of(token_ids)
    _check(state, key, seam, source)
    session = state.sessions.get(key)
    if session is None or state.layout.window:
        return 0
    state.tails.unpack(session)
    state.touch(session)
    span_ids = slice_tokens(source.token_ids, source.start, source.end)
    after = source.lineage_after(token_ids, lineage)
    chaining = Chaining(state.layout, state.salt_of(key.tenant), lineage)
    stored_end = match_session(state, session, token_ids + span_ids, chaining.under(after)).end
    if stored_end > seam:  # this graft has been applied before
        return stored_end - seam
    own = match_session(state, session, token_ids, chaining)
    if own.end != seam:
        return 0
    kept_spans = KeptSpans(chaining, Change(lineage, after, seam), token_ids, [])
    spans = [span for piece in own.pieces for span in kept_spans.of(piece)]
    given = list(_granted_spans(state, source, chaining.under(after), seam))
    num_given = sum(span.num_tokens for span in given)
    if given:
        session.lineage = after
        _append(state, session, [*spans, *given], num_given)
    return num_given


def _check(state: CacheState, key: SessionKey, seam: int, source: GraftSource) -> None:
    """Raise InvalidRequestError for a graft that no session may have."""
    if state.layout.position_mode != "decoupled":
        raise InvalidRequestError(
            "KV that depends on its positions cannot be used by another session",
            "recompute it, or store keys before RoPE",
        )
    if (key.tenant, key.model) != (source.key.tenant, source.key.model) or key == source.key:
        raise InvalidRequestError(
            f"session {key} cannot use KV of {source.key}",
            "name another session of the same tenant and model",
        )
    num_tokens = num_tokens_of(source.token_ids)
    if not seam or not 0 <= source.start < source.end <= num_tokens:
        raise InvalidRequestError(
            f"tokens [{source.start}, {source.end}) of the source, which has {num_tokens} "
            f"tokens, cannot follow {seam} tokens of session {key}",
            "send a half-open range of the source's tokens, with at least one token of the "
            "session before it",
        )


def _granted_spans(
    state: CacheState, source: GraftSource, after: Chaining, seam: int
) -> Iterator[Span]:
    """Yield spans on the source's tokens, as far as they are stored, to follow the seam."""
    of_source = after.under(source.lineage)
    match = match_tokens(state, source.key, source.token_ids, of_source)
    for piece in match.pieces:
        start, end = max(piece.token_offset, source.start), min(piece.end, source.end)
        if start < end:
            tokens = slice_tokens(source.token_ids, start, end)
            yield Span(
                block_key=piece.span.block_key,
                start=_row(piece, start),
                num_tokens=end - start,
                tokens_digest=after.digest(tokens),
                chain=after.after_discards(seam + end - source.start),
            )


def _row(piece: Piece, token: int) -> int:
    """Return the row of its block that holds a token of a piece."""
    return piece.span.start + token - piece.token_offset


def _append(state: CacheState, session: Session, spans: list[Span], num_given: int) -> None:
    """Make the spans the session's and report the graft."""
    session.num_discards += 1
    state.set_spans(session, spans)
    state.touch(session)
    num_tokens = session.num_tokens
    state.policy.on_resize(session.key, num_tokens)
    state.placement.observe_size(len(spans) * state.layout.block_bytes)
    state.outbox.count("grafts")
    state.outbox.count("grafted_tokens", num_given)
    fields = {"num_grafted": num_given, "num_tokens": num_tokens, "num_spans": len(spans)}
    state.outbox.emit(SESSION_GRAFTED, session.key, fields)
    state.record_move(session.key, MoveKind.GRAFTED, num_tokens=num_given)
