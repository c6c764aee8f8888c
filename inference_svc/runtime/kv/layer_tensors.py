"""KV tensors of all layers, which are viewed and allocated together.

ContiguousTokens   per layer [1, kv_heads, slots, dim]: one sequence's tokens, side by side
SlotTensors        per layer [slots, kv_heads, dim]: many sequences' tokens, in any order (`Places`)
TokenTensors       the interface to one sequence's tokens by position, however they lie
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from inference_svc.runtime.memory import copy_to_device


@dataclass(frozen=True)
class LayerShape:
    """Per-token shapes of one layer's components.

    Attributes:
        key: (kv_heads, head_dim).
        value: (kv_heads, value_dim).
        index: (1, index_dim) of the index keys, by which the layer chooses the tokens that it
            attends to (DSA); None: it attends to all.
        is_latent: whether attention reads key and value, of one head each, as one vector; working
            KV then has them side by side.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    index: tuple[int, int] | None = None
    is_latent: bool = False

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the components that the layer has."""
        if not self.key[1]:
            return ()
        return (self.key, self.value) if self.index is None else (self.key, self.value, self.index)


NO_PART = (1, 0)  # the shape of a component that a layer does not have
NOTHING = LayerShape(NO_PART, NO_PART)  # the one layer of a model that caches states only


class LayerTensors(ABC):
    """One tensor per layer; layers of equal shape lie in one stack, and are viewed together.

    Attributes:
        token_dim: index of the token slots' dimension in a layer's tensor.
        layers: the tensors.
        dtype: their element type.
        device: the device that they are on.
    """

    token_dim: ClassVar[int]

    def __init__(self, stacks: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """Store the stacks.

        Args:
            stacks: (tensor [layers, ...], indices of these layers); together they have all layers.
        """
        self._stacks = stacks
        self._num_layers = sum(len(indices) for _, indices in stacks)
        self.dtype, self.device = stacks[0][0].dtype, stacks[0][0].device
        self.layers = self._in_layer_order([stack.unbind(0) for stack, _ in stacks])

    def __getitem__(self, layer_index: int) -> Tensor:
        return self.layers[layer_index]

    @staticmethod
    @abstractmethod
    def sizes(kv_heads: int, num_slots: int, dim: int) -> tuple[int, ...]:
        """Return the sizes of one layer's tensor."""

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """View token slots [first, first + num_tokens) of every layer.

        Viewing stacks takes half the time of viewing layers one by one.
        """
        dim = self.token_dim + 1
        return self._in_layer_order(
            [stack.narrow(dim, first, num_tokens).unbind(0) for stack, _ in self._stacks]
        )

    def _in_layer_order(self, views: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the layers of the stacks' views in the order of layers."""
        if len(views) == 1:
            return views[0]
        by_layer = {
            layer_index: view
            for stack_views, (_, indices) in zip(views, self._stacks, strict=True)
            for layer_index, view in zip(indices, stack_views, strict=True)
        }
        return [by_layer[layer_index] for layer_index in range(self._num_layers)]


class ContiguousTokens(LayerTensors):
    """Per layer [1, kv_heads, slots, dim], the shape that attention takes."""

    token_dim = 2
    lies_by_position = False

    @staticmethod
    def sizes(kv_heads: int, num_slots: int, dim: int) -> tuple[int, ...]:
        """Return the sizes of one layer's tensor."""
        return 1, kv_heads, num_slots, dim

    def group_of(self, _layer_index: int) -> int:
        """Return 0: the tokens of all layers have the same slots."""
        return 0

    def first_token(self, _layer_index: int) -> int:
        """Return 0: every layer holds all tokens."""
        return 0

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """View a layer's tokens, [num_tokens, kv_heads, dim]."""
        return self.layers[layer_index][0].narrow(1, first, num_tokens).transpose(0, 1)

    @contextmanager
    def filling(self, layer_index: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield a view of a layer's tokens, [num_tokens, kv_heads, dim], for the caller to fill."""
        yield self.read(layer_index, first, num_tokens)

    def room(self, layer_index: int, first: int, _num_tokens: int) -> "TokenRoom":
        """Return where a layer's tokens from `first` on lie."""
        return TokenRoom(self.layers[layer_index], self.token_dim, first)

    def region(self, layer_index: int) -> Tensor:
        """View the memory that holds a layer's tokens, [slots, kv_heads, dim]."""
        return self.layers[layer_index][0].transpose(0, 1)

    def slot_index(self, _layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return the slots of tokens in `region`, [num_tokens] int64 on the device."""
        return torch.arange(first, first + num_tokens, device=self.device)


class SlotTensors(LayerTensors):
    """Per layer [slots, kv_heads, dim], the layout of blocks and pages."""

    token_dim = 0

    @staticmethod
    def sizes(kv_heads: int, num_slots: int, dim: int) -> tuple[int, ...]:
        """Return the sizes of one layer's tensor."""
        return num_slots, kv_heads, dim

    def by_layer(self, places: Sequence[int], parts: Sequence[tuple[int, int]]) -> "SlotTensors":
        """Return the same memory by layer, where layers share these tensors (`LayerGroups`).

        Args:
            places: by layer, the index of its tensor.
            parts: by layer, a token's (heads, dim); a token may take several adjacent slots.
        """
        layers = SlotTensors(self._stacks)
        layers.layers = [
            layer if layer.shape[1:] == part else layer.view(-1, *part)
            for layer, part in zip(map(self.layers.__getitem__, places), parts, strict=True)
        ]
        return layers

    def copy_runs(self, size: int, sources: Tensor, targets: Tensor) -> None:
        """Copy runs of `size` adjacent slots within all tensors.

        Args:
            size: number of slots of a run; run n begins at slot n * size.
            sources: [n] int64, numbers of the runs to copy.
            targets: [n] int64, numbers of the runs to overwrite.
        """
        for stack, _ in self._stacks:
            runs = stack.view(len(stack), -1, size, *stack.shape[2:])
            runs.index_copy_(1, targets, runs.index_select(1, sources))

    def head_first(self) -> ContiguousTokens:
        """View the same slots as [1, kv_heads, slots, dim] per layer, the shape of attention."""
        return ContiguousTokens(
            [(stack.transpose(1, 2).unsqueeze(1), indices) for stack, indices in self._stacks]
        )


class TokenRoom(NamedTuple):
    """Where tokens lie in a layer's tensor, whose dimension 1 are the heads.

    Attributes:
        layer: the tensor.
        token_dim: its dimension of token slots.
        first: the slot of the first token; the others follow it.
        slots: [n] int64, the slots instead, if they are not adjacent; `first` is 0 then.
    """

    layer: Tensor
    token_dim: int
    first: int = 0
    slots: Tensor | None = None


class TokenTensors(Protocol):
    """One component (keys, values or index keys) of one sequence's tokens, by position and layer.

    Attributes:
        dtype: the element type.
        device: the device of the tensors.
        lies_by_position: whether a token's slot depends on its position only. Otherwise a layer
            that holds the last tokens only has them in rows from the first row on.
    """

    dtype: torch.dtype
    device: torch.device
    lies_by_position: bool

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """Return tokens [first, first + num_tokens) by layer, each [1, kv_heads, num_tokens, dim].

        For reading only: views, or copies where tokens are not adjacent; copies are made when a
        layer is accessed. A layer that no longer holds all of these tokens returns those it holds.
        """

    def group_of(self, layer_index: int) -> int:
        """Return the number of a layer's group; tokens have the same slots in all its layers."""

    def first_token(self, layer_index: int) -> int:
        """Return the position of the first token that a layer holds."""

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return a layer's tokens, [num_tokens, kv_heads, dim]; a view or a copy."""

    def room(self, layer_index: int, first: int, num_tokens: int) -> TokenRoom:
        """Return where a layer's tokens from `first` on lie, for kernels; it makes no view."""

    def filling(
        self, layer_index: int, first: int, num_tokens: int
    ) -> AbstractContextManager[Tensor]:
        """Yield a tensor [num_tokens, kv_heads, dim] for the caller to fill with a layer's tokens.

        They are in place once the block is left.
        """

    def region(self, layer_index: int) -> Tensor:
        """View the memory that holds a layer's tokens, [slots, kv_heads, dim].

        It may hold tokens of other sequences too.
        """

    def slot_index(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return the slots of tokens in `region`, [num_tokens] int64 on the device."""


T = TypeVar("T", bound=LayerTensors)


def token_items_of(shapes: Sequence[LayerShape]) -> int:
    """Count the elements of a token's components, all layers."""
    return sum(heads * dim for shape in shapes for heads, dim in shape.parts)


def divide_memory(
    flat: Tensor, shapes: Sequence[LayerShape], num_slots: int | Sequence[int], kind: type[T]
) -> tuple[T, T, T | None]:
    """Divide memory between keys, values and index keys, and each of them between layers.

    Args:
        flat: [items], with room for all tensors.
        shapes: the shapes of all layers.
        num_slots: token slots of every layer's tensor, or a number for each layer.
        kind: how a layer's tensor is laid out.

    Returns:
        Keys, values and index keys. Index keys of layers without an index are empty tensors; they
        are None if no layer has an index.
    """
    offset = 0
    slots_by_layer = [num_slots] * len(shapes) if isinstance(num_slots, int) else num_slots

    def divide(per_token: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Sequence[int]]]:
        nonlocal offset
        stacks: list[tuple[Tensor, Sequence[int]]] = []
        by_layer = list(zip(per_token, slots_by_layer, strict=True))
        for size in dict.fromkeys(by_layer):
            indices = [index for index, layer_size in enumerate(by_layer) if layer_size == size]
            (heads, dim), slots = size
            num_items = len(indices) * heads * slots * dim
            sizes = kind.sizes(heads, slots, dim)
            stack = flat.narrow(0, offset, num_items).view(len(indices), *sizes)
            stacks.append((stack, indices))
            offset += num_items
        return stacks

    if _are_interleaved(shapes):
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


def _are_interleaved(shapes: Sequence[LayerShape]) -> bool:
    """Whether a token's key and value lie side by side: latent layers, all of one shape."""
    return len({(shape.key, shape.value) for shape in shapes}) == 1 and all(
        shape.is_latent for shape in shapes
    )


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate two components of the same tokens, [..., dim of first + dim of second].

    A view if they lie side by side in memory already, else a copy.
    """
    width = first.shape[-1] + second.shape[-1]
    is_adjacent = (
        first.data_ptr() + first.shape[-1] * first.itemsize == second.data_ptr()
        and first.stride() == second.stride()
        and first.stride(-2) >= width
    )
    if is_adjacent:
        return first.as_strided((*first.shape[:-1], width), first.stride())
    return torch.cat((first, second), dim=-1)


class Places:
    """Token slots of tensors [slots, kv_heads, dim], in the order of their tokens.

    Adjacent slots are accessed by a view, others by an index on the device.
    """

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self._num_slots = len(slots)
        self._first = slots[0] if slots else 0
        self._index: Tensor | None = None
        if any(slot != self._first + offset for offset, slot in enumerate(slots)):
            self._index = copy_to_device(device, torch.tensor(slots))

    @classmethod
    def at(cls, index: Tensor) -> "Places":
        """Return the slots in an index, [n] int64, which is read when the places are used."""
        places = cls((), index.device)
        places._index = index
        return places

    def of(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a view of a tensor, and the slots in it, [n] int64; None: all, in order."""
        if self._index is None:
            return tensor.narrow(0, self._first, self._num_slots), None
        return tensor, self._index

    @property
    def are_adjacent(self) -> bool:
        """Whether the slots lie side by side, in order."""
        return self._index is None

    def cut(self, tensors: SlotTensors) -> Sequence[Tensor]:
        """View adjacent slots' rows of every layer, [places, kv_heads, dim]."""
        return tensors.cut(self._first, self._num_slots)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the slots' rows, [places, kv_heads, dim]; a view if the slots are adjacent."""
        if self._index is None:
            return tensor.narrow(0, self._first, self._num_slots)
        return tensor.index_select(0, self._index)

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Copy rows, [places, kv_heads, dim], to the slots."""
        if self._index is None:
            tensor.narrow(0, self._first, self._num_slots).copy_(rows)
        else:
            tensor.index_copy_(0, self._index, rows.to(tensor))  # dtype and device
