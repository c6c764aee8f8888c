"""What a change of a context leaves of a session's spans, under the lineage after it.

Pure. Before the first token that the change concerns everything stays as it is, and is shared as
before. Behind it each span gets a digest of its tokens and a chain key of its own: what is computed
after it must never be shared with a session whose context did not change so (D5).
"""

from dataclasses import dataclass

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import Piece, num_tokens_of, slice_tokens
from kvd.core.records.entries import Span
from shared.types.lineage import Lineage

Range = tuple[int, int]  # half-open, in token positions before the change


@dataclass(frozen=True, slots=True)
class Change:
    """What a change makes of the lineage of a context."""

    before: Lineage
    after: Lineage
    first_changed: int  # token


class Remains:
    """What is left of pieces once ranges of tokens are dropped, asked for in order."""

    def __init__(
        self, chaining: Chaining, change: Change, token_ids: bytes, ranges: list[Range]
    ) -> None:
        self._before = chaining.under(change.before)
        self._after = chaining.under(change.after)
        self._matters = self._after.lineage != self._before.lineage
        self._token_ids = token_ids
        num_tokens = num_tokens_of(token_ids)
        self._ranges = [*ranges, (num_tokens, num_tokens)]  # the last one is behind all pieces
        self._next_range = 0  # the first one that may reach into what is asked for
        self._chain = self._before.root  # of the piece before
        self._num_kept = 0  # tokens

    def of(self, piece: Piece) -> list[Span]:
        """Return the spans on the tokens of the next piece that stay."""
        spans = [self._span(piece, start, end) for start, end in self._kept(piece)]
        self._chain = piece.span.chain
        return spans

    def _kept(self, piece: Piece) -> list[Range]:
        """Return what stays of a piece, in token positions before the change."""
        kept = []
        start, piece_end = piece.token_offset, piece.end
        while start < piece_end:
            range_start, range_end = self._ranges[self._next_range]
            if range_end <= start:
                self._next_range += 1
                continue
            if start < range_start:
                kept.append((start, min(range_start, piece_end)))
            start = min(range_end, piece_end)
        return kept

    def _span(self, piece: Piece, start: int, end: int) -> Span:
        """Rows of a piece that stay, as the next span of the session."""
        position = self._num_kept
        self._num_kept += end - start
        is_whole = (start, end) == (piece.token_offset, piece.end)
        if is_whole and (not self._matters or self._is_untouched(piece, position)):
            return piece.span
        tokens = slice_tokens(self._token_ids, start, end)
        return Span(
            block_key=piece.span.block_key,
            start=piece.span.start + start - piece.token_offset,
            num_tokens=end - start,
            tokens_digest=self._after.digest(tokens),
            chain=self._chain_of(piece, tokens),
        )

    def _is_untouched(self, piece: Piece, position: int) -> bool:
        """Whether a piece lies before all discards, where sessions without any have it, too."""
        is_before = position == piece.token_offset and self._after.lineage.is_clean(piece.end)
        return is_before and self._is_plain(piece)

    def _is_plain(self, piece: Piece) -> bool:
        tokens = slice_tokens(self._token_ids, piece.token_offset, piece.end)
        return self._before.follows(piece.span, self._chain, piece.token_offset, tokens)

    def _chain_of(self, piece: Piece, tokens: bytes) -> bytes:
        """Return the parent key of what comes behind the tokens that were kept last."""
        if self._matters and not self._after.lineage.is_whole:
            return self._after.after_discards(self._num_kept)
        if self._after.lineage.is_whole or self._is_plain(piece):
            return self._after.key(self._chain, piece.token_offset, tokens)
        return self._before.after_discards(self._num_kept)
