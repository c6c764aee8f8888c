"""The checks of a model: each path its KV may take, against the stock model.

A check returns the largest relative distance (Euclidean norm) of a token's logits to the
reference's; the caller judges it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from inference_svc.runtime.transfer.compaction import compact_in_place
from tests.zoo.direct_service import Rows, Served
from tests.zoo.reference import Range, Stock
from tests.zoo.tiny_configs import WINDOW

HISTORY = 53  # tokens; prime: no chunk or block ends there by chance
DROPPED = 26
# pieces that two discards in the middle leave
MIDDLE: tuple[Range, ...] = ((0, 4), (11, 20), (37, 53))
NEW = (5, 1, 1, 1)  # sizes of the chunks that follow
CHUNKS = (20, 1, 13, 19)


@dataclass(frozen=True)
class Case:
    """A model under check.

    Attributes:
        served: the model as this project serves it.
        stock: the same model, unmodified.
        vocab_size: tokens are drawn below it.
        up: see `Stock.after_discard`.
    """

    served: Served
    stock: Stock
    vocab_size: int
    up: int = 0

    @cached_property
    def history(self) -> list[int]:
        """Return the tokens that are stored."""
        return self.tokens(1, HISTORY)

    @cached_property
    def new(self) -> list[int]:
        """Return the tokens that follow."""
        return self.tokens(2, sum(NEW))

    def tokens(self, seed: int, count: int) -> list[int]:
        """Draw tokens, none of them special."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, self.vocab_size, (count,), generator=generator).tolist()

    def all_stored(self, kept: Sequence[Range]) -> Tensor:
        """Compute and store the history, load the kept part, and continue; return the logits."""
        blocks, packed = self.stored(DROPPED)
        kv = self.served.load(blocks, kept, HISTORY + len(self.new), packed[-1])
        return self.served.feed(kv, self.new, NEW)

    def stored(self, first: int) -> tuple[list[Rows], list[Tensor | None]]:
        """Compute the history in two chunks and store it.

        Args:
            first: tokens of the first chunk.

        Returns:
            Its blocks, and the states behind each chunk; None: the model has none.
        """
        buffer, kv = self.served.new_buffer(HISTORY), self.served.new_kv(HISTORY)
        packed = []
        for piece in (self.history[:first], self.history[first:]):
            self.served.feed(kv, piece, [len(piece)], buffer)
            packed.append(None if kv.states is None else kv.states.snapshot())
        return self.served.store(buffer), packed


def prefill(case: Case) -> float:
    """Compute the whole history in one chunk."""
    logits = case.served.feed(case.served.new_kv(HISTORY), case.history, [HISTORY])
    return distance(logits, case.stock.logits(case.history)[-1:])


def chunks(case: Case) -> float:
    """Compute the history in chunks of unequal sizes."""
    logits = case.served.feed(case.served.new_kv(HISTORY), case.history, CHUNKS)
    return distance(logits, case.stock.logits(case.history)[ends(CHUNKS)])


def decode(case: Case) -> float:
    """Compute token by token after a prefill."""
    sizes = [30, *[1] * 8]
    logits = case.served.feed(case.served.new_kv(38), case.history, sizes)
    return distance(logits, case.stock.logits(case.history)[ends(sizes)])


def ragged(case: Case) -> float:
    """Compute sequences of other lengths beside each other: prefill, a longer chunk and decode."""
    served = case.served
    long, middle, fresh = (case.tokens(seed, count) for seed, count in ((3, 50), (4, 21), (5, 9)))
    kvs = [served.new_kv(64) for _ in range(3)]
    found = [*served.step((kvs[0], long[:40]), (kvs[1], middle[:20]))]
    found += served.step((kvs[1], middle[20:]), (kvs[2], fresh), (kvs[0], long[40:]))
    expected = [long[:40], middle[:20], middle, fresh, long]
    return distance(torch.stack(found), torch.stack([case.stock.logits(t)[-1] for t in expected]))


def reload(case: Case) -> float:
    """Store, load at the same positions, and continue."""
    expected = case.stock.logits([*case.history, *case.new])[HISTORY:]
    return distance(case.all_stored([(0, HISTORY)]), expected[ends(NEW)])


def truncated(case: Case) -> float:
    """Store, drop the first half, load the rest at new positions, and continue."""
    return _discard_distance(case, [(DROPPED, HISTORY)])


def scattered(case: Case) -> float:
    """Store, drop two ranges in the middle, and load the rest at new positions."""
    return _discard_distance(case, MIDDLE)


def shifted(case: Case) -> float:
    """Drop ranges in memory, move the rest to new positions there, and continue."""
    served = case.served
    distances = []
    for kept in ([(DROPPED, HISTORY)], MIDDLE):
        kv = served.new_kv(HISTORY + len(case.new))
        served.feed(kv, case.history, [HISTORY])
        compact_in_place(kv, kept, served.calibration)
        expected = case.stock.after_discard(case.history, kept, case.new, up=case.up)
        distances.append(distance(served.feed(kv, case.new, NEW), expected[ends(NEW)]))
    return max(distances)


def prefix(case: Case) -> float:
    """Store, drop a range in the middle, load what precedes it, and recompute the rest."""
    served = case.served
    blocks, packed = case.stored(DROPPED)
    kv = served.load(blocks, [(0, DROPPED)], HISTORY + len(case.new), packed[0])
    rest = [*case.history[DROPPED + 9 :], *case.new]
    sizes = (len(rest) - 3, 1, 1, 1)
    context = [*case.history[:DROPPED], *rest]
    expected = case.stock.logits(context)[[DROPPED + end for end in ends(sizes)]]
    return distance(served.feed(kv, rest, sizes), expected)


def long(case: Case) -> float:
    """Compute a chunk over a state that is longer than the model's own chunks."""
    token_ids = case.tokens(6, WINDOW - 1)
    sizes = (10, WINDOW - 13, 1, 1)
    logits = case.served.feed(case.served.new_kv(WINDOW), token_ids, sizes)
    return distance(logits, case.stock.logits(token_ids)[ends(sizes)])


def other_state(case: Case) -> float:
    """Store, load with the state of another position, and continue."""
    served = case.served
    blocks, packed = case.stored(DROPPED)
    kv = served.load(blocks, [(0, HISTORY)], HISTORY + len(case.new), packed[0])
    assert kv.states is not None
    kv.states.commit(HISTORY)  # wherever it was packed
    expected = case.stock.logits([*case.history, *case.new])[HISTORY:]
    return distance(served.feed(kv, case.new, NEW), expected[ends(NEW)])


def stale(case: Case) -> float:
    """Return the first half's discard as it would be if keys kept their old positions."""
    kept = [(DROPPED, HISTORY)]
    expected = case.stock.with_stale_keys(case.history, kept, case.new)
    return distance(case.all_stored(kept), expected[ends(NEW)])


def _discard_distance(case: Case, kept: Sequence[Range]) -> float:
    expected = case.stock.after_discard(case.history, kept, case.new, up=case.up)
    return distance(case.all_stored(kept), expected[ends(NEW)])


Check = Callable[[Case], float]
ALWAYS: tuple[Check, ...] = (prefill, chunks, decode, ragged, reload)
# By what stored keys know of positions.
AFTER_DISCARD: Mapping[str, tuple[Check, ...]] = {
    "decoupled": (truncated, scattered, shifted),
    "coupled": (prefix,),
    "naive": (stale,),
}
OVER_STATES: tuple[Check, ...] = (long,)  # of models that have some


def ends(sizes: Sequence[int]) -> list[int]:
    """Return the index of the last token of each of successive chunks."""
    return [sum(sizes[: index + 1]) - 1 for index in range(len(sizes))]


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a row from its reference, relative to the reference."""
    apart = (found.double() - expected.double()).norm(dim=-1)
    return float((apart / expected.double().norm(dim=-1)).max())
