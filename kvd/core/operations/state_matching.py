"""State matching: find the stored states of a token sequence, and choose those a session keeps.

Pure. The only change it makes is to unpack sessions. A state's key follows from the tokens before
it alone: from the chain over the full blocks, and the ids behind these. So every session that
begins with these tokens leads to the same states, wherever its own blocks begin and end.

A state also proves that its tokens are stored: its session has them. So a load that ends at a state
finds KV up to there even where the loading session has none, or where the state's session continues
the block with other tokens: then only the first rows of that block are loaded.

A session keeps its first state (at the end of the common beginning of conversations), its newest
two (the next turn continues from there), and those that other sessions share (forks begin there).
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import (
    Match,
    Piece,
    match_session,
    slice_tokens,
    token_spans,
)
from kvd.core.records.entries import Span
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.stored_parts import StoredParts, group_parts, interleave
from shared.types.block_key import TOKEN_BYTES
from shared.types.session_key import SessionKey

NO_STATE = "no_state"  # miss reason: the tokens are stored, but no state behind them
NUM_NEWEST = 2  # newest states that a session keeps, besides its first one
MOST_OWNERS = 2  # sessions that are searched for the tokens of a state


class StateChain:
    """The keys of states at positions of one token sequence; the first call hashes all tokens."""

    def __init__(self, chaining: Chaining, block_tokens: int, token_ids: bytes) -> None:
        self._chaining = chaining
        self._step = block_tokens
        self._token_ids = token_ids
        self.num_tokens = len(token_ids) // TOKEN_BYTES

    @cached_property
    def _parents(self) -> list[tuple[int, bytes]]:
        """Start and parent key of each full block, and of the partial block behind them."""
        chain = self._chaining.root
        parents = [(0, chain)]
        for end in range(self._step, self.num_tokens + 1, self._step):
            start = end - self._step
            chain = self._chaining.key(chain, start, slice_tokens(self._token_ids, start, end))
            parents.append((end, chain))
        return parents

    def stored(self, state: CacheState) -> list[StoredParts]:
        """Return the sequence's states that any session has stored, by ascending position."""
        assert state.stored_parts is not None, "asked for where there are states"
        behind = state.stored_parts.behind
        found = (
            stored
            for start, parent in self._parents
            for stored in behind(parent).values()
            if stored.position <= self.num_tokens and self._has_tokens_of(stored, start)
        )
        return sorted(found, key=lambda stored: stored.position)

    def spans_at(self, positions: Iterable[int]) -> dict[int, list[Span]]:
        """Return the spans of the parts of the states at positions."""
        wanted: dict[int, list[int]] = {}
        for position in positions:
            wanted.setdefault(position // self._step * self._step, []).append(position)
        spans = {}
        for start, parent in self._parents if wanted else ():
            for position in wanted.get(start, ()):
                tokens = slice_tokens(self._token_ids, start, position)
                key = self._chaining.state_key(parent, tokens)
                spans[position] = self._chaining.state_spans(position, key, parent)
        return spans

    def _has_tokens_of(self, stored: StoredParts, start: int) -> bool:
        tokens = slice_tokens(self._token_ids, start, stored.position)
        return self._chaining.state_key(stored.parent, tokens) == stored.key


def pieces_at(
    state: CacheState,
    key: SessionKey,
    token_ids: bytes,
    chaining: Chaining,
    match: Match,
    stored: StoredParts,
) -> list[Piece]:
    """Return the KV of all tokens before a state, from the match or a session with that state.

    Returns:
        The pieces, the last one cut at the state; empty if no session has them.
    """
    position = stored.position
    if match.end >= position:
        return _clipped(match.pieces, position, token_ids, chaining)
    owners = [key] if key in stored.users else []
    owners += [owner for owner, _ in zip(stored.users, range(MOST_OWNERS), strict=False)]
    known = slice_tokens(token_ids, 0, position)
    for owner in owners:
        session = state.sessions[owner]
        found = match_session(state, session, known, chaining).pieces
        pieces = [*found, *_matching_run(state, session, found, known)]
        if pieces and pieces[-1].end >= position:
            return _clipped(pieces, position, token_ids, chaining)
    return []


def _matching_run(
    state: CacheState, session: Session, found: Sequence[Piece], token_ids: bytes
) -> Iterator[Piece]:
    """Yield the session's next span behind those found, if it begins with the remaining tokens.

    The state proves that it does. Where the block's token ids are known they are compared, too.
    """
    runs = token_spans(state, session)
    if len(found) == len(runs):
        return
    span, start = runs[len(found)], found[-1].end if found else 0
    block = state.blocks[span.block_key]
    wanted = token_ids[start * TOKEN_BYTES :]
    there = block.token_ids[span.start * TOKEN_BYTES :]
    if not block.token_ids or there.startswith(wanted):
        yield Piece(span, block, start)


def _clipped(
    pieces: Iterable[Piece], position: int, token_ids: bytes, chaining: Chaining
) -> list[Piece]:
    """Return pieces cut at a position; the last one gets the digest and key of its own tokens."""
    kept = [piece for piece in pieces if piece.token_offset < position]
    last = kept[-1]
    if last.end > position:
        chain = kept[-2].span.chain if len(kept) > 1 else chaining.root
        tokens = slice_tokens(token_ids, last.token_offset, position)
        span = Span(
            last.span.block_key,
            last.span.start,
            position - last.token_offset,
            chaining.digest(tokens),
            chaining.key(chain, last.token_offset, tokens),
        )
        kept[-1] = last._replace(span=span)
    return kept


def up_to_state(
    state: CacheState,
    key: SessionKey,
    token_ids: bytes,
    from_token: int,
    chaining: Chaining,
    match: Match,
    *,
    dram_only: bool,
) -> list[Piece]:
    """Return the KV up to the last state behind `from_token`, followed by the state's parts.

    With `dram_only` it is the last state for which everything is in DRAM; if there is none, the
    last one in any tier.
    """
    chain = StateChain(chaining, state.layout.block_tokens, token_ids)
    fallback: list[Piece] = []
    for stored in reversed(chain.stored(state)):
        if stored.position <= from_token:
            break
        pieces = pieces_at(state, key, token_ids, chaining, match, stored)
        if not pieces:
            continue
        pieces += _part_pieces(state, stored)
        wanted = (piece.block for piece in pieces if piece.end > from_token)
        if not dram_only or all(block.is_in_dram for block in wanted):
            return pieces
        fallback = fallback or pieces
    return fallback


def _part_pieces(state: CacheState, stored: StoredParts) -> list[Piece]:
    """Return a state's parts as pieces without tokens at its position."""
    pieces = []
    for span in stored.spans:
        block = state.find_block(span.block_key)
        assert block is not None, "a state that is stored has all its parts"
        pieces.append(Piece(span, block, stored.position))
    return pieces


# ----------------------------------------------------------------------------------------- keeping


def kept_positions(
    known: Iterable[StoredParts], new: Iterable[int], key: SessionKey, own: Iterable[int] = ()
) -> set[int]:
    """Choose the positions at which a session is to have states.

    Args:
        known: stored states of its tokens, of any session.
        new: positions of states that are being stored.
        key: the session.
        own: positions of other states that it has, beyond the tokens of `known`.
    """
    shared = set()
    positions = {*new, *own}
    for stored in known:
        positions.add(stored.position)
        if key in stored.users and len(stored.users) > 1:
            shared.add(stored.position)
    ordered = sorted(positions)
    return {*ordered[:1], *ordered[-NUM_NEWEST:], *shared}


def spans_with_states(
    state: CacheState,
    key: SessionKey,
    runs: Sequence[Span],
    chain: StateChain,
    new: Sequence[Span],
) -> list[Span]:
    """Return the spans that a session is to have: its token spans, and the states that it keeps.

    Args:
        state: the cache's tables.
        key: the session.
        runs: its token spans; they may go beyond the tokens of the chain.
        chain: the possible states of its tokens.
        new: parts of newly stored states, whose blocks are in no session yet.
    """
    end = sum(run.num_tokens for run in runs)
    session = state.sessions.get(key)
    known = [stored for stored in chain.stored(state) if stored.position <= end]
    parts: dict[int, Sequence[Span]] = {stored.position: stored.spans for stored in known}
    own = group_parts(session.spans if session else ())
    later = {spans[0].start: spans for spans in own.values() if spans[0].start > chain.num_tokens}
    fresh = {spans[0].start: spans for spans in group_parts(new).values()}
    parts = {**fresh, **later, **parts}
    kept = [parts[position] for position in kept_positions(known, fresh, key, later)]
    for span in (span for spans in kept for span in spans):
        state.find_block(span.block_key)  # another session may have it packed
    return interleave(runs, kept)
