"""RopeTables: compiles the rotary calls that a probe recorded to tables, one per rotary embedding.

A table needs constant frequencies. Dynamic NTK scaling and longrope derive theirs from the longest
position of a forward, and some keep them for the next one. A session's keys would depend on the
other sequences of its batch, and keys stored under one frequency could not be used under another.
Like other servers we choose the frequencies once, for the longest sequence that is served, and keep
them (`freeze_rotary`): for longrope the long factors, if the window is longer than the original
one. They are set in the modules of this model instance only. Forward and tables then agree, and so
does the "stock" model that calibration compares with, which is the same frozen model.

Frequencies that cannot be frozen are left alone: `RopeTables.find` tests all frequencies and
refuses those that vary.

*Source:* the `dynamic_rope_update` decorator of transformers' modeling_rope_utils.py, which does
nothing for modules whose `rope_type` is not one that depends on the length.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inference_svc.runtime.calibration.rope_calls import (
    ApplyCall,
    ReplayedRope,
    RopeOutOfReachError,
    RotaryCall,
    rope_of,
    used_rotary_calls,
)
from inference_svc.runtime.calibration.stock import distance
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError, RopeVariesError
from inference_svc.runtime.positions.recipes import KeySource
from inference_svc.runtime.positions.rotary import (
    Rope,
    RotaryNotLinearError,
    RotaryTable,
    find_pairing,
)

FROZEN = "frozen"  # replaces a rope type; any name that the decorator does not know would do


class RopeTables:
    """The rotary tables of a model; layers with the same RoPE share one."""

    def __init__(self, loaded: LoadedModel, rotary_calls: Sequence[RotaryCall]) -> None:
        """Store the model and the recorded calls of its rotary modules."""
        self.loaded = loaded
        self._rotary_calls = rotary_calls
        self._tables: dict[tuple[Any, ...], RotaryTable] = {}

    def find(
        self, call: ApplyCall, source: KeySource, unrotated: Tensor, rotated: Tensor
    ) -> RotaryTable:
        """Return the table that does what a rotary call did.

        Args:
            call: the recorded call of a rotary function.
            source: which of its arguments and results is the key.
            unrotated: [tokens, kv_heads, dim], the keys before the call.
            rotated: [1, kv_heads, tokens, dim], the keys after it.

        Raises:
            RopeVariesError: the frequencies depend on the sequence's length.
            ModelModeMissingError: the embedding is not a rotation of pairs.
        """
        used = used_rotary_calls(call, self._rotary_calls)
        dim = rotated.shape[3]
        identity = (call.apply, source, dim, *(id(u) for u in used))
        if identity not in self._tables:
            for rotary_call in used:
                _check_fixed(self.loaded, rotary_call)
            table = _compile(self.loaded, call, source, dim, used)
            self._tables[identity] = _best_dtype(self.loaded, table, unrotated, rotated)
        return self._tables[identity]


@torch.no_grad()
def freeze_rotary(loaded: LoadedModel) -> tuple[str, ...]:
    """Freeze the model's length-dependent frequencies; repeated calls are harmless.

    Returns:
        The rope types that were frozen, sorted; () for most models.
    """
    last = torch.tensor([[loaded.context_window - 1]], device=loaded.device)
    frozen = set()
    for module in loaded.model.modules():
        for layer_type, rope_type in _varying_types(module):
            states = torch.zeros((1, 1, 1), device=loaded.device)
            layer_types = () if layer_type is None else (layer_type,)
            module(states, last, *layer_types)  # a call with the last position sets frequencies
            if layer_type is None:
                module.rope_type = FROZEN
            else:
                module.rope_type = {**module.rope_type, layer_type: FROZEN}
            frozen.add(rope_type)
    return tuple(sorted(frozen))


def _varying_types(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """Yield (layer type, rope type) of a rotary module's length-dependent frequencies."""
    rope_type: Any = getattr(module, "rope_type", None)
    by_layer = list(rope_type.items()) if isinstance(rope_type, dict) else [(None, rope_type)]
    for layer_type, name in by_layer:
        if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
            yield layer_type, name


def _compile(
    loaded: LoadedModel,
    call: ApplyCall,
    source: KeySource,
    dim: int,
    used: Sequence[RotaryCall],
) -> RotaryTable:
    """Compile the RoPE of a call to a table for keys of `dim` elements."""
    if used:
        return _table(loaded, rope_of(call, source, used), dim, loaded.dtype)
    # Compiled twice, so that longer tables are computed without running the model during a turn.
    replayed = _table(loaded, ReplayedRope(loaded.model, source), dim, torch.float32)
    return _table(loaded, replayed.as_rope(), dim, loaded.dtype)


def _table(loaded: LoadedModel, rope: Rope, dim: int, dtype: torch.dtype) -> RotaryTable:
    try:
        pairing = find_pairing(rope, dim, loaded.device)
    except (RotaryNotLinearError, RopeOutOfReachError) as error:
        raise ModelModeMissingError(
            f"the rotary embedding of {loaded.architecture} is not a rotation of pairs: {error}",
            REMEDY,
        ) from error
    return RotaryTable(
        rope,
        pairing,
        max_tokens=loaded.context_window,
        table_dtype=dtype,
        dtype=dtype,
        device=loaded.device,
    )


def _best_dtype(
    loaded: LoadedModel, table: RotaryTable, unrotated: Tensor, rotated: Tensor
) -> RotaryTable:
    """Return the table in the dtypes that reproduce the model's rotation best."""
    candidates = [table]
    if loaded.dtype != torch.float32:
        candidates += [
            table.with_dtypes(table_dtype, torch.float32)
            for table_dtype in (torch.float32, loaded.dtype)
        ]
    expected = rotated[0].transpose(0, 1)
    return min(candidates, key=lambda candidate: distance(candidate.rotate(unrotated, 0), expected))


def _check_fixed(loaded: LoadedModel, rotary_call: RotaryCall) -> None:
    """Refuse frequencies that depend on the longest position of this or an earlier forward."""
    few = torch.arange(4, device=loaded.device)
    many = torch.cat((few, torch.tensor([loaded.context_window - 1], device=loaded.device)))
    # Positions alone, beside the last position, and alone again, after a forward with the last one.
    alone, beside, after = (rotary_call.at(positions) for positions in (few, many, few))
    for first, second, third in zip(alone, beside, after, strict=True):
        if not (torch.equal(first, second[:, : len(few)]) and torch.equal(first, third)):
            raise RopeVariesError(
                f"the rotary frequencies of {loaded.architecture} depend on the length of the "
                "sequence in a way that is not supported",
                f"lower max_position_embeddings (now {loaded.context_window}) to the length that "
                "the model was trained with before scaling",
            )
