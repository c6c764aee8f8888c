"""The spans that remain of a session after a discard or graft, chained to the new lineage.

Pure. Before the first changed token all spans stay as they are, and are shared as before. Behind it
each span gets a digest of its tokens and a chain key of its own: KV that is computed after it must
never be shared with a session whose context did not change in the same way (D5).
"""

from dataclasses import dataclass

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import Piece, num_tokens_of, slice_tokens
from kvd.core.records.entries import Span
from shared.types.lineage import Lineage

Range = tuple[int, int]  # half-open, in token positions before the change


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a context's lineage, by a discard or a graft.

    Attributes:
        before: the lineage before the change.
        after: the lineage after it.
        first_changed: position of the first token that is dropped, or where the graft begins.
    """

    before: Lineage
    after: Lineage
    first_changed: int


class KeptSpans:
    """Computes the spans that remain of matched pieces, piece by piece in token order.

    Args:
        chaining: a chaining of the session's tenant.
        change: the lineages before and after.
        token_ids: the context before the change.
        ranges: sorted token ranges that are dropped.
    """

    def __init__(
        self, chaining: Chaining, change: Change, token_ids: bytes, ranges: list[Range]
    ) -> None:
        self._before = chaining.under(change.before)
        self._after = chaining.under(change.after)
        self._matters = self._after.lineage != self._before.lineage
        self._token_ids = token_ids
        num_tokens = num_tokens_of(token_ids)
        self._ranges = [*ranges, (num_tokens, num_tokens)]  # the last one is behind all pieces
        self._next_range = 0  # the first range that may overlap the next piece
        self._chain = self._before.root  # chain key of the piece before
        self._num_kept = 0  # tokens kept so far

    def of(self, piece: Piece) -> list[Span]:
        """Return the spans on the kept tokens of the next piece."""
        spans = [self._span(piece, start, end) for start, end in self._kept(piece)]
        self._chain = piece.span.chain
        return spans

    def _kept(self, piece: Piece) -> list[Range]:
        """Return the kept token ranges of a piece, in positions before the change."""
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
        """Return the span on kept tokens [start, end) of a piece, the next one of the session."""
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
        """Whether a piece lies before all discards, so that other sessions may share it."""
        is_before = position == piece.token_offset and self._after.lineage.is_clean(piece.end)
        return is_before and self._is_plain(piece)

    def _is_plain(self, piece: Piece) -> bool:
        tokens = slice_tokens(self._token_ids, piece.token_offset, piece.end)
        return self._before.follows(piece.span, self._chain, piece.token_offset, tokens)

    def _chain_of(self, piece: Piece, tokens: bytes) -> bytes:
        """Return the chain key of the span on the tokens that were kept last."""
        if self._matters and not self._after.lineage.is_whole:
            return self._after.after_discards(self._num_kept)
        if self._after.lineage.is_whole or self._is_plain(piece):
            return self._after.key(self._chain, piece.token_offset, tokens)
        return self._before.after_discards(self._num_kept)
