"""Pooler: makes one vector of what leaves the last layer for the tokens of a sequence.

Invariants: 1. a token counts once: nothing counts before `commit`, and what is computed again is
not counted again; 2. tokens come in order.
"""

import torch
from torch import Tensor

from inference_svc.runtime.model.pooling import Pooling, PoolingMode


class Pooler:
    """Pools one sequence; see the module docstring.

    Belongs to a request. All but `vector` is called by the compute thread while a step runs.

    Args:
        pooling: how.
        num_tokens: number of the sequence's tokens.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self._pooling = pooling
        self._num_tokens = num_tokens
        self._end = 0  # position after the last token that counted
        self._sum: Tensor | None = None  # [hidden] float32
        self._noted: tuple[int, Tensor] | None = None  # the step's end, and its sum

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have counted."""
        return self._end == self._num_tokens

    def num_rows(self, first_token: int, end_token: int) -> int:
        """Return of how many of the last tokens of a chunk the states are wanted."""
        if self._pooling.mode is PoolingMode.LAST:
            return int(end_token == self._num_tokens)
        return max(0, end_token - max(first_token, self._end))

    def note(self, rows: Tensor, end_token: int) -> None:
        """Take the states of the last tokens of a chunk; counted by `commit`.

        Args:
            rows: [num_rows, hidden].
            end_token: position after the last of them.
        """
        states = rows.float()
        if self._pooling.mode is PoolingMode.WEIGHTED_MEAN:
            places = torch.arange(end_token - len(rows), end_token, device=rows.device) + 1
            states = states * places.unsqueeze(1)
        self._noted = end_token, states.sum(0)

    def commit(self) -> None:
        """Count what the step noted: it succeeded."""
        if self._noted is None:
            return
        end_token, added = self._noted
        self._noted = None
        if end_token > self._end:
            self._sum = added if self._sum is None else self._sum + added
            self._end = end_token

    def vector(self) -> Tensor:
        """Return the embedding, [hidden] float32 on the CPU; all tokens have counted."""
        assert self._sum is not None, "nothing has counted"  # noqa: S101
        weight = {
            PoolingMode.LAST: 1,
            PoolingMode.MEAN: self._num_tokens,
            PoolingMode.WEIGHTED_MEAN: self._num_tokens * (self._num_tokens + 1) // 2,
        }[self._pooling.mode]
        return self._sum.cpu() / weight
