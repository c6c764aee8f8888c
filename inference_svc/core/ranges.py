"""Ranges of tokens that a discard drops, and what is left of a context after it. Pure.

A range is half-open, in positions of the context before the discard. Merged ranges are sorted, not
empty, and do not touch. All functions here except `merge_ranges` expect merged ranges.

*Source:* token truncation and token discard lists: CachedAttention, USENIX ATC'24, §3.4.
"""

from collections.abc import Iterable, Sequence

from inference_svc.core.errors import InvalidDiscardError
from shared.types.lineage import join_ranges

Range = tuple[int, int]


def merge_ranges(ranges: Iterable[Range], num_tokens: int) -> tuple[Range, ...]:
    """Sort and join ranges of a context of `num_tokens` tokens.

    Raises:
        InvalidDiscardError: a range is empty or outside the context.
    """
    ordered = sorted(ranges)
    for start, end in ordered:
        if not 0 <= start < end <= num_tokens:
            raise InvalidDiscardError(
                f"range [{start}, {end}) is empty or outside the context of {num_tokens} tokens",
                "send half-open ranges of positions in the context before the discard",
            )
    return tuple(join_ranges(ordered))


def num_in(ranges: Iterable[Range]) -> int:
    """Count the tokens in some ranges."""
    return sum(end - start for start, end in ranges)


def clip(ranges: Iterable[Range], num_tokens: int) -> tuple[Range, ...]:
    """Return the part of the ranges within the first `num_tokens` positions."""
    return tuple((start, min(end, num_tokens)) for start, end in ranges if start < num_tokens)


def position_after(position: int, ranges: Iterable[Range]) -> int:
    """Return a position's value once the ranges are dropped.

    A position inside a range moves to where the range was.
    """
    return position - num_in(clip(ranges, position))


def kept_runs(ranges: Iterable[Range], num_tokens: int) -> list[Range]:
    """Return the runs of the first `num_tokens` positions that are left: in order, none empty."""
    kept = []
    start = 0
    for range_start, range_end in ranges:
        end = min(range_start, num_tokens)
        if start < end:
            kept.append((start, end))
        start = range_end
    if start < num_tokens:
        kept.append((start, num_tokens))
    return kept


def without(token_ids: Sequence[int], ranges: Iterable[Range]) -> list[int]:
    """Return a context's tokens outside of the ranges."""
    return [
        token for start, end in kept_runs(ranges, len(token_ids)) for token in token_ids[start:end]
    ]
