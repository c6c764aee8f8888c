"""ScaledRotary: moves rows that a norm has scaled after their rotary embedding.

A norm by the root mean square (Hunyuan, nanochat, Llama 4) divides a row by its length, which a
rotation does not change, and multiplies its elements with weights. So a row divided by the weights
is a rotated one, and can be moved like any other. Offers what shifting wants of a `RotaryTable`.
"""

import torch
from torch import Tensor, nn

from inference_svc.runtime.model.distance import distance
from inference_svc.runtime.positions.rotary import RotaryTable

MOVED_TOKENS = 13  # by how many positions the check moves rows
# Largest relative difference of moved rows to embedded ones: rounding, and the norm's epsilon.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ScaledRotary:
    """See the module docstring; rows are [n, heads, dim]."""

    def __init__(self, rotary: RotaryTable, scale: Tensor) -> None:
        """Store the parts.

        Args:
            rotary: the embedding before the norm.
            scale: [dim] float32, the norm's weights.
        """
        self._rotary = rotary.wide
        self._scale = scale

    def move_into(self, rows: Tensor, old_start: int, new_start: int, out: Tensor) -> None:
        """See `RotaryTable.move_into`."""
        rotated = rows / self._scale
        self._rotary.move_into(rotated, old_start, new_start, rotated)
        out.copy_(rotated.mul_(self._scale))

    def unrotate_into(self, rows: Tensor, start: int, out: Tensor) -> None:
        """See `RotaryTable.unrotate_into`; what comes out is before RoPE but normalised."""
        self._rotary.unrotate_into(rows / self._scale, start, out)

    def rotate_into(self, rows: Tensor, start: int, out: Tensor) -> None:
        """Undo `unrotate_into`."""
        rotated = self._rotary.rotate(rows.to(self._scale.dtype), start)
        out.copy_(rotated.mul_(self._scale))


def find_scale(rotary: RotaryTable, norm: nn.Module, free: Tensor) -> Tensor | None:
    """Return the weights of a norm if it is of this kind, else None.

    Args:
        rotary: the embedding before the norm.
        norm: takes [..., dim].
        free: some rows before RoPE, [n, heads, dim], in the model's dtype.
    """
    scale: Tensor = norm(torch.ones_like(free[0, 0])).float()
    if not (scale.isfinite().all() and scale.abs().min() > 0):
        return None
    embedded, expected = (norm(rotary.rotate(free, start)) for start in (0, MOVED_TOKENS))
    ScaledRotary(rotary, scale).move_into(embedded, 0, MOVED_TOKENS, embedded)
    return scale if distance(embedded, expected) <= TOLERANCE[free.dtype] else None
