"""How much of a token sequence is stored, and in which blocks.

Pure; changes nothing but that it unfolds the sessions whose blocks it finds. Two ways, the longer
wins:
1. the session's own spans, in order, as long as they hold these very tokens, and then on along the
   content chain. A plain span proves it by its key, which is computed anew from the tokens; what a
   discard has touched, by a digest;
2. the content chain from the root: another session's equal prefix, a fork. Not for a session with a
   discard in it: its KV was computed from tokens that are gone, and what its engine stores next
   builds on that, not on what a fresh computation of the remaining tokens would be.

The chain is followed over full blocks only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvd.core.block import Block
from kvd.core.errors import InvalidRequestError
from kvd.core.packing import is_plain, plain_span
from kvd.core.records import Span
from kvd.core.session import Session
from kvd.core.state import CacheState
from shared.block_key import TOKEN_BYTES, block_key, root_key, tokens_digest
from shared.session_key import SessionKey


@dataclass(frozen=True, slots=True)
class Piece:
    """A span that holds tokens [token_offset, end) of the sequence."""

    span: Span
    block: Block
    token_offset: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.token_offset + self.span.num_tokens


@dataclass(frozen=True, slots=True)
class Match:
    """The stored prefix of a sequence."""

    pieces: list[Piece]
    chain: bytes  # parent key of what follows
    miss_reason: str  # why it does not go on; see LoadAnswer

    @property
    def end(self) -> int:
        """Number of tokens stored."""
        return self.pieces[-1].end if self.pieces else 0


def num_tokens_of(token_ids: bytes) -> int:
    """Count the tokens.

    Raises:
        InvalidRequestError: if the bytes are not whole uint32 values.
    """
    if len(token_ids) % TOKEN_BYTES:
        raise InvalidRequestError(
            f"token_ids has {len(token_ids)} bytes",
            "send little-endian uint32 values, 4 bytes a token",
        )
    return len(token_ids) // TOKEN_BYTES


def check_from_token(from_token: int, num_tokens: int) -> None:
    """Raise InvalidRequestError unless the position lies in the sequence."""
    if not 0 <= from_token <= num_tokens:
        raise InvalidRequestError(
            f"from_token {from_token} is outside the {num_tokens} tokens sent",
            "send all tokens from the first one on",
        )


def slice_tokens(token_ids: bytes, start: int, end: int) -> bytes:
    """Token ids [start, end)."""
    return token_ids[start * TOKEN_BYTES : end * TOKEN_BYTES]


def match_session(state: CacheState, session: Session, token_ids: bytes) -> Match:
    """Match the session's own spans: O(tokens matched) hashing, one digest a span."""
    num_tokens = len(token_ids) // TOKEN_BYTES
    salt = state.salt_of(session.key.tenant)
    pieces: list[Piece] = []
    chain = root_key(salt, state.layout.fingerprint)
    offset = 0
    reason = session.lost or "not_stored"
    for span in _spans(state, session):
        end = offset + span.num_tokens
        if end > num_tokens:
            break
        if not _holds(span, salt, chain, slice_tokens(token_ids, offset, end)):
            reason = "tokens_differ"
            break
        block = state.find_block(span.block_key)
        assert block is not None, "a session's blocks are there"
        pieces.append(Piece(span, block, offset))
        chain, offset = span.chain, end
    return Match(pieces, chain, reason)


def _spans(state: CacheState, session: Session) -> Iterator[Span]:
    """A session's spans; it is unfolded only if its first folded one is what was looked for."""
    num_spans = len(session.spans)
    yield from session.spans
    if not session.folded:
        return
    yield next(session.tail_spans())
    state.unfold(session)
    yield from session.spans[num_spans + 1 :]


def _holds(span: Span, salt: bytes, chain: bytes, tokens: bytes) -> bool:
    """Whether the span holds these very tokens, computed after the chain."""
    if is_plain(span):
        return block_key(salt, chain, tokens) == span.block_key
    return tokens_digest(tokens) == span.tokens_digest


def match_tokens(state: CacheState, key: SessionKey, token_ids: bytes) -> Match:
    """Find the longest stored prefix; O(tokens) hashing."""
    salt = state.salt_of(key.tenant)
    root = root_key(salt, state.layout.fingerprint)
    session = state.sessions.get(key)
    own = (
        match_session(state, session, token_ids) if session else Match([], root, "unknown_session")
    )
    own = _extended(state, salt, own, token_ids)
    is_discarded = any(piece.span.chain != piece.span.block_key for piece in own.pieces)
    if own.end == len(token_ids) // TOKEN_BYTES or not own.pieces or is_discarded:
        return own
    shared = _extended(state, salt, Match([], root, own.miss_reason), token_ids)
    return own if own.end >= shared.end else shared


def _extended(state: CacheState, salt: bytes, match: Match, token_ids: bytes) -> Match:
    pieces = [*match.pieces, *_follow_chain(state, salt, match, token_ids)]
    chain = pieces[-1].span.chain if pieces else match.chain
    return Match(pieces, chain, match.miss_reason)


def _follow_chain(
    state: CacheState, salt: bytes, match: Match, token_ids: bytes
) -> Iterator[Piece]:
    step = state.layout.block_tokens
    parent = match.chain
    for offset in range(match.end, len(token_ids) // TOKEN_BYTES - step + 1, step):
        tokens = slice_tokens(token_ids, offset, offset + step)
        parent = block_key(salt, parent, tokens)
        block = state.find_block(parent)
        if block is None:
            return
        yield Piece(plain_span(parent, step), block, offset)
