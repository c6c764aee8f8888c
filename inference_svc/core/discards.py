"""Discards: which tokens of a context are dropped, and what is left of it. Pure.

A range is half-open, in positions of the context before the discard. Merged ranges are sorted, do
not touch and are not empty: every function here but `merge_ranges` takes only those.

*Source:* token truncation and token discard lists: CachedAttention, USENIX ATC'24, §3.4.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inference_svc.core.errors import InvalidDiscardError
from shared.types.lineage import Lineage, join_ranges

Range = tuple[int, int]

OVERFLOW = "overflow"
CLIENT = "client"
COMPRESSION = "compression:"  # followed by the policy's name


@dataclass(frozen=True)
class Discard:
    """One discard, as it is recorded.

    Attributes:
        ranges: merged ranges of positions in the context it was applied to.
        after_tokens: number of its turn's tokens (input, then output) that the context had when it
            happened; 0: before the turn's input.
        reason: "overflow", "client" or "compression:<policy>".
        lineage: that of what was left, if it does not follow from the turn's tokens: KV was
            computed over some that turned out to be a stop string, which no answer has; else None.
    """

    ranges: tuple[Range, ...]
    after_tokens: int = 0
    reason: str = OVERFLOW
    lineage: Lineage | None = None


def merge_ranges(ranges: Iterable[Range], num_tokens: int) -> tuple[Range, ...]:
    """Sort and join ranges of a context of `num_tokens`.

    Raises:
        InvalidDiscardError: for one that is empty or outside the context.
    """
    ordered = sorted(ranges)
    for start, end in ordered:
        if not 0 <= start < end <= num_tokens:
            raise InvalidDiscardError(
                f"range [{start}, {end}) is empty or outside the context of {num_tokens} tokens",
                "send half-open ranges of positions in the context as it is before the discard",
            )
    return tuple(join_ranges(ordered))


def num_in(ranges: Iterable[Range]) -> int:
    """Count the tokens of some ranges."""
    return sum(end - start for start, end in ranges)


def clip(ranges: Iterable[Range], num_tokens: int) -> tuple[Range, ...]:
    """Return the part of the ranges that is among the first tokens."""
    return tuple((start, min(end, num_tokens)) for start, end in ranges if start < num_tokens)


def position_after(position: int, ranges: Iterable[Range]) -> int:
    """Return what a position is once the ranges are dropped: of what is left there, if it is."""
    return position - num_in(clip(ranges, position))


def kept_runs(ranges: Iterable[Range], num_tokens: int) -> list[Range]:
    """Return the runs that are left of the first `num_tokens` positions: in order, none empty."""
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
    """Return a context's tokens without those in the ranges."""
    return [
        token for start, end in kept_runs(ranges, len(token_ids)) for token in token_ids[start:end]
    ]
