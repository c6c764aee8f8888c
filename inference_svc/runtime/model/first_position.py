"""First position: makes models that count positions from another number count from 0, as we do.

RoBERTa and its relatives have a position table whose first rows, up to its padding index, are not
for tokens. Without positions they count from behind these rows; positions that they receive are
row numbers. So a model with such a table is run once, to see which row its first token gets.
"""

from typing import Any

import torch
from torch import Tensor, nn

NUM_TOKENS = 3


class _PositionShift:
    """A hook that adds a constant to the positions that a model is called with."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __call__(
        self, _model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions = options.get("position_ids")
        shifted = {} if positions is None else {"position_ids": positions + self._first}
        return args, options | shifted


def count_from_zero(model: Any, num_positions: int) -> int:
    """Make a model accept 0 as the position of its first token; repeated calls are harmless.

    Args:
        model: the model, ready to run.
        num_positions: number of positions in its config.

    Returns:
        The model's own number of the first position.
    """
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module.padding_idx is not None
        and module.num_embeddings == num_positions
    ]
    first = max((_first_row(model, table) for table in tables), default=0)
    hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - there is no public accessor
    if first and not any(isinstance(hook, _PositionShift) for hook in hooks):
        model.register_forward_pre_hook(_PositionShift(first), with_kwargs=True)
    return first


@torch.inference_mode()
def _first_row(model: Any, table: nn.Embedding) -> int:
    """Return the row of a position table that the first token gets; 0: rows are not consecutive."""
    seen: list[list[int]] = []

    def record(_table: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen.append(args[0].flatten().tolist())

    token_id = 0 if table.padding_idx else 1  # not the padding token
    handle = table.register_forward_pre_hook(record)
    try:
        model(input_ids=torch.full((1, NUM_TOKENS), token_id, device=model.device))
    except Exception:  # noqa: BLE001 - calibration reports why the model does not run
        return 0
    finally:
        handle.remove()
    firsts = [rows[0] for rows in seen if rows == list(range(rows[0], rows[0] + NUM_TOKENS))]
    return firsts[0] if len(firsts) == len(seen) == 1 else 0
