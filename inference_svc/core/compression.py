"""Compression: policies that name the tokens of a context that may go once a turn is over. Pure.

What a policy drops is a token discard list: the KV of these tokens leaves every tier, of all
layers and heads alike, and that of the others stays as it was computed. So each policy of the
literature, which chooses per head or per layer, chooses here by sums over heads and layers.

A policy sees positions and scores, never tokens: what has to stay whatever it scores (the system
message, special tokens) is protected by the caller.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Literal, Protocol

from inference_svc.core.discards import Range, merge_ranges
from inference_svc.core.errors import InvalidCompressionError

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


@dataclass(frozen=True)
class SinksRecent:
    """The first tokens and the latest ones stay, whatever is between them goes.

    *Source:* StreamingLLM, "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.,
    ICLR 2024): models put attention they have no use for on the first tokens, and break without
    them.

    Attributes:
        sink_tokens: number of first positions of the context that stay before any other; protected
            ones count.
    """

    keep_ratio: float
    sink_tokens: int = 4

    name: ClassVar[str] = "sinks_recent"
    needs: ClassVar[Needs] = "nothing"
    window_tokens: ClassVar[int] = 0

    def drop(
        self, num_tokens: int, _scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """See the protocol."""
        free = free_tokens(num_tokens, protected)
        budget = num_kept(self.keep_ratio, len(free))
        sinks = [position for position in free if position < self.sink_tokens][:budget]
        kept = sinks + free[len(free) - (budget - len(sinks)) :]
        return all_but(kept, free, num_tokens)


@dataclass(frozen=True)
class SnapKV:
    """Of the prompt stays what its last tokens attended to, with its neighbours.

    The queries of an observation window at the prompt's end vote for the tokens before it. Votes
    are pooled over neighbours, so that words and records survive whole rather than in pieces. The
    window itself always stays, and so does what came after it: the answer, judged by the next
    turn's window.

    Two things differ from the paper: one vote over all heads and layers (see the module docstring),
    and the budget is a part of the context rather than a number of tokens.

    *Source:* "SnapKV: LLM Knows What You are Looking for Before Generation" (Li et al., NeurIPS
    2024); window of 32 and pooling by maximum over 7 as in its LongBench experiments.

    Attributes:
        window_tokens: number of queries at the prompt's end that vote.
        pool_tokens: number of neighbours whose best score a token gets, itself in the middle; odd.
    """

    keep_ratio: float
    window_tokens: int = 32
    pool_tokens: int = 7

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[Needs] = "window"

    def drop(
        self, num_tokens: int, scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """See the protocol; the window ends with the last score."""
        assert scores is not None, "a turn computes its prompt's last token at least"
        free = free_tokens(num_tokens, protected)
        first_kept = max(0, len(scores) - self.window_tokens)
        older = [position for position in free if position < first_kept]
        num_newer = len(free) - len(older)
        budget = num_kept(self.keep_ratio, len(free)) - num_newer
        pooled = pool(scores[:first_kept], self.pool_tokens)
        return all_but(highest(older, pooled, budget), older, num_tokens)


def pool(scores: Sequence[float], width: int) -> list[float]:
    """Return the highest score, none being negative, among the `width` neighbours of each."""
    edge = [0.0] * (width // 2)
    padded = [*edge, *scores, *edge]
    shifted = (padded[offset : offset + len(scores)] for offset in range(width))
    return [max(near) for near in zip(*shifted, strict=True)]


@dataclass(frozen=True)
class HeavyHitters:
    """H2O: the tokens that got most attention of all queries so far stay, and the latest ones.

    Half of the budget is for the latest tokens, which had few queries to be seen by, and half for
    the heavy hitters among the others. Tokens without a score count among the latest.

    The paper evicts one token at each step of the answer; here all go at once when the turn is
    over, with the attention summed up to then. History that was loaded rather than computed brings
    no scores of earlier turns: its tokens are judged by this turn's queries.

    *Source:* "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (Zhang et al., NeurIPS 2023).

    Attributes:
        recent_share: share of the budget that the latest tokens get, in [0, 1].
    """

    keep_ratio: float
    recent_share: float = 0.5

    name: ClassVar[str] = "h2o"
    needs: ClassVar[Needs] = "accumulated"
    window_tokens: ClassVar[int] = 0

    def drop(
        self, num_tokens: int, scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """See the protocol."""
        assert scores is not None, "a turn computes its prompt's last token at least"
        free = free_tokens(num_tokens, protected)
        budget = num_kept(self.keep_ratio, len(free))
        num_unscored = sum(position >= len(scores) for position in free)
        num_recent = max(num_unscored, round(budget * self.recent_share))
        older = free[: max(0, len(free) - num_recent)]
        return all_but(highest(older, scores, budget - num_recent), older, num_tokens)


NONE = "none"
_POLICIES: dict[str, Callable[[float], CompressionPolicy]] = {
    SinksRecent.name: SinksRecent,
    SnapKV.name: SnapKV,
    HeavyHitters.name: HeavyHitters,
}
POLICY_NAMES = (NONE, *_POLICIES)
# Modes in which a model attends by its own code, which shows no queries, or to chosen tokens only.
_MODES_WITHOUT_QUERIES = frozenset({"indexed", "masked", "single", "own"})


def make_compression(name: str, keep_ratio: float) -> CompressionPolicy | None:
    """Make the policy of that name; None for "none".

    Args:
        name: one of POLICY_NAMES.
        keep_ratio: part of the context's unprotected tokens that is kept, in (0, 1].

    Raises:
        InvalidCompressionError: if there is none of that name, or the ratio is out of range.
    """
    if name == NONE:
        return None
    make = _POLICIES.get(name)
    if make is None:
        raise InvalidCompressionError(
            f"there is no compression policy {name!r}", f"name one of {', '.join(POLICY_NAMES)}"
        )
    if not 0 < keep_ratio <= 1:
        raise InvalidCompressionError(
            f"keep_ratio {keep_ratio:g} is not in (0, 1]", "send the part of the tokens to keep"
        )
    return make(keep_ratio)


def check_compression(policy: CompressionPolicy, mode: str) -> None:
    """Refuse a policy that needs attention scores of a model that shows no queries.

    Args:
        policy: the policy chosen for a turn, or for all.
        mode: the model's calibration mode.

    Raises:
        InvalidCompressionError: if they do not go together.
    """
    if policy.needs != "nothing" and mode in _MODES_WITHOUT_QUERIES:
        raise InvalidCompressionError(
            f"compression policy {policy.name!r} needs attention scores, which this model's "
            f"{mode} mode does not show",
            f"use {SinksRecent.name!r} or {NONE!r}",
        )
