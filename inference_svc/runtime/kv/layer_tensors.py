"""Tensors of every layer, cut and divided at once; and how one sequence's tokens are reached.

ContiguousTokens   per layer [1, kv_heads, slots, dim]: one sequence's, side by side
SlotTensors        per layer [slots, kv_heads, dim]: of many, in any order (`Places`)
TokenTensors       one sequence's by position, however they lie
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from inference_svc.runtime.memory import copy_to_device


@dataclass(frozen=True)
class LayerShape:
    """Per-token shapes of one layer's components.

    Attributes:
        key: (kv_heads, head_dim).
        value: (kv_heads, value_dim).
        index: (1, index_dim) of the keys by which the layer chooses those it attends to (DSA);
            None: it attends to all.
        is_latent: whether attention is over key and value side by side, of one head each; then
            that is how sequences' KV has them.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    index: tuple[int, int] | None = None
    is_latent: bool = False

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the components that there are."""
        if not self.key[1]:
            return ()
        return (self.key, self.value) if self.index is None else (self.key, self.value, self.index)


NO_PART = (1, 0)  # the shape of a component that a layer has not
NOTHING = LayerShape(NO_PART, NO_PART)  # of the one layer of a model that caches states alone


class LayerTensors(ABC):
    """One tensor per layer; layers of equal shape lie in one stack, to be cut at once.

    Attributes:
        token_dim: the dimension of one layer's tensor that counts token slots.
        layers: the tensors.
        dtype: their element type.
        device: the device that they are on.
    """

    token_dim: ClassVar[int]

    def __init__(self, stacks: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Store the stacks.

        Args:
            stacks: (tensor [layers, ...], indices of these layers); together all layers.
        """
        self._stacks = stacks
        self._num_layers = sum(len(indices) for _, indices in stacks)
        self.dtype, self.device = stacks[0][0].dtype, stacks[0][0].device
        self.layers = self._spread([stack.unbind(0) for stack, _ in stacks])

    def __getitem__(self, layer_index: int) -> Tensor:
        return self.layers[layer_index]

    @staticmethod
    @abstractmethod
    def sizes(kv_heads: int, num_slots: int, dim: int) -> tuple[int, ...]:
        """Return the sizes of one layer's tensor."""

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """View token slots [first, first + num_tokens) of every layer.

        Half the cost of cutting them one by one.
        """
        dim = self.token_dim + 1
        return self._spread(
            [stack.narrow(dim, first, num_tokens).unbind(0) for stack, _ in self._stacks]
        )

    def _spread(self, views: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Bring the stacks' views into the order of layers."""
        if len(views) == 1:
            return views[0]
        by_layer = {
            layer_index: view
            for stack_views, (_, indices) in zip(views, self._stacks, strict=True)
            for layer_index, view in zip(indices, stack_views, strict=True)
        }
        return [by_layer[layer_index] for layer_index in range(self._num_layers)]


class ContiguousTokens(LayerTensors):
    """Per layer [1, kv_heads, slots, dim], as attention takes them."""

    token_dim = 2
    lies_by_position = False

    @staticmethod
    def sizes(kv_heads: int, num_slots: int, dim: int) -> tuple[int, ...]:
        """Return the sizes of one layer's tensor."""
        return 1, kv_heads, num_slots, dim

    def group_of(self, _layer_index: int) -> int:
        """Return which group of layers has its tokens where this one has: all are one."""
        return 0

    def first_token(self, _layer_index: int) -> int:
        """Return the first token that a layer holds: all hold all."""
        return 0

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """View a layer's tokens, [num_tokens, kv_heads, dim]."""
        return self.layers[layer_index][0].narrow(1, first, num_tokens).transpose(0, 1)

    @contextmanager
    def filling(self, layer_index: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield a view of a layer's tokens, [num_tokens, kv_heads, dim]."""
        yield self.read(layer_index, first, num_tokens)

    def region(self, layer_index: int) -> Tensor:
        """View the memory that a layer's tokens are in, [slots, kv_heads, dim]."""
        return self.layers[layer_index][0].transpose(0, 1)

    def slot_index(self, _layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return where in `region` tokens are, [num_tokens] int64 on the device."""
        return torch.arange(first, first + num_tokens, device=self.device)


class SlotTensors(LayerTensors):
    """Per layer [slots, kv_heads, dim], as blocks and pages have them."""

    token_dim = 0

    @staticmethod
    def sizes(kv_heads: int, num_slots: int, dim: int) -> tuple[int, ...]:
        """Return the sizes of one layer's tensor."""
        return num_slots, kv_heads, dim

    def spread_over(self, places: Sequence[int], parts: Sequence[tuple[int, int]]) -> "SlotTensors":
        """Return the same slots, of layers each of which has one of these tensors.

        Args:
            places: by layer, which of them.
            parts: by layer, a token's shape; one that takes several slots has as many in a row.
        """
        spread = SlotTensors(self._stacks)
        spread.layers = [
            layer if layer.shape[1:] == part else layer.view(-1, *part)
            for layer, part in zip(map(self.layers.__getitem__, places), parts, strict=True)
        ]
        return spread

    def copy_runs(self, size: int, sources: Tensor, targets: Tensor) -> None:
        """Copy runs of `size` slots to others, of all tensors; both [n] int64: their numbers."""
        for stack, _ in self._stacks:
            runs = stack.view(len(stack), -1, size, *stack.shape[2:])
            runs.index_copy_(1, targets, runs.index_select(1, sources))

    def seen_by_heads(self) -> ContiguousTokens:
        """View the same slots as attention takes them."""
        return ContiguousTokens(
            [(stack.transpose(1, 2).unsqueeze(1), indices) for stack, indices in self._stacks]
        )


class TokenTensors(Protocol):
    """One component of one sequence's tokens, keys or values, by position; of every layer.

    Attributes:
        dtype: the element type.
        device: the device that they are on.
        lies_by_position: whether a layer that holds the last tokens only has a token wherever it
            would be, too, if others were held; else they lie in rows from the first one on.
    """

    dtype: torch.dtype
    device: torch.device
    lies_by_position: bool

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """Return tokens [first, first + num_tokens) by layer, each [1, kv_heads, num_tokens, dim].

        To be read: views, or where tokens lie apart copies, made when a layer is asked for. Of a
        layer that does not hold all of them those are missing that it does not.
        """

    def group_of(self, layer_index: int) -> int:
        """Return a number that layers have in common whose tokens have the same slots."""

    def first_token(self, layer_index: int) -> int:
        """Return the first token that a layer holds."""

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return a layer's tokens, [num_tokens, kv_heads, dim]; a view, or a copy."""

    def filling(
        self, layer_index: int, first: int, num_tokens: int
    ) -> AbstractContextManager[Tensor]:
        """Yield [num_tokens, kv_heads, dim], to be written: a layer's tokens afterwards."""

    def region(self, layer_index: int) -> Tensor:
        """View the memory that a layer's tokens are in, [slots, kv_heads, dim]; others', too."""

    def slot_index(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return where in `region` tokens are, [num_tokens] int64 on the device."""


T = TypeVar("T", bound=LayerTensors)


def token_items_of(shapes: Sequence[LayerShape]) -> int:
    """Count the elements of a token's components, all layers."""
    return sum(heads * dim for shape in shapes for heads, dim in shape.parts)


def divided(
    flat: Tensor, shapes: Sequence[LayerShape], num_slots: int | Sequence[int], kind: type[T]
) -> tuple[T, T, T | None]:
    """Divide memory between keys, values and index keys, and each of them between layers.

    Args:
        flat: with room for all of it.
        shapes: of all layers.
        num_slots: token slots of each layer's tensor, or of each one by layer.
        kind: how a layer's tensor is laid out.

    Returns:
        Keys, values and index keys; these are empty tensors of layers without an index, and None if
        no layer has one.
    """
    offset = 0
    slots_by_layer = [num_slots] * len(shapes) if isinstance(num_slots, int) else num_slots

    def divide(per_token: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Sequence[int]]]:
        nonlocal offset
        stacks: list[tuple[Tensor, Sequence[int]]] = []
        by_layer = list(zip(per_token, slots_by_layer, strict=True))
        for one in dict.fromkeys(by_layer):
            indices = [index for index, other in enumerate(by_layer) if other == one]
            (heads, dim), slots = one
            num_items = len(indices) * heads * slots * dim
            sizes = kind.sizes(heads, slots, dim)
            stack = flat.narrow(0, offset, num_items).view(len(indices), *sizes)
            stacks.append((stack, indices))
            offset += num_items
        return stacks

    if _lie_together(shapes):
        width = shapes[0].key[1]
        joint = divide([(1, width + shapes[0].value[1])] * len(shapes))
        keys = [(stack[..., :width], indices) for stack, indices in joint]
        values = [(stack[..., width:], indices) for stack, indices in joint]
    else:
        keys = divide([shape.key for shape in shapes])
        values = divide([shape.value for shape in shapes])
    if all(shape.index is None for shape in shapes):
        return kind(keys), kind(values), None
    return kind(keys), kind(values), kind(divide([shape.index or NO_PART for shape in shapes]))


def _lie_together(shapes: Sequence[LayerShape]) -> bool:
    """Whether a token's key and value lie side by side: only if all layers have the same."""
    return len({(shape.key, shape.value) for shape in shapes}) == 1 and all(
        shape.is_latent for shape in shapes
    )


def side_by_side(one: Tensor, other: Tensor) -> Tensor:
    """Return two components of the same tokens as one, [..., dim of one + dim of the other].

    A view where that is how they lie, else a copy.
    """
    width = one.shape[-1] + other.shape[-1]
    lies_so = (
        one.data_ptr() + one.shape[-1] * one.itemsize == other.data_ptr()
        and one.stride() == other.stride()
        and one.stride(-2) >= width
    )
    if lies_so:
        return one.as_strided((*one.shape[:-1], width), one.stride())
    return torch.cat((one, other), dim=-1)


class Places:
    """Some token slots of tensors [slots, kv_heads, dim], in the order of their tokens."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self._num_slots = len(slots)
        self._first = slots[0] if slots else 0
        self._index: Tensor | None = None
        if any(slot != self._first + offset for offset, slot in enumerate(slots)):
            self._index = copy_to_device(device, torch.tensor(slots))

    @classmethod
    def at(cls, index: Tensor) -> "Places":
        """Return the slots that [n] int64 names, whatever it names when they are used."""
        places = cls((), index.device)
        places._index = index
        return places

    def of(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """View a tensor from some slot on, with [n] int64 of slots from there; None: in order."""
        if self._index is None:
            return tensor.narrow(0, self._first, self._num_slots), None
        return tensor, self._index

    def read(self, tensor: Tensor) -> Tensor:
        """Return the slots' rows, [slots here, kv_heads, dim]; a view if they lie side by side."""
        if self._index is None:
            return tensor.narrow(0, self._first, self._num_slots)
        return tensor.index_select(0, self._index)

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Copy rows, as `read` returns them, to the slots."""
        if self._index is None:
            tensor.narrow(0, self._first, self._num_slots).copy_(rows)
        else:
            tensor.index_copy_(0, self._index, rows.to(tensor))  # dtype and device
