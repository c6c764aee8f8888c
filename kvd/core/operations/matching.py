"""How much of a token sequence is stored, and in which blocks; and which blocks the rest is to be.

Pure; changes nothing but that it unpacks the sessions whose blocks it finds. Two ways, the longer
wins:
1. the session's own spans, in order, as long as they hold these very tokens, and then on along the
   content chain. A plain span proves it by its key, which is computed anew from the tokens; what a
   discard has touched, by a digest, and by its chain if the caller names the lineage of its tokens;
2. the content chain from the root: another session's equal prefix, a fork.

What follows a discard is another computation than the same tokens without it. A caller that names
the lineage of its tokens is given what was computed after the very same discards, and nothing else;
that nothing was ever discarded is a lineage, too. If it names none, a session with a discard in it
keeps to its own spans: what its engine stores next builds on those, not on what a fresh computation
of the remaining tokens would be.

The chain is followed over full blocks, and over the one that ends where the clean tokens do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvd.core.operations.chaining import Chaining
from kvd.core.records.entries import Span, plain_span
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.block_key import TOKEN_BYTES
from shared.types.session_key import SessionKey

UNKNOWN_SESSION = "unknown_session"
DISCARDED = "discarded"  # why tokens are missed that a discard has taken from another context


class Piece(NamedTuple):
    """A span that holds tokens [token_offset, end) of the sequence."""

    span: Span
    block: Block
    token_offset: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.token_offset + self.span.num_tokens


class PlannedBlock(NamedTuple):
    """A span that a session is to have: on an existing block, or on one that needs a slot."""

    span: Span
    token_ids: bytes
    token_offset: int
    block: Block | None


class NewParts(NamedTuple):
    """What a store is to bring in parts: a state behind a position, or the window of a block.

    Attributes:
        start: the state's position; the first token of which the window is.
        num_tokens: of which it is; 0: a state.
        spans: of its parts.
    """

    start: int
    num_tokens: int
    spans: Sequence[Span]


class StorePlan(NamedTuple):
    """What a store is to make of a session.

    Attributes:
        from_token: the engine has KV from here on.
        base: stored KV that it builds on.
        planned: blocks of everything behind that.
    """

    from_token: int
    base: list[Piece]
    planned: list[PlannedBlock]

    @property
    def num_new(self) -> int:
        """How many blocks of tokens are not there."""
        return sum(new.block is None for new in self.planned)


@dataclass(frozen=True, slots=True)
class Match:
    """The stored prefix of a sequence."""

    pieces: list[Piece]
    chain: bytes  # parent key of what follows
    miss_reason: str  # why it ends there; see LoadAnswer

    @property
    def end(self) -> int:
        """Number of tokens stored."""
        return self.pieces[-1].end if self.pieces else 0

    def covers(self, session: Session, spans: Sequence[Span]) -> bool:
        """Whether it goes through all that the session has: these runs of tokens."""
        if session.packed or len(self.pieces) < len(spans):
            return False
        return all(p.span == span for p, span in zip(self.pieces, spans, strict=False))


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


def match_session(
    state: CacheState, session: Session, token_ids: bytes, chaining: Chaining
) -> Match:
    """Match the session's own spans: O(tokens matched) hashing, one digest a span."""
    num_tokens = len(token_ids) // TOKEN_BYTES
    pieces: list[Piece] = []
    chain = chaining.root
    offset = 0
    reason = session.lost or "not_stored"
    for span in _spans(state, session):
        end = offset + span.num_tokens
        if end > num_tokens:
            break
        if not chaining.holds(span, chain, offset, slice_tokens(token_ids, offset, end)):
            reason = "tokens_differ"
            break
        block = state.find_block(span.block_key)
        assert block is not None, "a session's blocks are there"
        pieces.append(Piece(span, block, offset))
        chain, offset = span.chain, end
    return Match(pieces, chain, reason)


def _spans(state: CacheState, session: Session) -> Iterator[Span]:
    """Return a session's spans, unpacked only if its first packed one is what was looked for.

    Where sessions have states or windows they are unpacked in any case, and parts are left out.
    """
    if state.stored_parts is not None:
        state.tails.unpack(session)
        yield from runs_of(state, session)
        return
    num_spans = len(session.spans)
    yield from session.spans
    if not session.packed:
        return
    yield next(session.tail_spans())
    state.tails.unpack(session)
    yield from session.spans[num_spans + 1 :]


def runs_of(state: CacheState, session: Session) -> Sequence[Span]:
    """Return the spans of a session that have tokens, as far as they are not packed."""
    if state.stored_parts is None:
        return session.spans
    return [span for span in session.spans if span.num_tokens]


def match_tokens(state: CacheState, key: SessionKey, token_ids: bytes, chaining: Chaining) -> Match:
    """Find the longest stored prefix; O(tokens) hashing."""
    session = state.sessions.get(key)
    own = (
        match_session(state, session, token_ids, chaining)
        if session
        else Match([], chaining.root, _why_gone(state, key))
    )
    own = _extended(state, chaining, own, token_ids)
    if own.end == len(token_ids) // TOKEN_BYTES or not own.pieces:
        return own
    is_discarded = any(piece.span.chain != piece.span.block_key for piece in own.pieces)
    if is_discarded and not chaining.is_named:
        return own
    shared = _extended(state, chaining, Match([], chaining.root, own.miss_reason), token_ids)
    return own if own.end >= shared.end else shared


def why_missed(state: CacheState, match: Match, token_ids: bytes, chaining: Chaining) -> str:
    """Say why a sequence is not stored beyond a match: O(1), a hash of the next block's tokens."""
    end = min(chaining.end_of_block(match.end), len(token_ids) // TOKEN_BYTES)
    tokens = slice_tokens(token_ids, match.end, end)
    is_discarded = chaining.key(match.chain, match.end, tokens) in state.discarded
    return DISCARDED if is_discarded else match.miss_reason


def _why_gone(state: CacheState, key: SessionKey) -> str:
    """Say why a session is not stored, as far as it is known to have been."""
    removal = state.history.removal(key)
    if removal is None:
        return UNKNOWN_SESSION
    return removal.why if removal.kind is MoveKind.DROPPED else removal.kind.value


def _extended(state: CacheState, chaining: Chaining, match: Match, token_ids: bytes) -> Match:
    pieces = [*match.pieces, *_follow_chain(state, chaining, match, token_ids)]
    chain = pieces[-1].span.chain if pieces else match.chain
    return Match(pieces, chain, match.miss_reason)


def _follow_chain(
    state: CacheState, chaining: Chaining, match: Match, token_ids: bytes
) -> Iterator[Piece]:
    chain, offset = match.chain, match.end
    while (end := chaining.end_of_block(offset)) * TOKEN_BYTES <= len(token_ids):
        chain = chaining.key(chain, offset, slice_tokens(token_ids, offset, end))
        block = state.find_block(chain)
        if block is None:
            return
        yield Piece(plain_span(chain, end - offset), block, offset)
        offset = end


def kept_pieces(
    state: CacheState, pieces: list[Piece], from_token: int, num_tokens: int, chaining: Chaining
) -> list[Piece]:
    """Choose the stored pieces that a store builds on: a partial block at the end is replaced.

    It is, unless its tokens are not all there to be stored again (`from_token`). With states every
    context goes back to full blocks where it can: others find its states by them.
    """
    if not pieces or pieces[-1].end == num_tokens:
        return pieces
    last = pieces[-1]
    is_partial = last.end < chaining.end_of_block(last.token_offset)
    # A span behind a discard stays: its block was computed before it, what follows was not
    # (equal keys must mean equal computation).
    is_plain = last.span.start == 0 and last.span.chain == last.span.block_key
    is_replaced = is_plain or bool(state.layout.state_bytes)
    if is_partial and is_replaced and from_token <= last.token_offset:
        return pieces[:-1]
    return pieces


def plan_blocks(
    state: CacheState, chaining: Chaining, token_ids: bytes, base: list[Piece]
) -> list[PlannedBlock]:
    """Name the blocks of everything behind the pieces, the last one perhaps partial."""
    chain = base[-1].span.chain if base else chaining.root
    offset = base[-1].end if base else 0
    num_tokens = num_tokens_of(token_ids)
    planned = []
    while offset < num_tokens:
        end = min(chaining.end_of_block(offset), num_tokens)
        tokens = slice_tokens(token_ids, offset, end)
        chain = chaining.key(chain, offset, tokens)
        span = plain_span(chain, end - offset)
        planned.append(PlannedBlock(span, tokens, offset, state.find_block(chain)))
        offset = end
    return planned
