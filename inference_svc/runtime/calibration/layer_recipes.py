"""Layer recipes: where a layer's KV was recorded before RoPE, and the table that embeds it.

Works on the records of a probe; each recipe is checked against what the model itself has cached.
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

MOVED_TOKENS = 13  # number of positions by which the check moves tokens
# Largest relative difference of moved to embedded keys: from rounding, and the norm's epsilon.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def layer_recipes(loaded: LoadedModel, probe: Probe) -> tuple[LayerRecipe, ...]:
    """Find every layer's recipe.

    Raises:
        UnsupportedModelError: KV before RoPE cannot be found, or not be embedded to what is cached.
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
    """Return the per-token shapes of a probed layer."""
    tensors = (seen.key, seen.value) if index is None else (seen.key, seen.value, index.key)
    key, value, *indexes = ((cached.shape[1], cached.shape[3]) for cached in tensors)
    return LayerShape(key, value, indexes[0] if indexes else None)


def _layer_recipe(seen: SeenLayer, index: SeenIndex | None, tables: RopeTables) -> LayerRecipe:
    key, value = (_component_recipe(seen, cached, tables) for cached in (seen.key, seen.value))
    if seen.calls and key.source is None and value.source is None:
        raise ModelModeMissingError(
            f"{tables.loaded.architecture} changes keys after their rotary embedding, which "
            "is not supported yet",
            REMEDY,
        )
    by_index = None if index is None else _component_recipe(index, index.key, tables)
    if by_index is not None and by_index.source is None and index is not None and index.calls:
        raise ModelModeMissingError(
            f"{tables.loaded.architecture} changes index keys after their rotary embedding, "
            "which is not supported yet",
            REMEDY,
        )
    return LayerRecipe(shape_of(seen, index), key, value, by_index)


def _component_recipe(
    seen: SeenLayer | SeenIndex, cached: Tensor, tables: RopeTables
) -> ComponentRecipe:
    """Find the recipe of a component that was cached as [1, heads, tokens, dim]."""
    for rotated, post in _before_norms(seen, cached):
        source = _find_source(seen.calls, rotated)
        if source is not None:
            unrotated = source.before_rope([(call.args, None) for call in seen.calls], rotated)
            table = tables.find(seen.calls[source.call_index], source, unrotated, rotated)
            recipe = ComponentRecipe(source, table, post and _with_scale(post, table, unrotated))
            _check_recipe(tables.loaded, recipe, unrotated, cached)
            return recipe
    return ComponentRecipe()


def _with_scale(post: PostRotary, rotary: RotaryTable, unrotated: Tensor) -> PostRotary:
    return replace(post, scale=find_scale(rotary, post.norm, unrotated))


def _before_norms(
    seen: SeenLayer | SeenIndex, cached: Tensor
) -> Iterator[tuple[Tensor, PostRotary | None]]:
    """Yield possible results of a rotary call: the component itself, then the inputs of its norm.

    The second value is the norm between the two, or None.
    """
    yield cached, None
    for call in seen.norms:
        for argument, result in ((call.argument, call.result), call.transposed()):
            if result.shape == cached.shape and torch.equal(result, cached):
                yield argument, PostRotary(call.norm)


def _find_source(calls: Sequence[ApplyCall], rotated: Tensor) -> KeySource | None:
    """Find the rotary call whose result is all of the component, or its beginning or end."""
    num_tokens, width = rotated.shape[2:]
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
                part = source.part(rotated)
                if by_head.shape == part.shape and torch.equal(by_head, part):
                    return source
    return None


def _check_recipe(
    loaded: LoadedModel, recipe: ComponentRecipe, unrotated: Tensor, cached: Tensor
) -> None:
    """Refuse a recipe that does not embed KV before RoPE to what the model has cached."""
    error = distance(recipe.embed(unrotated, 0), cached[0].transpose(0, 1))
    if not error <= SAME:  # written so that NaN is refused too
        raise ModelModeMissingError(
            f"the rotary embedding of {loaded.architecture} could not be reproduced "
            f"(error {error:.1e})",
            REMEDY,
        )


def find_scale(rotary: RotaryTable, norm: nn.Module, unrotated: Tensor) -> Tensor | None:
    """Return the weights, [dim], of a norm that only scales by weights; None: it does more.

    Args:
        rotary: the embedding before the norm.
        norm: the norm, a module over the last dimension, [..., dim].
        unrotated: some keys before RoPE, [n, kv_heads, dim], in the model's dtype.
    """
    scale: Tensor = norm(torch.ones_like(unrotated[0, 0])).float()
    if not (scale.isfinite().all() and scale.abs().min() > 0):
        return None
    embedded, expected = (norm(rotary.rotate(unrotated, start)) for start in (0, MOVED_TOKENS))
    ScaledRotary(rotary, scale).move_into(embedded, 0, MOVED_TOKENS, embedded)
    return scale if distance(embedded, expected) <= TOLERANCE[unrotated.dtype] else None
