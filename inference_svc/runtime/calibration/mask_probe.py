"""Asks a model's mask predicate what a query may see, and puts it in words: a window, or chunks.

Windows that are nowhere but in the mask are found this way too. What is found is checked against
the predicate at the places where windows and chunks differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.attention.attention import AttentionOptions

Allowed = Callable[..., Tensor]  # (batch, head, query position, key positions) -> bool


@dataclass(frozen=True)
class Mask:
    """What attention calls get in place of a mask tensor in a probe; may be sliced like one.

    Attributes:
        window: as in `AttentionOptions`.
        chunk: as in `AttentionOptions`.
        is_understood: False: it hides keys in another way.
    """

    window: int | None = None
    chunk: int | None = None
    is_understood: bool = True

    def __getitem__(self, _index: Any) -> "Mask":
        return self


def describe_mask(allowed: Allowed, horizon: int, device: torch.device) -> Mask:
    """Describe the predicate for sequences of up to `horizon` tokens."""
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(horizon, device=device)

    def seen(query: int) -> Tensor:
        return allowed(zero, zero, zero + query, keys).expand(horizon)

    def first_seen(query: int) -> int:
        return int(seen(query).int().argmax())

    def is_right(mask: Mask, queries: Iterable[int]) -> bool:
        options = AttentionOptions(window=mask.window, chunk=mask.chunk)
        return all(
            torch.equal(seen(query), (keys >= options.first_visible(query)) & (keys <= query))
            for query in queries
            if 0 <= query < horizon
        )

    last = horizon - 1
    first = first_seen(last)
    candidates = [Mask()] if first == 0 else [Mask(window=last - first + 1)]
    if first > 0:
        candidates.append(Mask(chunk=first - first_seen(first - 1)))
    edges = (last, last - 1, first, first - 1, last // 2, last // 3, 0)
    for mask in candidates:
        if is_right(mask, edges):
            return mask
    return Mask(is_understood=False)
