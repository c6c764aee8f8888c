"""CompressionPolicy: names the tokens of a context that may go once a turn is over. Pure.

What a policy drops is a token discard list: the KV of these tokens leaves every tier, of all
layers and heads alike, and that of the others stays as it was computed. So each policy of the
literature, which chooses per head or per layer, chooses here by sums over heads and layers.

A policy sees positions and scores, never tokens: what has to stay whatever it scores (the system
message, special tokens) is protected by the caller.
"""

from collections.abc import Collection, Iterable, Sequence
from math import ceil
from typing import Literal, Protocol

from inference_svc.core.discards import Range, merge_ranges

Needs = Literal["nothing", "window", "accumulated"]


class CompressionPolicy(Protocol):
    """Chooses what to drop; holds settings and no state."""

    @property
    def name(self) -> str:
        """Name of the policy, as the setting `compression.policy` has it."""

    @property
    def keep_ratio(self) -> float:
        """Part of the tokens outside the protected ranges that is kept, in (0, 1]."""

    @property
    def needs(self) -> Needs:
        """Which queries `scores` are of: none, the prompt's last ones ("window"), or every one."""

    @property
    def window_tokens(self) -> int:
        """Number of the prompt's last queries, if it needs a "window"; else 0."""

    def drop(
        self, num_tokens: int, scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """Choose the tokens of a context that are dropped.

        Args:
            num_tokens: tokens of the context, its last, uncomputed one included.
            scores: attention that each of the first tokens got; tokens without a score are newer
                than the last query that counted, and stay. None: for a policy that needs nothing.
            protected: ranges that stay in any case, in any order; they do not count for the ratio.

        Returns:
            Merged ranges; () if everything stays.
        """


def special_tokens(token_ids: Sequence[int], special_ids: Collection[int]) -> tuple[Range, ...]:
    """Return the ranges of special tokens: protected, so that the rest still reads as a chat."""
    found = [at for at, token_id in enumerate(token_ids) if token_id in special_ids]
    return merge_ranges(((at, at + 1) for at in found), len(token_ids))


def free_tokens(num_tokens: int, protected: Iterable[Range]) -> list[int]:
    """Return the positions outside the protected ranges, ascending."""
    is_free = bytearray(b"\1") * num_tokens
    for start, end in protected:
        is_free[start:end] = bytes(max(0, min(end, num_tokens) - start))
    return [position for position in range(num_tokens) if is_free[position]]


def num_kept(keep_ratio: float, num_free: int) -> int:
    """Return how many of the free tokens stay; rounding is in favour of keeping."""
    return min(num_free, ceil(keep_ratio * num_free))


def highest(positions: Sequence[int], scores: Sequence[float], num: int) -> list[int]:
    """Choose the `num` positions with the highest scores; of equal ones the last."""
    ranked = sorted(positions, key=scores.__getitem__)
    return ranked[max(0, len(ranked) - max(0, num)) :]


def all_but(kept: Iterable[int], free: Iterable[int], num_tokens: int) -> tuple[Range, ...]:
    """Return the merged ranges of the free tokens that are not kept."""
    is_dropped = bytearray(num_tokens)
    for position in free:
        is_dropped[position] = 1
    for position in kept:
        is_dropped[position] = 0
    is_dropped.append(0)  # ends the last range
    ranges = []
    end = 0
    while (start := is_dropped.find(1, end)) >= 0:
        end = is_dropped.find(0, start)
        ranges.append((start, end))
    return tuple(ranges)
