"""Recipes of layers: where what a layer caches was seen before RoPE, and the table that embeds it.

Works on what a probe recorded; each recipe is checked against what the model cached itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from inference_svc.runtime.calibration.probe import Probe, SeenIndex, SeenLayer
from inference_svc.runtime.calibration.rope_calls import ApplyCall
from inference_svc.runtime.calibration.rope_tables import RopeTables
from inference_svc.runtime.calibration.stock import SAME, distance
from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError
from inference_svc.runtime.positions.recipes import (
    ComponentRecipe,
    KeySource,
    LayerRecipe,
    PostRotary,
    ScaledRotary,
)
from inference_svc.runtime.positions.rotary import RotaryTable

MOVED_TOKENS = 13  # by how many positions the check moves tokens
# Largest relative difference of moved keys to embedded ones: rounding, and the norm's epsilon.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def layer_recipes(loaded: LoadedModel, probe: Probe) -> tuple[LayerRecipe, ...]:
    """Find every layer's recipe.

    Raises:
        UnsupportedModelError: if KV before RoPE cannot be found or turned into what is cached.
    """
    tables = RopeTables(loaded, probe.rotary_calls)
    return tuple(
        _layer_recipe(probe.layers[layer_index], probe.indexes.get(layer_index), tables)
        for layer_index in range(len(probe.layers))
    )


def before_rope(recipe: LayerRecipe, seen: SeenLayer) -> tuple[Tensor, Tensor]:
    """Return a probed layer's keys and values before RoPE, [tokens, kv_heads, dim] each."""
    calls = [(call.args, None) for call in seen.calls]
    return recipe.key.before_rope(calls, seen.key), recipe.value.before_rope(calls, seen.value)


def shape_of(seen: SeenLayer, index: SeenIndex | None) -> LayerShape:
    """Return a layer's per-token shapes."""
    tensors = (seen.key, seen.value) if index is None else (seen.key, seen.value, index.key)
    key, value, *others = ((cached.shape[1], cached.shape[3]) for cached in tensors)
    return LayerShape(key, value, others[0] if others else None)


def _layer_recipe(seen: SeenLayer, index: SeenIndex | None, tables: RopeTables) -> LayerRecipe:
    key, value = (_component_recipe(seen, cached, tables) for cached in (seen.key, seen.value))
    if seen.calls and key.source is None and value.source is None:
        raise ModelModeMissingError(
            f"a key of {tables.loaded.architecture} is changed after its rotary embedding, "
            "which is not supported yet",
            REMEDY,
        )
    by_index = None if index is None else _component_recipe(index, index.key, tables)
    if by_index is not None and by_index.source is None and index is not None and index.calls:
        raise ModelModeMissingError(
            f"an index key of {tables.loaded.architecture} is changed after its rotary embedding, "
            "which is not supported yet",
            REMEDY,
        )
    return LayerRecipe(shape_of(seen, index), key, value, by_index)


def _component_recipe(
    seen: SeenLayer | SeenIndex, cached: Tensor, tables: RopeTables
) -> ComponentRecipe:
    """Find the recipe of one component, cached as [1, heads, tokens, dim]."""
    for turned, post in _before_norms(seen, cached):
        source = _find_source(seen.calls, turned)
        if source is not None:
            free = source.before_rope([(call.args, None) for call in seen.calls], turned)
            table = tables.find(seen.calls[source.call_index], source, free, turned)
            recipe = ComponentRecipe(source, table, post and _with_scale(post, table, free))
            _check_recipe(tables.loaded, recipe, free, cached)
            return recipe
    return ComponentRecipe()


def _with_scale(post: PostRotary, rotary: RotaryTable, free: Tensor) -> PostRotary:
    return replace(post, scale=find_scale(rotary, post.norm, free))


def _before_norms(
    seen: SeenLayer | SeenIndex, cached: Tensor
) -> Iterator[tuple[Tensor, PostRotary | None]]:
    """Yield what may be the result of an apply call: the component, then what a norm made it of."""
    yield cached, None
    for call in seen.norms:
        for taken, made in ((call.taken, call.made), call.swapped()):
            if made.shape == cached.shape and torch.equal(made, cached):
                yield taken, PostRotary(call.norm)


def _find_source(calls: Sequence[ApplyCall], turned: Tensor) -> KeySource | None:
    """Find the apply call whose result the component is, or begins or ends with."""
    num_tokens, width = turned.shape[2:]
    for call_index, call in enumerate(calls):
        for arg_index, (argument, result) in enumerate(zip(call.args, call.results, strict=False)):
            if (
                not isinstance(argument, Tensor)
                or argument.dim() != 4
                or result.shape != argument.shape
            ):
                continue
            seq_dim = 2 if argument.shape[2] == num_tokens else 1
            by_head = result if seq_dim == 2 else result.transpose(1, 2)
            part_width = by_head.shape[-1]
            for first in (0, width - part_width) if part_width <= width else ():
                source = KeySource(call_index, arg_index, seq_dim, first, part_width)
                part = source.part(turned)
                if by_head.shape == part.shape and torch.equal(by_head, part):
                    return source
    return None


def _check_recipe(
    loaded: LoadedModel, recipe: ComponentRecipe, free: Tensor, cached: Tensor
) -> None:
    """Refuse a recipe that does not turn KV before RoPE into what the model cached."""
    error = distance(recipe.embed(free, 0), cached[0].transpose(0, 1))
    if not error <= SAME:  # written so that NaN is refused too
        raise ModelModeMissingError(
            f"the rotary embedding of {loaded.architecture} could not be reproduced "
            f"(error {error:.1e})",
            REMEDY,
        )


def find_scale(rotary: RotaryTable, norm: nn.Module, free: Tensor) -> Tensor | None:
    """Return the weights of a norm if it is of this kind, else None.

    Args:
        rotary: the embedding before the norm.
        norm: the norm, a module over the last dimension, [..., dim].
        free: some keys before RoPE, [n, kv_heads, dim], in the model's dtype.
    """
    scale: Tensor = norm(torch.ones_like(free[0, 0])).float()
    if not (scale.isfinite().all() and scale.abs().min() > 0):
        return None
    embedded, expected = (norm(rotary.rotate(free, start)) for start in (0, MOVED_TOKENS))
    ScaledRotary(rotary, scale).move_into(embedded, 0, MOVED_TOKENS, embedded)
    return scale if distance(embedded, expected) <= TOLERANCE[free.dtype] else None
