"""OwnLayer: what a layer of a model's own cache keeps of a sequence, taken apart and put together.

Models whose layers keep more than keys, values and states run over the cache that Transformers
makes for them. What such a layer keeps is stored in two ways:

    entries   one for each `stride` tokens, never changed once it is there: rows of tokens
    the rest  of bounded size (windows, tokens of an unfinished stride, counters): a state

An entry, of `width` values, is cut into `stride` pieces. As it is known behind the last of its
tokens only, they are the rows of the tokens that follow: the row of token t is piece t % stride of
entry t // stride - 1; those of the first `stride` tokens are zeros. So a row is final when its
token was computed, whatever the size of a block. The last entry, which has no rows yet, or not all
of them, is part of the state. Rows of all layers lie side by side: each may have a few values only.

The tensors of a layer's state are, by number: 0: counts, [1, n] int64, its numbers and then the
size of each tensor, -1 for one that is not there; 1 …: the tensors, as large as they ever are, and
zeros behind what there is.

Knows no model: a layer is any object whose attributes, and dicts of them, hold tensors and numbers.
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

Part = tuple[str, str | int | None]  # an attribute of a layer, and the key of a dict that it is
ABSENT = -1  # the size of a tensor that is not there


def parts_of(layer: Any) -> dict[Part, Any]:
    """Return what a layer holds: tensors, numbers and whatever else."""
    found: dict[Part, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            found |= {(name, key): inner for key, inner in value.items()}
        else:
            found[name, None] = value
    return found


def set_part(layer: Any, part: Part, value: Any) -> None:
    """Put something where `parts_of` finds it."""
    name, key = part
    if key is None:
        setattr(layer, name, value)
    else:
        getattr(layer, name)[key] = value


@dataclass(frozen=True)
class OwnTensor:
    """One tensor of a layer.

    Attributes:
        part: where it is.
        shape: sizes: of one entry, or of the largest that there is.
        dim: which of its dimensions depends on the number of tokens; None: none does.
        dtype: element type.
        stride: how many tokens an entry is of; 0: it has none, but a bounded size.
    """

    part: Part
    shape: tuple[int, ...]
    dim: int | None
    dtype: torch.dtype
    stride: int = 0

    @property
    def row_width(self) -> int:
        """Values of a token's row; 0: it has none."""
        return ceil_div(prod(self.shape), self.stride) if self.stride else 0

    def size_of(self, tensor: Tensor | None) -> int:
        """Return how much of it there is.

        Raises:
            AssertionError: it has another shape than calibration has seen.
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
        """Return its tensor of the state, [*shape]; None: as zeros."""
        if tensor is None or not size or self.dim is None:
            return tensor
        if self.stride:
            return tensor.narrow(self.dim, size - 1, 1)
        lacking = list(self.shape)
        lacking[self.dim] -= size
        return torch.cat((tensor, tensor.new_zeros(lacking)), self.dim)

    def rows(self, tensor: Tensor | None, first: int, end: int) -> Tensor:
        """Return the rows of tokens [first, end), [tokens, row_width], given all entries."""
        device = None if tensor is None else tensor.device
        rows = torch.zeros((end - first, self.row_width), dtype=self.dtype, device=device)
        begin = max(first, self.stride)  # those of tokens before it are zeros
        if tensor is None or self.dim is None or begin >= end:
            return rows
        before = begin // self.stride - 1  # entries of which no row is asked for
        asked = tensor.narrow(self.dim, before, tensor.shape[self.dim] - before)
        flat = asked.movedim(self.dim, 0).flatten(1)
        pieces = pad(flat, (0, self.stride * self.row_width - flat.shape[1]))
        skipped = begin % self.stride
        rows[begin - first :] = pieces.reshape(-1, self.row_width)[skipped : skipped + end - begin]
        return rows

    def restored(self, size: int, state: Tensor, rows: Tensor) -> Tensor | None:
        """Return the tensor.

        Args:
            size: how much there is of it.
            state: its tensor of the state.
            rows: [tokens, row_width], of all tokens before.

        Raises:
            AssertionError: of so many tokens there are more or fewer entries.
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
        index: which layer.
        numbers: parts that are numbers, or flags.
        tensors: those that are to be stored.
        twins: (part, that which is the same tensor).
        fixed: (part, what it is from the first token on), of all that never changes.
    """

    index: int
    numbers: tuple[Part, ...]
    tensors: tuple[OwnTensor, ...]
    twins: tuple[tuple[Part, Part], ...] = ()
    fixed: tuple[tuple[Part, Any], ...] = field(default=(), repr=False, compare=False)

    @property
    def row_width(self) -> int:
        """Values of a token's row, of all its tensors side by side; 0: it has no entries."""
        return sum(tensor.row_width for tensor in self.tensors)

    @property
    def state_shapes(self) -> Iterator[StateShape]:
        """The tensors of its state, by number."""
        counts = (1, len(self.numbers) + len(self.tensors))
        yield StateShape(self.index, "own", 0, counts, torch.int64)
        for number, tensor in enumerate(self.tensors, 1):
            yield StateShape(self.index, "own", number, tensor.shape, tensor.dtype)

    def fill(self, layer: Any, read: Callable[[StatePlace], Tensor], rows: Tensor) -> None:
        """Have a layer that is new hold a sequence.

        Args:
            layer: the layer.
            read: returns a tensor of the state.
            rows: [tokens, row_width], of all tokens.
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
            set_part(layer, tensor.part, tensor.restored(size, state, columns[number]))
        for part, twin in self.twins:
            set_part(layer, part, parts_of(layer)[twin])

    def states(self, layer: Any) -> Iterator[tuple[StatePlace, Tensor]]:
        """Yield the tensors of a layer's state.

        Raises:
            AssertionError: it keeps something else than calibration has seen.
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
        """Yield the rows of tokens [first, end), [tokens, width] of each tensor that has some.

        Args:
            layer: the layer.
            first: which tokens.
            end: the number of all tokens.

        Raises:
            AssertionError: it has more or fewer entries than it should.
        """
        held = parts_of(layer)
        for tensor in self.tensors:
            if tensor.stride:
                size = max(0, tensor.size_of(held[tensor.part]))
                if size != end // tensor.stride:
                    raise AssertionError(f"{tensor.part} has {size} entries of {end} tokens")
                yield tensor.rows(held[tensor.part], first, end)

    def _check(self, held: dict[Part, Any]) -> None:
        """Raise AssertionError if it keeps more than what is stored of it."""
        known = {*self.numbers, *(tensor.part for tensor in self.tensors)}
        known |= {part for part, _ in (*self.twins, *self.fixed)}
        changed = [part for part, value in self.fixed if not is_same(held[part], value)]
        changed += [part for part, twin in self.twins if held[part] is not held[twin]]
        changed += sorted(held.keys() - known, key=str)
        if changed:
            raise AssertionError(f"{changed} are not as calibration has seen them")


def is_same(one: Any, other: Any) -> bool:
    """Whether two parts are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(one.equal(other))
    return type(one) is type(other) and bool(one == other)


def state_shapes(layers: Sequence[OwnLayer]) -> tuple[StateShape, ...]:
    """Return the tensors of all layers' states, in order."""
    return tuple(shape for layer in layers for shape in layer.state_shapes)
