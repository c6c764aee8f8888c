"""RopeTables: compiles the apply calls seen in a probe to tables, one per rotary embedding.

A table needs frequencies that do not change. Dynamic NTK scaling and longrope take theirs from the
longest position of a forward, and some keep them for the next: a session's keys would depend on
whoever shares its batch, and keys stored under one frequency could not be used under another. As
other servers do, we choose the frequencies once, for the longest sequence that is served, and keep
them (`freeze_rotary`): for longrope the long factors if the window is longer than the original one.
The model's own modules are set so, on this instance alone; forward and tables then agree, and so
does the "stock" model that calibration compares with, which is the model frozen the same way.

What cannot be frozen stays as it is: `RopeTables.find` tries all frequencies and refuses those that
vary. Source: the `dynamic_rope_update` decorator of transformers' modeling_rope_utils.py, which
leaves modules alone whose `rope_type` is none of those that follow the length.
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

FROZEN = "frozen"  # in place of a rope type; any name does that the decorator does not know


class RopeTables:
    """The tables of a model; layers with the same RoPE share one."""

    def __init__(self, loaded: LoadedModel, rotary_calls: Sequence[RotaryCall]) -> None:
        """Store the model and its probed calls."""
        self.loaded = loaded
        self._rotary_calls = rotary_calls
        self._tables: dict[tuple[Any, ...], RotaryTable] = {}

    def find(self, call: ApplyCall, source: KeySource, free: Tensor, turned: Tensor) -> RotaryTable:
        """Return the table that turns `free` into `turned`, as this call did.

        Args:
            call: the call of an apply function.
            source: which of its arguments is the key, and which result.
            free: [tokens, kv_heads, dim], before.
            turned: [1, kv_heads, tokens, dim], after.
        """
        used = used_rotary_calls(call, self._rotary_calls)
        dim = turned.shape[3]
        identity = (call.apply, source, dim, *(id(u) for u in used))
        if identity not in self._tables:
            for rotary_call in used:
                _check_fixed(self.loaded, rotary_call)
            table = _compile(self.loaded, call, source, dim, used)
            self._tables[identity] = _best_dtype(self.loaded, table, free, turned)
        return self._tables[identity]


@torch.no_grad()
def freeze_rotary(loaded: LoadedModel) -> tuple[str, ...]:
    """Freeze the model's length-dependent frequencies; repeating it is harmless.

    Returns:
        The rope types that were frozen, sorted; () for most models.
    """
    last = torch.tensor([[loaded.context_window - 1]], device=loaded.device)
    frozen = set()
    for module in loaded.model.modules():
        for layer_type, rope_type in _varying_types(module):
            states = torch.zeros((1, 1, 1), device=loaded.device)
            layer_types = () if layer_type is None else (layer_type,)
            module(states, last, *layer_types)  # updates its frequencies
            if layer_type is None:
                module.rope_type = FROZEN
            else:
                module.rope_type = {**module.rope_type, layer_type: FROZEN}
            frozen.add(rope_type)
    return tuple(sorted(frozen))


def _varying_types(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """Yield (layer type, rope type) of a rotary module's frequencies that follow the length."""
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
    # Else the model would run for longer tables in the middle of a turn.
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
    loaded: LoadedModel, table: RotaryTable, free: Tensor, turned: Tensor
) -> RotaryTable:
    """Return the table in the dtypes in which it repeats the model's rotation best."""
    candidates = [table]
    if loaded.dtype != torch.float32:
        candidates += [
            table.with_dtypes(table_dtype, torch.float32)
            for table_dtype in (torch.float32, loaded.dtype)
        ]
    expected = turned[0].transpose(0, 1)
    return min(candidates, key=lambda candidate: distance(candidate.rotate(free, 0), expected))


def _check_fixed(loaded: LoadedModel, rotary_call: RotaryCall) -> None:
    """Refuse frequencies that depend on the longest position of this or an earlier forward."""
    few = torch.arange(4, device=loaded.device)
    many = torch.cat((few, torch.tensor([loaded.context_window - 1], device=loaded.device)))
    alone, beside, after = (rotary_call.at(positions) for positions in (few, many, few))
    for one, two, three in zip(alone, beside, after, strict=True):
        if not (torch.equal(one, two[:, : len(few)]) and torch.equal(one, three)):
            raise RopeVariesError(
                f"the rotary frequencies of {loaded.architecture} depend on the length of the "
                "sequence in a way that cannot be frozen",
                f"lower max_position_embeddings (now {loaded.context_window}) to the length the "
                "model was trained at before scaling",
            )
