"""Discards: drop token ranges from a session without touching the KV of the remaining tokens.

Pure. Keys are stored before RoPE, so the remaining spans stay valid at their new positions (paper
§3.4); in `naive` mode they stay as they are, for measurements. A span behind the first discarded
token gets a chain key of its own: KV that is computed after it must never be shared with a session
that did not discard (D5). In `coupled` mode positions are baked in, so only the prefix before the
first discarded token remains. That prefix is like any other: it keeps the states at or before its
end.

Fewer tokens may be stored than the context has that the engine names. Then the discard applies to
the stored ones; the lineage that the next store names covers the others.

An engine that names the lineage may repeat a discard: a turn that dropped tokens was cancelled, and
its retry drops the same ones. A session that already is after this discard, or after other discards
made meanwhile, is left as it is: it shares with the named context only what lies before the first
dropped token, and that stays in any case. If this kvd does not know the session's lineage, the
spans tell: what lies behind the first dropped token follows from one lineage only.

Cost: O(spans + ranges), and a digest over the tokens.
"""

from collections.abc import Sequence

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.kept_spans import Change, KeptSpans, Range
from kvd.core.operations.matching import (
    Match,
    match_session,
    num_tokens_of,
    slice_tokens,
    token_spans,
)
from kvd.core.records.actions import SESSION_DISCARDED
from kvd.core.records.entries import Span
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import StoreLease
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from kvd.core.state.stored_parts import group_parts, interleave
from shared.types.lineage import WHOLE, Lineage, join_ranges
from shared.types.session_key import SessionKey


def discard(
    state: CacheState,
    key: SessionKey,
    token_ids: bytes,
    ranges: Sequence[Range],
    lineage: Lineage | None,
) -> int:
    """Drop ranges of a session's tokens; see `Sessions.discard` for the contract.

    Args:
        state: the cache's tables.
        key: the session.
        token_ids: all tokens of its context before the discard.
        ranges: half-open ranges of token positions in `token_ids`.
        lineage: the context's lineage before the discard; None: not named.

    Returns:
        Stored tokens of what the discard leaves, contiguous from the first kept one.
    """
    num_tokens = num_tokens_of(token_ids)
    merged = _merge(ranges, num_tokens)
    session = state.sessions.get(key)
    if session is None:
        return 0
    if not merged:
        return session.num_tokens
    state.tails.unpack(session)
    chaining = Chaining(state.layout, state.salt_of(key.tenant), lineage)
    match = match_session(state, session, token_ids, chaining)
    before = _lineage_before(chaining, lineage, match, token_ids)
    change = Change(before, before.after(token_ids, merged), merged[0][0])
    is_coupled = state.layout.position_mode == "coupled"
    runs = token_spans(state, session)
    is_named = lineage is not None
    if is_named and _is_left_alone(session, runs, match, change, is_coupled=is_coupled):
        state.touch(session)
        _outdate_stores(state, key, change)
        kept = _drop_ranges(token_ids, merged)
        return match_session(state, session, kept, chaining.under(change.after)).end
    if is_coupled:
        merged = [(merged[0][0], num_tokens)]
    kept_spans = KeptSpans(chaining, change, token_ids, merged)
    spans = [span for piece in match.pieces for span in kept_spans.of(piece)]
    if state.stored_parts is not None:  # put back the states and windows of the kept tokens
        spans = interleave(spans, group_parts(session.spans).values())
    session.num_discards += 1
    session.load_ends = ()  # the tokens are at other positions
    session.lineage = change.after
    state.outbox.count("discards")
    state.discarded.before_discard(session, spans)
    if not spans:
        state.outbox.count("discarded_tokens", session.num_tokens)
        state.cut(session, 0, "discarded")
        return 0
    if spans != session.spans:
        _replace(state, session, spans)
    state.touch(session)
    return session.num_tokens


def _is_left_alone(
    session: Session, runs: Sequence[Span], match: Match, change: Change, *, is_coupled: bool
) -> bool:
    """Whether a session does not have the context before a discard; see the module docstring."""
    if session.lineage == change.after != change.before:
        return True
    is_other = session.lineage is not None and session.lineage != change.before
    if is_other and is_coupled:  # its tokens may still match beyond the first dropped one
        return True
    if match.end > change.first_changed:
        return False
    is_unsure = session.lineage is None or change.after == change.before
    return is_other or (is_unsure and not match.covers(session, runs))


def _outdate_stores(state: CacheState, key: SessionKey, change: Change) -> None:
    """Make stores of the context before a discard publish nothing; O(leases) if there are any."""
    if not state.leases.num_of_session(key) or change.before == change.after:
        return
    for lease in state.leases:
        if isinstance(lease, StoreLease) and lease.key == key and lease.lineage == change.before:
            lease.is_outdated = True


def _drop_ranges(token_ids: bytes, ranges: Sequence[Range]) -> bytes:
    """Return token ids without those in the sorted ranges."""
    starts = [0, *(end for _, end in ranges)]
    ends = [*(start for start, _ in ranges), num_tokens_of(token_ids)]
    pieces = zip(starts, ends, strict=True)
    return b"".join(slice_tokens(token_ids, start, end) for start, end in pieces)


def _replace(state: CacheState, session: Session, spans: list[Span]) -> None:
    """Make the spans the session's and report the discard."""
    num_before = session.num_tokens
    state.set_spans(session, spans)
    num_tokens = session.num_tokens
    state.policy.on_resize(session.key, num_tokens)
    num_dropped = num_before - num_tokens
    state.outbox.count("discarded_tokens", num_dropped)
    fields = {"num_dropped": num_dropped, "num_tokens": num_tokens, "num_spans": len(spans)}
    state.outbox.emit(SESSION_DISCARDED, session.key, fields)
    state.record_move(session.key, MoveKind.DISCARDED, num_tokens=num_dropped)


def _lineage_before(
    chaining: Chaining, lineage: Lineage | None, match: Match, token_ids: bytes
) -> Lineage:
    """Return the context's lineage; if the caller names none, derive it from the spans."""
    if lineage is not None:
        return lineage
    chain = chaining.root
    for piece in match.pieces:
        tokens = slice_tokens(token_ids, piece.token_offset, piece.end)
        if not chaining.follows(piece.span, chain, piece.token_offset, tokens):
            return Lineage(match.chain, piece.token_offset)
        chain = piece.span.chain
    return WHOLE


def _merge(ranges: Sequence[Range], num_tokens: int) -> list[Range]:
    """Return the ranges sorted, with adjacent and overlapping ones joined.

    Raises:
        InvalidRequestError: a range is empty or outside the sequence.
    """
    ordered = sorted(ranges)
    for start, end in ordered:
        if not 0 <= start < end <= num_tokens:
            raise InvalidRequestError(
                f"range [{start}, {end}) is empty or outside the {num_tokens} tokens sent",
                "send half-open ranges of token positions before the discard",
            )
    return join_ranges(ordered)
