"""Compression: policies that choose tokens of a context to drop once a turn is over. Pure.

A policy's choice is a token discard list: the KV of these tokens leaves every tier, in all layers
and heads, and the KV of the others stays as it was computed. The policies of the literature choose
per head or per layer; here they choose by sums over heads and layers.

A policy sees positions and scores, never tokens. Tokens that have to stay in any case (the system
message, special tokens) are protected by the caller.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Literal, Protocol

from inference_svc.core.errors import InvalidCompressionError
from inference_svc.core.ranges import Range, merge_ranges

Needs = Literal["nothing", "window", "accumulated"]


class CompressionPolicy(Protocol):
    """Chooses the tokens to drop; has settings and no state."""

    @property
    def name(self) -> str:
        """Name of the policy, as the setting `compression.policy` has it."""

    @property
    def keep_ratio(self) -> float:
        """Share of the tokens outside the protected ranges that is kept, in (0, 1]."""

    @property
    def needs(self) -> Needs:
        """The queries whose scores it needs: none, the prompt's last ones ("window"), or all."""

    @property
    def window_tokens(self) -> int:
        """Number of the prompt's last queries, if it needs a "window"; else 0."""

    def drop(
        self, num_tokens: int, scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """Choose the tokens of a context that are dropped.

        Args:
            num_tokens: number of the context's tokens, its last, uncomputed one included.
            scores: attention that each of the first tokens received. Tokens without a score are
                newer than the last query that counted, and stay. None: for a policy that needs
                nothing.
            protected: ranges that stay in any case, in any order; they do not count for the ratio.

        Returns:
            Merged ranges; () if everything stays.
        """


def special_tokens(token_ids: Sequence[int], special_ids: Collection[int]) -> tuple[Range, ...]:
    """Return the ranges of special tokens, to be protected: what is left has to read as a chat."""
    found = [at for at, token_id in enumerate(token_ids) if token_id in special_ids]
    return merge_ranges(((at, at + 1) for at in found), len(token_ids))


def free_tokens(num_tokens: int, protected: Iterable[Range]) -> list[int]:
    """Return the positions outside the protected ranges, ascending."""
    is_free = bytearray(b"\1") * num_tokens
    for start, end in protected:
        is_free[start:end] = bytes(max(0, min(end, num_tokens) - start))
    return [position for position in range(num_tokens) if is_free[position]]


def num_kept(keep_ratio: float, num_free: int) -> int:
    """Return how many of the free tokens stay, rounded up."""
    return min(num_free, ceil(keep_ratio * num_free))


def highest(positions: Sequence[int], scores: Sequence[float], num: int) -> list[int]:
    """Choose the `num` positions with the highest scores; among equals the last ones."""
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
    """Keep the first tokens and the latest ones; drop those between them.

    *Source:* StreamingLLM, "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.,
    ICLR 2024): models put attention they have no use for on the first tokens, and break without
    them.

    Attributes:
        keep_ratio: see `CompressionPolicy`.
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
    """Keep the tokens of the prompt that its last tokens attended to, with their neighbours.

    The queries of an observation window at the prompt's end vote for the tokens before it. Votes
    are pooled over neighbours, so that words and records survive whole rather than in pieces. The
    window itself always stays. So does what comes after it, the answer, which the next turn's
    window will judge.

    Two things differ from the paper: there is one vote over all heads and layers (see the module
    docstring), and the budget is a share of the context rather than a number of tokens.

    *Source:* "SnapKV: LLM Knows What You are Looking for Before Generation" (Li et al., NeurIPS
    2024); window of 32 and pooling by maximum over 7 as in its LongBench experiments.

    Attributes:
        keep_ratio: see `CompressionPolicy`.
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
    """Return for each score the highest one among its `width` neighbours; none is negative."""
    edge = [0.0] * (width // 2)
    padded = [*edge, *scores, *edge]
    shifted = (padded[offset : offset + len(scores)] for offset in range(width))
    return [max(near) for near in zip(*shifted, strict=True)]


@dataclass(frozen=True)
class HeavyHitters:
    """Keep the tokens that received most attention from all queries so far, and the latest (H2O).

    Half of the budget is for the latest tokens, which few queries have seen, and half for the heavy
    hitters among the others. Tokens without a score count among the latest.

    The paper evicts one token at each step of the answer; here all are dropped at once when the
    turn is over, by the attention summed up to then. History that was loaded rather than computed
    brings no scores of earlier turns: its tokens are judged by this turn's queries.

    *Source:* "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    (Zhang et al., NeurIPS 2023).

    Attributes:
        keep_ratio: see `CompressionPolicy`.
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
# Modes in which a model's own code attends, so that queries are not seen, or to chosen tokens only.
_MODES_WITHOUT_QUERIES = frozenset({"indexed", "masked", "single", "own"})


def make_compression(name: str, keep_ratio: float) -> CompressionPolicy | None:
    """Make the policy with this name; None for "none".

    Args:
        name: one of POLICY_NAMES.
        keep_ratio: share of the context's unprotected tokens that is kept, in (0, 1].

    Raises:
        InvalidCompressionError: there is none with that name, or the ratio is out of range.
    """
    if name == NONE:
        return None
    make = _POLICIES.get(name)
    if make is None:
        raise InvalidCompressionError(
            f"there is no compression policy {name!r}", f"send one of {', '.join(POLICY_NAMES)}"
        )
    if not 0 < keep_ratio <= 1:
        raise InvalidCompressionError(
            f"keep_ratio {keep_ratio:g} is not in (0, 1]", "send the share of the tokens to keep"
        )
    return make(keep_ratio)


def check_compression(policy: CompressionPolicy, mode: str) -> None:
    """Check that a model's attention mode provides the scores that a policy needs.

    Args:
        policy: the policy chosen for a turn, or for all.
        mode: the model's calibration mode.

    Raises:
        InvalidCompressionError: the mode provides no scores.
    """
    if policy.needs != "nothing" and mode in _MODES_WITHOUT_QUERIES:
        raise InvalidCompressionError(
            f"compression policy {policy.name!r} needs attention scores, which are not "
            f"available in this model's {mode} mode",
            f"use {SinksRecent.name!r} or {NONE!r}",
        )
