"""Positions are counted from 0 here; models that count from another number are told theirs.

RoBERTa and its kin have a table of positions whose first rows are not for tokens: as far as its
padding index. They count from behind it if nobody tells them positions, and take what they are told
for rows. So a model that has such a table is asked, by running it, which row its first token gets.
"""

from typing import Any

import torch
from torch import Tensor, nn

NUM_TOKENS = 3


class _Told:
    """Adds to the positions that a model is called with."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __call__(
        self, _model: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions = options.get("position_ids")
        told = {} if positions is None else {"position_ids": positions + self._first}
        return args, options | told


def count_from_zero(model: Any, num_positions: int) -> int:
    """Have a model take 0 for the position of the first token; return what it takes it for itself.

    Repeating it is harmless.

    Args:
        model: the model, ready to be run.
        num_positions: that its config states.
    """
    tables = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        and module.padding_idx is not None
        and module.num_embeddings == num_positions
    ]
    first = max((_first_row(model, table) for table in tables), default=0)
    hooks = model._forward_pre_hooks.values()  # noqa: SLF001 - the only way to ask
    if first and not any(isinstance(hook, _Told) for hook in hooks):
        model.register_forward_pre_hook(_Told(first), with_kwargs=True)
    return first


@torch.inference_mode()
def _first_row(model: Any, table: nn.Embedding) -> int:
    """Return which row of a table the first token gets, and the next one the next; 0: neither."""
    seen: list[list[int]] = []

    def note(_table: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen.append(args[0].flatten().tolist())

    token_id = 0 if table.padding_idx else 1  # no padding
    handle = table.register_forward_pre_hook(note)
    try:
        model(input_ids=torch.full((1, NUM_TOKENS), token_id, device=model.device))
    except Exception:  # noqa: BLE001 - calibration says why the model does not run
        return 0
    finally:
        handle.remove()
    firsts = [rows[0] for rows in seen if rows == list(range(rows[0], rows[0] + NUM_TOKENS))]
    return firsts[0] if len(firsts) == len(seen) == 1 else 0
