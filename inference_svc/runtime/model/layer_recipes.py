"""Recipes of layers: where a layer's key before RoPE was seen, and the table that re-embeds it.

Works on what a probe recorded; each table is checked against the keys the model rotated itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.kv.kv_slab import LayerShape
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.probe import (
    Probe,
    RotaryCall,
    SeenLayer,
    rope_of,
    used_rotary_calls,
)
from inference_svc.runtime.model.recipes import KeySource, LayerRecipe
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError, RopeVariesError
from inference_svc.runtime.model.rotary import RotaryNotLinearError, RotaryTable, find_pairing

SAME = 1e-4  # relative; what should not change at all differs by rounding at most


def layer_recipes(loaded: LoadedModel, probe: Probe) -> tuple[LayerRecipe, ...]:
    """Find every layer's recipe.

    Raises:
        UnsupportedModelError: if keys before RoPE cannot be found or turned into those cached.
    """
    tables: dict[tuple[Any, ...], RotaryTable] = {}
    return tuple(
        _layer_recipe(loaded, probe.layers[index], probe.rotary_calls, tables)
        for index in range(len(probe.layers))
    )


def _layer_recipe(
    loaded: LoadedModel,
    seen: SeenLayer,
    rotary_calls: Sequence[RotaryCall],
    tables: dict[tuple[Any, ...], RotaryTable],
) -> LayerRecipe:
    """Find one layer's recipe; layers with the same RoPE share a table."""
    key_shape = (seen.key.shape[1], seen.key.shape[3])
    value_shape = (seen.value.shape[1], seen.value.shape[3])
    found = _find_source(seen)
    if found is None:
        if seen.calls:
            raise ModelModeMissingError(
                f"a key of {loaded.architecture} is changed after its rotary embedding, "
                "which is not supported yet",
                REMEDY,
            )
        return LayerRecipe(LayerShape(key_shape, value_shape), None, None)
    source, result_index = found
    call = seen.calls[source.call_index]
    used = used_rotary_calls(call, rotary_calls)
    identity = (call.apply, source, result_index, key_shape[1], *(id(u) for u in used))
    if identity not in tables:
        for rotary_call in used:
            _check_fixed(loaded, rotary_call)
        tables[identity] = _compile(loaded, seen, source, result_index, used)
        tables[identity] = _best_dtype(loaded, tables[identity], seen, source)
    table = tables[identity]
    _check_table(loaded, table, seen, source)
    return LayerRecipe(LayerShape(key_shape, value_shape), source, table)


def _find_source(seen: SeenLayer) -> tuple[KeySource, int] | None:
    """Find the apply call whose result the key is, or begins with, and the result's index."""
    num_tokens, width = seen.key.shape[2:]
    for call_index, call in enumerate(seen.calls):
        for result_index, result in enumerate(call.results):
            argument = call.args[result_index] if result_index < len(call.args) else None
            if (
                not isinstance(argument, Tensor)
                or argument.dim() != 4
                or result.shape != argument.shape
            ):
                continue
            seq_dim = 2 if argument.shape[2] == num_tokens else 1
            turned = result if seq_dim == 2 else result.transpose(1, 2)
            part = seen.key[..., : turned.shape[-1]]
            if (
                turned.shape[-1] <= width
                and turned.shape == part.shape
                and torch.equal(turned, part)
            ):
                return KeySource(call_index, result_index, seq_dim, turned.shape[-1]), result_index
    return None


def _compile(
    loaded: LoadedModel,
    seen: SeenLayer,
    source: KeySource,
    result_index: int,
    used: Sequence[RotaryCall],
) -> RotaryTable:
    rope = rope_of(
        seen.calls[source.call_index],
        result_index=result_index,
        seq_dim=source.seq_dim,
        width=source.width,
        rotary_calls=used,
    )
    try:
        pairing = find_pairing(rope, seen.key.shape[3], loaded.device)
    except RotaryNotLinearError as error:
        raise ModelModeMissingError(
            f"the rotary embedding of {loaded.architecture} is not a rotation of pairs: {error}",
            REMEDY,
        ) from error
    return RotaryTable(
        rope,
        pairing,
        max_tokens=loaded.context_window,
        table_dtype=loaded.dtype,
        dtype=loaded.dtype,
        device=loaded.device,
    )


def _best_dtype(
    loaded: LoadedModel, table: RotaryTable, seen: SeenLayer, source: KeySource
) -> RotaryTable:
    """Return the table in the dtypes in which it repeats the model's rotation best."""
    candidates = [table]
    if loaded.dtype != torch.float32:
        candidates += [
            table.with_dtypes(table_dtype, torch.float32)
            for table_dtype in (torch.float32, loaded.dtype)
        ]
    return min(candidates, key=lambda candidate: _rotation_error(candidate, seen, source))


def _check_table(
    loaded: LoadedModel, table: RotaryTable, seen: SeenLayer, source: KeySource
) -> None:
    """Refuse a table that does not turn the keys before RoPE into the keys the model cached."""
    error = _rotation_error(table, seen, source)
    if error > SAME:
        raise ModelModeMissingError(
            f"the rotary embedding of {loaded.architecture} could not be reproduced "
            f"(error {error:.1e})",
            REMEDY,
        )


def _check_fixed(loaded: LoadedModel, rotary_call: RotaryCall) -> None:
    """Refuse frequencies that depend on the longest position of this or an earlier forward."""
    few = torch.arange(4, device=loaded.device)
    many = torch.cat((few, torch.tensor([loaded.context_window - 1], device=loaded.device)))
    alone, beside, after = (rotary_call.at(positions) for positions in (few, many, few))
    for one, two, three in zip(alone, beside, after, strict=True):
        if not (torch.equal(one, two[:, : len(few)]) and torch.equal(one, three)):
            raise RopeVariesError(
                f"the rotary frequencies of {loaded.architecture} depend on the length of the "
                "sequence, which is not supported yet",
                f"lower max_position_embeddings (now {loaded.context_window}) to the length the "
                "model was trained at before scaling",
            )


def _rotation_error(table: RotaryTable, seen: SeenLayer, source: KeySource) -> float:
    return distance(table.rotate(free_rows(source, seen), 0), seen.key[0].transpose(0, 1))


def free_rows(source: KeySource | None, seen: SeenLayer) -> Tensor:
    """Return the layer's keys before RoPE, [tokens, kv_heads, dim]."""
    if source is None:
        return seen.key[0].transpose(0, 1)
    return source.free_rows([(call.args, None) for call in seen.calls], seen.key)


def distance(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    reference = reference.float()
    return float((value.float() - reference).abs().max() / reference.abs().max().clamp_min(1e-30))
