"""Pooler: pools the last layer's hidden states of a sequence into one embedding vector.

Invariants:
1. a token counts once: nothing counts before `commit`, and tokens that are computed again do not
   count again;
2. tokens come in order.
"""

import torch
from torch import Tensor

from inference_svc.runtime.model.pooling import Pooling, PoolingMode


class Pooler:
    """The pooled sum of one sequence's hidden states.

    Belongs to a request. The compute thread calls all methods but `vector` while a step runs.

    Args:
        pooling: the model's pooling mode.
        num_tokens: number of the sequence's tokens.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        self._pooling = pooling
        self._num_tokens = num_tokens
        self._end = 0  # position after the last token that has counted
        self._sum: Tensor | None = None  # [hidden] float32
        self._noted: tuple[int, Tensor] | None = None  # the step's end, and its sum

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have counted."""
        return self._end == self._num_tokens

    def num_rows(self, first_token: int, end_token: int) -> int:
        """Return the number of a chunk's last tokens whose hidden states are needed.

        Args:
            first_token: position of the chunk's first token.
            end_token: position after its last token.
        """
        if self._pooling.mode is PoolingMode.LAST:
            return int(end_token == self._num_tokens)
        return max(0, end_token - max(first_token, self._end))

    def note(self, rows: Tensor, end_token: int) -> None:
        """Add the hidden states of a chunk's last tokens; `commit` makes them count.

        Args:
            rows: [num_rows, hidden].
            end_token: position after the last of these tokens.
        """
        states = rows.float()
        if self._pooling.mode is PoolingMode.WEIGHTED_MEAN:
            places = torch.arange(end_token - len(rows), end_token, device=rows.device) + 1
            states = states * places.unsqueeze(1)
        self._noted = end_token, states.sum(0)

    def commit(self) -> None:
        """Count the tokens of the last `note`: their step has succeeded."""
        if self._noted is None:
            return
        end_token, added = self._noted
        self._noted = None
        if end_token > self._end:
            self._sum = added if self._sum is None else self._sum + added
            self._end = end_token

    def vector(self) -> Tensor:
        """Return the embedding, [hidden] float32 on the CPU; `is_complete` has to be true."""
        assert self._sum is not None, "nothing has counted"  # noqa: S101
        weight = {
            PoolingMode.LAST: 1,
            PoolingMode.MEAN: self._num_tokens,
            PoolingMode.WEIGHTED_MEAN: self._num_tokens * (self._num_tokens + 1) // 2,
        }[self._pooling.mode]
        return self._sum.cpu() / weight
