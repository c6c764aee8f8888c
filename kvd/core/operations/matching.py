"""Matching: find the longest stored prefix of a token sequence, and plan blocks for what follows.

Pure. The only change it makes is to unpack sessions whose blocks it finds. It matches in two ways,
and the longer match wins:
1. the session's own spans, in order, as long as they hold exactly these tokens, continued along
   the content chain. A plain span is checked by its key, which is computed again from the tokens; a
   span that a discard has touched by the digest of its tokens, and by its chain key if the caller
   names the lineage;
2. the content chain from the root, which finds an equal prefix of another session (a fork).

KV behind a discard differs from KV of the same remaining tokens without it. So a caller that names
the lineage of its tokens gets only KV that was computed after exactly the same discards. (The whole
lineage, without any discard, is a lineage like others.) If it names none, a session with a discard
in it keeps to its own spans: the engine's next store builds on those, and not on the KV that a
fresh computation of the remaining tokens would give.

The chain is followed over full blocks, and over the shorter one that ends at the first discard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvd.core.operations.chaining import Chaining
from kvd.core.records.entries import Span, is_plain, plain_span
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.block_key import TOKEN_BYTES
from shared.types.session_key import SessionKey

UNKNOWN_SESSION = "unknown_session"
DISCARDED = "discarded"  # miss reason: a discard in another context has dropped these tokens


class Piece(NamedTuple):
    """A stored span that holds tokens [token_offset, end) of the sequence."""

    span: Span
    block: Block
    token_offset: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.token_offset + self.span.num_tokens


class PlannedBlock(NamedTuple):
    """A span that a store adds to a session: on an existing block, or on one that needs a slot.

    Attributes:
        span: the span.
        token_ids: its tokens.
        parent: the parent key in its block's key.
        token_offset: position of the first of them.
        block: the existing block; None: it needs a slot.
    """

    span: Span
    token_ids: bytes
    parent: bytes
    token_offset: int
    block: Block | None


class NewParts(NamedTuple):
    """A new state (behind a position) or window (of a block) that a store brings, in parts.

    Attributes:
        start: the state's position, or the window's first token.
        num_tokens: number of tokens that the window covers; 0: it is a state.
        spans: the spans of its parts.
    """

    start: int
    num_tokens: int
    spans: Sequence[Span]


class StorePlan(NamedTuple):
    """The spans that a session will have after a store.

    Attributes:
        from_token: position from which the engine has KV.
        base: stored KV that the store builds on.
        planned: the blocks of all tokens behind the base.
    """

    from_token: int
    base: list[Piece]
    planned: list[PlannedBlock]

    @property
    def num_new(self) -> int:
        """Number of planned blocks that do not exist yet."""
        return sum(new.block is None for new in self.planned)


@dataclass(frozen=True, slots=True)
class Match:
    """The stored prefix of a token sequence.

    Attributes:
        pieces: its spans, in token order, without gaps.
        chain: parent key of the next block.
        miss_reason: why it ends there; see LoadAnswer.
    """

    pieces: list[Piece]
    chain: bytes
    miss_reason: str

    @property
    def end(self) -> int:
        """Number of tokens stored."""
        return self.pieces[-1].end if self.pieces else 0

    def covers(self, session: Session, spans: Sequence[Span]) -> bool:
        """Whether the match contains all token spans of the session (`spans`); none is packed."""
        if session.packed or len(self.pieces) < len(spans):
            return False
        return all(p.span == span for p, span in zip(self.pieces, spans, strict=False))


def num_tokens_of(token_ids: bytes) -> int:
    """Return the number of tokens in little-endian uint32 bytes.

    Raises:
        InvalidRequestError: the bytes are not whole uint32 values.
    """
    if len(token_ids) % TOKEN_BYTES:
        raise InvalidRequestError(
            f"token_ids has {len(token_ids)} bytes, which is not a multiple of 4",
            "send little-endian uint32 values, 4 bytes a token",
        )
    return len(token_ids) // TOKEN_BYTES


def check_from_token(from_token: int, num_tokens: int) -> None:
    """Raise InvalidRequestError unless the position lies in the sequence."""
    if not 0 <= from_token <= num_tokens:
        raise InvalidRequestError(
            f"from_token {from_token} is outside the {num_tokens} tokens sent",
            "send all tokens of the context, from its first one on",
        )


def slice_tokens(token_ids: bytes, start: int, end: int) -> bytes:
    """Return the bytes of token ids [start, end)."""
    return token_ids[start * TOKEN_BYTES : end * TOKEN_BYTES]


def match_session(
    state: CacheState, session: Session, token_ids: bytes, chaining: Chaining
) -> Match:
    """Match the session's own spans.

    Costs a digest per span, except for whole blocks in DRAM whose keys were computed before: their
    token ids are compared.
    """
    num_tokens = len(token_ids) // TOKEN_BYTES
    pieces: list[Piece] = []
    chain = chaining.root
    offset = 0
    reason = session.lost or "not_stored"
    is_whole = chaining.lineage.is_whole  # so a parent key is the chain key before it
    for span in _spans(state, session):
        end = offset + span.num_tokens
        if end > num_tokens:
            break
        tokens = token_ids[offset * TOKEN_BYTES : end * TOKEN_BYTES]
        block = state.blocks.get(span.block_key)  # None: it is packed
        is_known = (
            is_whole
            and block is not None
            and block.parent == chain
            and block.token_ids == tokens
            and is_plain(span)
        )
        if not is_known and not chaining.holds(span, chain, offset, tokens):
            reason = "tokens_differ"
            break
        if block is None:
            block = state.find_block(span.block_key)
            assert block is not None, "a session's blocks are there"
        if is_whole and is_plain(span):
            block.parent = chain
        pieces.append(Piece(span, block, offset))
        chain, offset = span.chain, end
    return Match(pieces, chain, reason)


def _spans(state: CacheState, session: Session) -> Iterator[Span]:
    """Yield a session's spans, and unpack it only if the caller goes beyond its first packed span.

    Sessions with states or windows are unpacked in any case; spans of parts are left out.
    """
    if state.stored_parts is not None:
        state.tails.unpack(session)
        yield from token_spans(state, session)
        return
    num_spans = len(session.spans)
    yield from session.spans
    if not session.packed:
        return
    yield next(session.tail_spans())
    state.tails.unpack(session)
    yield from session.spans[num_spans + 1 :]


def token_spans(state: CacheState, session: Session) -> Sequence[Span]:
    """Return the unpacked spans of a session that have tokens, that is, without spans of parts."""
    if state.stored_parts is None:
        return session.spans
    return [span for span in session.spans if span.num_tokens]


def match_tokens(state: CacheState, key: SessionKey, token_ids: bytes, chaining: Chaining) -> Match:
    """Return the longest stored prefix of the tokens; O(tokens) hashing."""
    session = state.sessions.get(key)
    own = (
        match_session(state, session, token_ids, chaining)
        if session
        else Match([], chaining.root, _removal_reason(state, key))
    )
    own = _extend(state, chaining, own, token_ids)
    if own.end == len(token_ids) // TOKEN_BYTES or not own.pieces:
        return own
    if not chaining.is_named and any(p.span.chain != p.span.block_key for p in own.pieces):
        return own
    on_chain = _on_chain(own.pieces, chaining)
    if len(on_chain) == len(own.pieces):  # the chain from the root would lead to the same blocks
        return own
    chain = on_chain[-1].span.chain if on_chain else chaining.root
    shared = _extend(state, chaining, Match(on_chain, chain, own.miss_reason), token_ids)
    return own if own.end >= shared.end else shared


def find_miss_reason(state: CacheState, match: Match, token_ids: bytes, chaining: Chaining) -> str:
    """Return why nothing is stored beyond a match; O(1): a hash of the next block's tokens."""
    end = min(chaining.end_of_block(match.end), len(token_ids) // TOKEN_BYTES)
    tokens = slice_tokens(token_ids, match.end, end)
    is_discarded = chaining.key(match.chain, match.end, tokens) in state.discarded
    return DISCARDED if is_discarded else match.miss_reason


def _removal_reason(state: CacheState, key: SessionKey) -> str:
    """Return why a session is not stored (any more), as far as its history is remembered."""
    removal = state.history.removal(key)
    if removal is None:
        return UNKNOWN_SESSION
    return removal.why if removal.kind is MoveKind.DROPPED else removal.kind.value


def _on_chain(pieces: list[Piece], chaining: Chaining) -> list[Piece]:
    """Return the first pieces of a match to which the content chain from the root leads, too."""
    for index, (span, _, offset) in enumerate(pieces):
        is_discarded = not is_plain(span) or span.block_key != span.chain
        if is_discarded or offset + span.num_tokens != chaining.end_of_block(offset):
            return pieces[:index]
    return pieces


def _extend(state: CacheState, chaining: Chaining, match: Match, token_ids: bytes) -> Match:
    """Continue a match along the content chain."""
    pieces = [*match.pieces, *_follow_chain(state, chaining, match, token_ids)]
    chain = pieces[-1].span.chain if pieces else match.chain
    return Match(pieces, chain, match.miss_reason)


def _follow_chain(
    state: CacheState, chaining: Chaining, match: Match, token_ids: bytes
) -> Iterator[Piece]:
    """Yield the stored blocks that continue a match along the content chain."""
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
    """Return the stored pieces that a store keeps; it replaces a partial block at their end.

    The partial block is kept if the engine does not have all its tokens to store them again
    (`from_token`). With states every context returns to full blocks where it can, because other
    sessions find its states by the keys of full blocks.
    """
    if not pieces or pieces[-1].end == num_tokens:
        return pieces
    last = pieces[-1]
    is_partial = last.end < chaining.end_of_block(last.token_offset)
    # A span behind a discard stays: its block was computed before the discard, what follows was
    # not, and equal keys must mean equal computation.
    is_plain = last.span.start == 0 and last.span.chain == last.span.block_key
    is_replaced = is_plain or bool(state.layout.state_bytes)
    if is_partial and is_replaced and from_token <= last.token_offset:
        return pieces[:-1]
    return pieces


def plan_blocks(
    state: CacheState, chaining: Chaining, token_ids: bytes, base: list[Piece]
) -> list[PlannedBlock]:
    """Plan the blocks of all tokens behind the base; the last one may be partial."""
    chain = base[-1].span.chain if base else chaining.root
    offset = base[-1].end if base else 0
    num_tokens = num_tokens_of(token_ids)
    planned = []
    while offset < num_tokens:
        end = min(chaining.end_of_block(offset), num_tokens)
        tokens = slice_tokens(token_ids, offset, end)
        parent = chaining.parent(chain, offset)
        chain = chaining.key(chain, offset, tokens)
        span = plain_span(chain, end - offset)
        planned.append(PlannedBlock(span, tokens, parent, offset, state.find_block(chain)))
        offset = end
    return planned
