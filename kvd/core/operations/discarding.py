"""Discards: dropping tokens out of a session without touching the KV of the others.

Pure. Keys are stored before RoPE, so the remaining spans stay valid at their new positions (paper
§3.4); in `naive` mode they stay as they are, for the measurement's sake. A span behind the first
discarded token gets a chain key of its own: what is computed after it must never be shared with a
session that did not discard (D5). In `coupled` mode positions are baked in, so only the prefix
before the first discarded token remains, and that is nobody's loss: it is a prefix like any other,
with the states at or before its end.

What is stored may be less than the context that is named: then the discard counts for as much of it
as there is, and the lineage of the tokens says the rest, when the next store comes.

An engine that names the lineage may say the same discard again: a turn that dropped tokens was
cancelled, its retry drops the same ones. A session that is after the discard already, or of other
discards made meanwhile, is left alone: nothing in it is of the context that is named but what lies
before the first dropped token, and that stays in any case. If this kvd does not know its lineage,
it follows from the spans: what lies behind the first dropped token follows from one lineage only.

Cost: O(spans + ranges), and a digest over the tokens.
"""

from collections.abc import Sequence

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import (
    Match,
    match_session,
    num_tokens_of,
    runs_of,
    slice_tokens,
)
from kvd.core.operations.remains import Change, Range, Remains
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
    """Drop ranges of a session's tokens; `Sessions.discard` says what is asked for."""
    num_tokens = num_tokens_of(token_ids)
    merged = _merged(ranges, num_tokens)
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
    runs = runs_of(state, session)
    is_named = lineage is not None
    if is_named and _is_left_alone(session, runs, match, change, is_coupled=is_coupled):
        state.touch(session)
        _outdate_stores(state, key, change)
        kept = _without(token_ids, merged)
        return match_session(state, session, kept, chaining.under(change.after)).end
    if is_coupled:
        merged = [(merged[0][0], num_tokens)]
    remains = Remains(chaining, change, token_ids, merged)
    spans = [span for piece in match.pieces for span in remains.of(piece)]
    if state.stored_parts is not None:  # states and windows of what stays
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
    """Whether a session is not of the context before a discard; see the module docstring."""
    if session.lineage == change.after != change.before:
        return True
    is_other = session.lineage is not None and session.lineage != change.before
    if is_other and is_coupled:  # its tokens may be as they were also behind the first dropped one
        return True
    if match.end > change.first_changed:
        return False
    is_unsure = session.lineage is None or change.after == change.before
    return is_other or (is_unsure and not match.covers(session, runs))


def _outdate_stores(state: CacheState, key: SessionKey, change: Change) -> None:
    """Let stores of the context before a discard publish nothing; O(leases) if there is any."""
    if not state.leases.num_of_session(key) or change.before == change.after:
        return
    for lease in state.leases:
        if isinstance(lease, StoreLease) and lease.key == key and lease.lineage == change.before:
            lease.is_outdated = True


def _without(token_ids: bytes, ranges: Sequence[Range]) -> bytes:
    """Token ids without those in sorted ranges."""
    starts = [0, *(end for _, end in ranges)]
    ends = [*(start for start, _ in ranges), num_tokens_of(token_ids)]
    pieces = zip(starts, ends, strict=True)
    return b"".join(slice_tokens(token_ids, start, end) for start, end in pieces)


def _replace(state: CacheState, session: Session, spans: list[Span]) -> None:
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
    """Return the context's lineage; if a caller names none, as far as the spans say it."""
    if lineage is not None:
        return lineage
    chain = chaining.root
    for piece in match.pieces:
        tokens = slice_tokens(token_ids, piece.token_offset, piece.end)
        if not chaining.follows(piece.span, chain, piece.token_offset, tokens):
            return Lineage(match.chain, piece.token_offset)
        chain = piece.span.chain
    return WHOLE


def _merged(ranges: Sequence[Range], num_tokens: int) -> list[Range]:
    """Sort and join ranges.

    Raises:
        InvalidRequestError: for one that is empty or outside the sequence.
    """
    ordered = sorted(ranges)
    for start, end in ordered:
        if not 0 <= start < end <= num_tokens:
            raise InvalidRequestError(
                f"range [{start}, {end}) is empty or outside the {num_tokens} tokens sent",
                "send half-open ranges of token positions before the discard",
            )
    return join_ranges(ordered)
