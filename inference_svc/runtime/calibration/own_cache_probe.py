"""Own-cache probe: finds out what the layers of a model's own cache hold (mode "own").

The model runs over one sequence, and after each chunk the contents of its cache's layers are
sampled. A tensor with one entry for each `stride` tokens, whose entries never change, is stored as
token rows. A tensor of bounded size is stored as a state. Anything else is refused.

Strides and bounds depend on numbers that layers hold from the start (a window, a rate). So chunks
end just before, at and just behind each of these numbers, and behind twice the number.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.kv.own_layers import (
    ABSENT,
    OwnLayer,
    OwnTensor,
    Part,
    is_same,
    parts_of,
)
from inference_svc.runtime.model.capture import ForwardCall
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.refusals import REMEDY, ModelModeMissingError
from inference_svc.runtime.positions.recipes import ComponentRecipe, LayerRecipe

MOST_TOKENS = 16384  # most tokens of the sequence
FEWEST_TOKENS = 11


class _Ends(NamedTuple):
    """The ends of the chunks, and how sizes that were sampled there are classified.

    Attributes:
        ends: positions after the chunks' last tokens, in order.
        marks: numbers that layers hold before the first token, and 1.
        is_all: whether the last end is that of the longest possible sequence.
    """

    ends: Sequence[int]
    marks: Sequence[int]
    is_all: bool

    @classmethod
    def of(cls, loaded: LoadedModel, layers: Sequence[Any]) -> "_Ends":
        """Choose the ends.

        Raises:
            ModelModeMissingError: the sequence would be too long.
        """
        held = [value for layer in layers for value in parts_of(layer).values()]
        marks = sorted({1} | {value for value in held if type(value) is int and value > 1})
        longest = max(2 * marks[-1] + 2, FEWEST_TOKENS)
        last = min(longest, loaded.context_window - 1)
        if last > MOST_TOKENS:
            raise ModelModeMissingError(
                f"{loaded.architecture} may change what it keeps after {MOST_TOKENS} tokens", REMEDY
            )
        around = {times * mark + off for mark in marks for times in (1, 2) for off in (-1, 0, 1)}
        ends = sorted({end for end in around if 0 < end < last} | {FEWEST_TOKENS - 1, last})
        return cls(ends, marks, last < longest)

    def stride(self, sizes: Sequence[int]) -> int:
        """Return the number of tokens per entry, by the sizes at all ends; 0: there is none."""
        for stride in self.marks:
            expected = [end // stride for end in self.ends]
            if [max(size, 0) for size in sizes] == expected:
                return stride
        return 0

    def is_bounded(self, sizes: Sequence[int]) -> bool:
        """Whether a tensor stops growing in the first half, or no longer sequence is possible."""
        seen = zip(self.ends, sizes, strict=True)
        half = [size for end, size in seen if 2 * end <= self.ends[-1]]
        return self.is_all or max(half) == max(sizes)


@torch.inference_mode()
def find_own_layers(loaded: LoadedModel) -> tuple[OwnLayer, ...]:
    """Return a description of each layer of the model's own cache.

    Raises:
        ModelModeMissingError: a part of a layer grows in a way that is not supported.
        Exception: from the model.
    """
    cache = DynamicCache(config=loaded.model.config)
    layers: Sequence[Any] = cache.layers
    if not layers:
        raise ModelModeMissingError(f"the cache of {loaded.architecture} has no layers", REMEDY)
    ends = _Ends.of(loaded, layers)
    samples: list[list[dict[Part, Any]]] = [[] for _ in layers]
    call, first = ForwardCall(loaded.model), 0
    for end in ends.ends:
        token_ids = [(7 * i + 3) % loaded.vocab_size for i in range(first, end)]
        call(
            torch.tensor([token_ids], device=loaded.device),
            torch.arange(first, end, device=loaded.device)[None],
            torch.zeros(1, dtype=torch.long, device=loaded.device),
            cache,
        )
        for layer, seen in zip(layers, samples, strict=True):
            seen.append(_copy(parts_of(layer)))
        first = end
    return tuple(_describe(loaded, *seen, ends) for seen in enumerate(samples))


def _copy(held: dict[Part, Any]) -> dict[Part, Any]:
    """Copy the tensors among the parts; parts that are the same tensor share a copy."""
    copies: dict[int, Tensor] = {}
    for value in held.values():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = value.clone()
    return {
        part: copies[id(value)] if isinstance(value, Tensor) else value
        for part, value in held.items()
    }


def _describe(
    loaded: LoadedModel, index: int, held: Sequence[dict[Part, Any]], ends: _Ends
) -> OwnLayer:
    """Describe a layer by the parts that it held after each chunk.

    Raises:
        ModelModeMissingError: see `find_own_layers`.
    """
    numbers: list[Part] = []
    tensors: list[OwnTensor] = []
    twins: list[tuple[Part, Part]] = []
    fixed: list[tuple[Part, Any]] = []
    for part in held[-1]:
        values = [parts.get(part) for parts in held]
        twin = next((known for known in tensors if _are_twins(held, part, known.part)), None)
        if all(is_same(value, values[0]) for value in values):
            fixed.append((part, values[0]))
        elif all(isinstance(value, int) for value in values):
            numbers.append(part)
        elif twin is not None:
            twins.append((part, twin.part))
        else:
            tensor = _tensor(part, values, ends)
            if tensor is None or (tensor.stride and tensor.dtype != loaded.dtype):
                name = part[0] if part[1] is None else f"{part[0]}[{part[1]!r}]"
                raise ModelModeMissingError(
                    f"layer {index} of {loaded.architecture} keeps {name}, which has neither one "
                    "entry for each token nor a bounded size",
                    REMEDY,
                )
            tensors.append(tensor)
    return OwnLayer(index, tuple(numbers), tuple(tensors), tuple(twins), tuple(fixed))


def _are_twins(held: Sequence[dict[Part, Any]], part: Part, known: Part) -> bool:
    """Whether two parts were the same tensor after every chunk."""
    return all(parts.get(part) is parts[known] for parts in held)


def _tensor(part: Part, values: Sequence[Any], ends: _Ends) -> OwnTensor | None:
    """Describe a tensor by its values after each chunk; None: it grows in no supported way."""
    present = [value for value in values if value is not None]
    if not all(isinstance(value, Tensor) for value in present):
        return None
    if len({(value.dim(), value.dtype) for value in present}) > 1:
        return None
    largest = tuple(max(sizes) for sizes in zip(*(value.shape for value in present), strict=True))
    varying = [
        dim for dim, size in enumerate(largest) if any(v.shape[dim] != size for v in present)
    ]
    dtype = present[0].dtype
    if not varying:
        return OwnTensor(part, largest, None, dtype)
    dim = varying[0]
    sizes = [ABSENT if value is None else value.shape[dim] for value in values]
    stride = ends.stride(sizes) if _only_grows(present, dim) else 0
    if len(varying) > 1 or not (stride or ends.is_bounded(sizes)):
        return None
    shape = (*largest[:dim], 1, *largest[dim + 1 :]) if stride else largest
    return OwnTensor(part, shape, dim, dtype, stride)


def _only_grows(values: Sequence[Tensor], dim: int) -> bool:
    """Whether each value of a tensor begins with the value before it."""
    return all(
        later.shape[dim] >= earlier.shape[dim]
        and later.narrow(dim, 0, earlier.shape[dim]).equal(earlier)
        for earlier, later in pairwise(values)
    )


def own_recipes(layers: Sequence[OwnLayer]) -> tuple[LayerRecipe, ...]:
    """Return the recipe by which token rows are stored unchanged, in one layer; () without rows."""
    width = max(2, sum(layer.row_width for layer in layers))  # at least a value for each component
    shape = LayerShape((1, width - width // 2), (1, width // 2))
    has_rows = any(layer.row_width for layer in layers)
    return (LayerRecipe(shape, ComponentRecipe(), ComponentRecipe()),) if has_rows else ()
