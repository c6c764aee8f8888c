"""An interpolated n-gram model with modified Kneser-Ney discounts: the baseline to beat.

Owns: counting and probabilities over token ids. Knows nothing of text.

Invariants:
1. The probabilities of all tokens after any context sum to one (checked by `probability_sum`).
2. An n-gram is one integer, its tokens as digits in base `vocab_size`, oldest first.

*Source:* Chen and Goodman (1999), with discounts from the counts of counts for each order.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Order:
    """Counts of one order: of n-grams, and of each context what the formula needs."""

    counts: dict[int, int]
    totals: dict[int, int]
    backoff_mass: dict[int, float]
    discounts: tuple[float, float, float, float]


class KneserNey:
    """Counts sequences once, then answers log probabilities."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int, order: int) -> None:
        """Count `sequences`; some seconds and some hundred bytes per distinct n-gram."""
        self._vocab_size = vocab_size
        self._order = order
        self._orders = [
            _summarise(counts, vocab_size) for counts in _count(sequences, vocab_size, order)
        ]

    def probability(self, context: Sequence[int], token: int) -> float:
        """Probability of `token` after `context`, of which the last `order - 1` tokens count."""
        probability = 1.0 / self._vocab_size
        used = context[max(0, len(context) - self._order + 1) :]
        for length in range(len(used) + 1):
            key = 0
            for previous in used[len(used) - length :]:
                key = key * self._vocab_size + previous
            level = self._orders[length]
            total = level.totals.get(key, 0)
            if total == 0:
                break  # longer contexts are unseen too
            count = level.counts.get(key * self._vocab_size + token, 0)
            discounted = count - level.discounts[min(count, 3)]
            probability = (discounted + level.backoff_mass[key] * probability) / total
        return probability

    def loss(self, ids: Sequence[int]) -> float:
        """Sum of -ln p over `ids[1:]`, in nats; `ids[0]` is context only."""
        history = self._order - 1
        return -math.fsum(
            math.log(self.probability(ids[max(0, i - history) : i], ids[i]))
            for i in range(1, len(ids))
        )

    def probability_sum(self, context: Sequence[int]) -> float:
        """Sum over the vocabulary, which must be 1; for checks."""
        return math.fsum(self.probability(context, token) for token in range(self._vocab_size))


def _count(sequences: Sequence[Sequence[int]], vocab_size: int, order: int) -> list[dict[int, int]]:
    """Raw counts for the highest order, continuation counts (distinct left neighbours) below.

    N-grams that begin a sequence have no left neighbour; they keep their raw count there, as usual.
    """
    raw: list[Counter[int]] = [Counter() for _ in range(order)]
    initial: list[Counter[int]] = [Counter() for _ in range(order)]
    for sequence in sequences:
        for end in range(1, len(sequence) + 1):
            key, place = 0, 1
            for length in range(1, min(order, end) + 1):
                key += sequence[end - length] * place
                place *= vocab_size
                raw[length - 1][key] += 1
            if end < order:
                initial[end - 1][key] += 1
    counts: list[dict[int, int]] = []
    for length in range(1, order):
        continuation = Counter(initial[length - 1])
        place = vocab_size**length
        continuation.update(key % place for key in raw[length])
        counts.append(continuation)
    return [*counts, raw[order - 1]]


def _summarise(counts: dict[int, int], vocab_size: int) -> _Order:
    """Derive totals, discounts and the mass that each context hands to the shorter one."""
    of_counts = Counter(min(count, 5) for count in counts.values())
    n1, n2, n3, n4 = (max(1, of_counts[i]) for i in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    discounts = (0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    totals: defaultdict[int, int] = defaultdict(int)
    backoff_mass: defaultdict[int, float] = defaultdict(float)
    for key, count in counts.items():
        context = key // vocab_size
        totals[context] += count
        backoff_mass[context] += discounts[min(count, 3)]
    return _Order(counts, dict(totals), dict(backoff_mass), discounts)
