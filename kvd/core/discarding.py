"""Discards: dropping tokens out of a session without touching the KV of the others.

Pure. Keys are stored before RoPE, so the remaining spans stay valid at their new positions (paper
§3.4). A span at or behind the first discarded token gets a chain key of its own: what is computed
after it must never be shared with a session that did not discard (D5). In `coupled` mode positions
are baked in, so only the prefix before the first discarded token remains.
"""

from collections.abc import Sequence

from kvd.core.errors import InvalidRequestError
from kvd.core.matching import Piece, match_session, num_tokens_of, slice_tokens
from kvd.core.records import Span
from kvd.core.state import CacheState
from shared.block_key import discard_key, tokens_digest
from shared.session_key import SessionKey

Range = tuple[int, int]  # half-open, in token positions before the discard


def discard(state: CacheState, key: SessionKey, token_ids: bytes, ranges: Sequence[Range]) -> int:
    """See CacheEngine.discard."""
    merged = _merged(ranges, num_tokens_of(token_ids))
    session = state.sessions.get(key)
    if session is None:
        return 0
    state.unfold(session)
    pieces = match_session(state, session, token_ids).pieces
    salt = state.salt_of(key.tenant)
    if state.layout.position_mode == "coupled" and merged:
        merged = [(merged[0][0], max(merged[-1][1], num_tokens_of(token_ids)))]
    spans = [span for piece in pieces for span in _remains(salt, piece, merged, token_ids)]
    if not spans:
        state.cut(session, 0, "discarded")
        return 0
    state.set_spans(session, spans)
    state.touch(session)
    return session.num_tokens


def _merged(ranges: Sequence[Range], num_tokens: int) -> list[Range]:
    """Sort and join ranges.

    Raises:
        InvalidRequestError: for one that is empty or outside the sequence.
    """
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if not 0 <= start < end <= num_tokens:
            raise InvalidRequestError(
                f"range [{start}, {end}) is empty or outside the {num_tokens} tokens sent",
                "send half-open ranges of token positions before the discard",
            )
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _remains(salt: bytes, piece: Piece, ranges: list[Range], token_ids: bytes) -> list[Span]:
    """What the ranges leave of one piece."""
    if not ranges or piece.end <= ranges[0][0]:
        return [piece.span]
    kept = []
    start = piece.token_offset
    for range_start, range_end in [*ranges, (piece.end, piece.end)]:
        end = min(range_start, piece.end)
        if start < end:
            kept.append((start, end))
        start = max(start, range_end)
    return [
        Span(
            block_key=piece.span.block_key,
            start=piece.span.start + start - piece.token_offset,
            num_tokens=end - start,
            tokens_digest=tokens_digest(slice_tokens(token_ids, start, end)),
            # the last pair says where the span ends: two spans of one block have different
            # successors
            chain=discard_key(salt, piece.span.chain, [*ranges, (end, end)]),
        )
        for start, end in kept
    ]
