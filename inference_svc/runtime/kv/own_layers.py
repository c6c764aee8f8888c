"""OwnLayer: how the contents of one layer of a model's own cache are stored and restored.

Models whose layers keep more than keys, values and states run over the cache that Transformers
makes for them. The contents of such a layer are stored in two ways:

    entries     one for each `stride` tokens, never changed once it exists: stored as token rows
    other parts of bounded size (windows, tokens of an unfinished stride, counters): a state

An entry of `width` values is cut into `stride` pieces. It is known only after the last of its
tokens, so its pieces are the rows of the *following* tokens: the row of token t is piece t % stride
of entry t // stride - 1; the rows of the first `stride` tokens are zeros. So a row is final once
its token is computed, for any block size. The last entry, some or all of whose rows are still
missing, is part of the state. Rows of all layers lie side by side, as each may have a few values
only.

The tensors of a layer's state, by number:

    0        counts, [1, n] int64: the layer's numbers, then the size of each tensor, -1 if absent
    1, 2 ... the tensors at their largest size, with zeros behind their contents

Knows no model: a layer is any object whose attributes, or dicts in them, hold tensors and numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference_svc.runtime.kv.states import StatePlace, StateShape
from shared.types.units import ceil_div

Part = tuple[str, str | int | None]  # an attribute of a layer, and a key if its value is a dict
ABSENT = -1  # the size of a tensor that is None


def parts_of(layer: Any) -> dict[Part, Any]:
    """Return all parts of a layer: tensors, numbers and anything else that it holds."""
    found: dict[Part, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            found |= {(name, key): inner for key, inner in value.items()}
        else:
            found[name, None] = value
    return found


def set_part(layer: Any, part: Part, value: Any) -> None:
    """Set one part of a layer, as `parts_of` names it."""
    name, key = part
    if key is None:
        setattr(layer, name, value)
    else:
        getattr(layer, name)[key] = value


@dataclass(frozen=True)
class OwnTensor:
    """One tensor of a layer.

    Attributes:
        part: the part of the layer that holds it.
        shape: sizes of one entry, or of the whole tensor when it is largest.
        dim: index of the dimension that depends on the number of tokens; None: none does.
        dtype: element type.
        stride: tokens per entry; 0: the tensor has no entries, but a bounded size.
    """

    part: Part
    shape: tuple[int, ...]
    dim: int | None
    dtype: torch.dtype
    stride: int = 0

    @property
    def row_width(self) -> int:
        """Number of values of a token's row; 0: the tensor has no entries."""
        return ceil_div(prod(self.shape), self.stride) if self.stride else 0

    def size_of(self, tensor: Tensor | None) -> int:
        """Return the size of the tensor along `dim`: 1 without one, ABSENT if it is None.

        Raises:
            AssertionError: its shape or type is not what calibration has seen.
        """
        if tensor is None:
            return ABSENT
        most = list(self.shape)
        size = 1 if self.dim is None else tensor.shape[self.dim]
        if self.dim is not None:
            most[self.dim] = size
        is_larger = not self.stride and self.dim is not None and size > self.shape[self.dim]
        if list(tensor.shape) != most or tensor.dtype != self.dtype or is_larger:
            raise AssertionError(f"{self.part} has become {tuple(tensor.shape)}, not {self.shape}")
        return size

    def state(self, tensor: Tensor | None, size: int) -> Tensor | None:
        """Return the part of the tensor that goes to the state, [*shape].

        Args:
            tensor: the layer's tensor.
            size: see `size_of`.

        Returns:
            The last entry; or all of it, padded with zeros. None, or an empty tensor, stands for
            zeros.
        """
        if tensor is None or not size or self.dim is None:
            return tensor
        if self.stride:
            return tensor.narrow(self.dim, size - 1, 1)
        lacking = list(self.shape)
        lacking[self.dim] -= size
        return torch.cat((tensor, tensor.new_zeros(lacking)), self.dim)

    def rows(self, tensor: Tensor | None, first: int, end: int) -> Tensor:
        """Return the rows of tokens [first, end), [tokens, row_width].

        Args:
            tensor: the layer's tensor, with all entries.
            first: position of the first token.
            end: position after the last token.
        """
        device = None if tensor is None else tensor.device
        rows = torch.zeros((end - first, self.row_width), dtype=self.dtype, device=device)
        begin = max(first, self.stride)  # rows before it are zeros
        if tensor is None or self.dim is None or begin >= end:
            return rows
        num_skipped = begin // self.stride - 1  # entries without a row in this range
        entries = tensor.narrow(self.dim, num_skipped, tensor.shape[self.dim] - num_skipped)
        flat = entries.movedim(self.dim, 0).flatten(1)
        pieces = pad(flat, (0, self.stride * self.row_width - flat.shape[1]))
        skipped = begin % self.stride
        rows[begin - first :] = pieces.reshape(-1, self.row_width)[skipped : skipped + end - begin]
        return rows

    def restore(self, size: int, state: Tensor, rows: Tensor) -> Tensor | None:
        """Return the tensor, put together from what is stored.

        Args:
            size: see `size_of`.
            state: [*shape], its part of the state.
            rows: [tokens, row_width], of all tokens of the sequence.

        Raises:
            AssertionError: the number of entries does not match the number of tokens.
        """
        if self.stride and max(size, 0) != len(rows) // self.stride:
            raise AssertionError(f"a state of {size} entries of {self.part} at {len(rows)} tokens")
        if size == ABSENT or self.dim is None:
            return None if size == ABSENT else state
        if not self.stride or not size:
            return state.narrow(self.dim, 0, size)
        pieces = rows[self.stride : self.stride * size]
        flat = pieces.reshape(size - 1, self.stride * self.row_width)[:, : prod(self.shape)]
        sizes = [length for dim, length in enumerate(self.shape) if dim != self.dim]
        before = flat.reshape(size - 1, *sizes).movedim(0, self.dim)
        return torch.cat((before, state), self.dim)


@dataclass(frozen=True)
class OwnLayer:
    """One layer of a model's own cache.

    Attributes:
        index: the layer's index.
        numbers: parts that are numbers or flags.
        tensors: the tensors that are stored.
        twins: (part, another part that is the same tensor object).
        fixed: (part, its value), of the parts that never change after the first token.
    """

    index: int
    numbers: tuple[Part, ...]
    tensors: tuple[OwnTensor, ...]
    twins: tuple[tuple[Part, Part], ...] = ()
    fixed: tuple[tuple[Part, Any], ...] = field(default=(), repr=False, compare=False)

    @property
    def row_width(self) -> int:
        """Number of values of a token's row, all tensors side by side; 0: there are no entries."""
        return sum(tensor.row_width for tensor in self.tensors)

    @property
    def state_shapes(self) -> Iterator[StateShape]:
        """The shapes of the tensors of the layer's state, by number."""
        counts = (1, len(self.numbers) + len(self.tensors))
        yield StateShape(self.index, "own", 0, counts, torch.int64)
        for number, tensor in enumerate(self.tensors, 1):
            yield StateShape(self.index, "own", number, tensor.shape, tensor.dtype)

    def fill(self, layer: Any, read: Callable[[StatePlace], Tensor], rows: Tensor) -> None:
        """Restore a sequence into a new layer.

        Args:
            layer: the layer of a new cache.
            read: returns a tensor of the state.
            rows: [tokens, row_width], of all tokens of the sequence.
        """
        counts = read(StatePlace(self.index, "own", 0))[0].tolist()
        for part, value in self.fixed:
            set_part(layer, part, value)
        for part, value in zip(self.numbers, counts, strict=False):
            is_flag = isinstance(parts_of(layer).get(part), bool)
            set_part(layer, part, bool(value) if is_flag else value)
        columns = rows.split_with_sizes([tensor.row_width for tensor in self.tensors], 1)
        sizes = counts[len(self.numbers) :]
        for number, (tensor, size) in enumerate(zip(self.tensors, sizes, strict=True)):
            state = read(StatePlace(self.index, "own", number + 1))
            set_part(layer, tensor.part, tensor.restore(size, state, columns[number]))
        for part, twin in self.twins:
            set_part(layer, part, parts_of(layer)[twin])

    def states(self, layer: Any) -> Iterator[tuple[StatePlace, Tensor]]:
        """Yield the tensors of a layer's state.

        Raises:
            AssertionError: the layer holds something that calibration has not seen.
        """
        held = parts_of(layer)
        self._check(held)
        sizes = [tensor.size_of(held[tensor.part]) for tensor in self.tensors]
        counts = [int(held[part]) for part in self.numbers] + sizes
        yield StatePlace(self.index, "own", 0), torch.tensor([counts])
        for number, (tensor, size) in enumerate(zip(self.tensors, sizes, strict=True)):
            state = tensor.state(held[tensor.part], size)
            if state is None or not size:
                state = torch.zeros(tensor.shape, dtype=tensor.dtype)
            yield StatePlace(self.index, "own", number + 1), state

    def rows(self, layer: Any, first: int, end: int) -> Iterator[Tensor]:
        """Yield the rows of tokens [first, end), [tokens, width], for each tensor with entries.

        Args:
            layer: the layer.
            first: position of the first token.
            end: number of all tokens of the sequence.

        Raises:
            AssertionError: the number of entries does not match the number of tokens.
        """
        held = parts_of(layer)
        for tensor in self.tensors:
            if tensor.stride:
                size = max(0, tensor.size_of(held[tensor.part]))
                if size != end // tensor.stride:
                    raise AssertionError(f"{tensor.part} has {size} entries of {end} tokens")
                yield tensor.rows(held[tensor.part], first, end)

    def _check(self, held: dict[Part, Any]) -> None:
        """Raise AssertionError if the layer holds more than what is stored of it."""
        known = {*self.numbers, *(tensor.part for tensor in self.tensors)}
        known |= {part for part, _ in (*self.twins, *self.fixed)}
        changed = [part for part, value in self.fixed if not is_same(held[part], value)]
        changed += [part for part, twin in self.twins if held[part] is not held[twin]]
        changed += sorted(held.keys() - known, key=str)
        if changed:
            raise AssertionError(f"{changed} are not as calibration has seen them")


def is_same(left: Any, right: Any) -> bool:
    """Whether the values of two parts are equal, types included."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and bool(left.equal(right))
    return type(left) is type(right) and bool(left == right)


def state_shapes(layers: Sequence[OwnLayer]) -> tuple[StateShape, ...]:
    """Return the shapes of the tensors of all layers' states, in order."""
    return tuple(shape for layer in layers for shape in layer.state_shapes)
