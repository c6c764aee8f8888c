"""SequenceStates: what a recurrent model remembers of one sequence, beside keys and values if any.

A *state* is all recurrent tensors of a model behind one position, taken together: of fixed size,
whatever the number of tokens, and of use at that position only. Layers with a convolution have the
last inputs of it ("conv"), linear attention and Mamba what they sum up ("recurrent"); of a model
that runs over its own cache it is what `own_layers.py` says ("own").

A forward reads the current tensors and puts new ones beside them; these become current once all
forwards of the step have succeeded (`commit`). A step that fails leaves everything as it was.

A packed state is what is stored of it, some bytes of a size that the shapes give:

    packed = header | tensor | padding | tensor | padding ...    each begins at a multiple of 64

The tensors are in the order of the shapes, in C order. The header has a digest of the shapes and of
the version of Transformers, which decides what is in them, and the position: what another model's
code has packed is never taken for this one's.

Owned by one sequence; used by one thread at a time.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
import transformers
from torch import Tensor

from inference_svc.runtime.kv.copy_stream import Mark, mark_enqueued
from shared.types.errors import LoadFailedError
from shared.types.units import align_up

StateKind = Literal["conv", "recurrent", "kept", "own"]
ALIGNMENT = 64  # bytes; a cache line
_HEADER = struct.Struct("<8s16sQ")  # magic, digest, position
_MAGIC = b"states 1"


class StatePlace(NamedTuple):
    """Which of a model's recurrent tensors.

    Attributes:
        layer_index: the layer, as the model numbers its layers; of "kept" tensors the module, of
            those that keep some.
        kind: "conv" or "recurrent", as a cache is asked for it; "kept", by a module
            itself; or "own", by the model's own cache.
        number: which of the layer's tensors of this kind.
    """

    layer_index: int
    kind: StateKind
    number: int


@dataclass(frozen=True)
class StateShape:
    """One of a model's recurrent tensors, of one sequence.

    Attributes:
        layer_index: see `StatePlace`.
        kind: likewise.
        index: which of the layer's tensors of this kind.
        shape: sizes, [1, ...].
        dtype: element type; it may be wider than the model's.
        is_overwritten: whether the model changes in place what it is handed: it gets a copy then.
    """

    layer_index: int
    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_overwritten: bool = True

    @property
    def place(self) -> StatePlace:
        """Which tensor it is."""
        return StatePlace(self.layer_index, self.kind, self.index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def packed_bytes(shapes: Sequence[StateShape]) -> int:
    """Return the bytes of one packed state; 0 if the model has none."""
    if not shapes:
        return 0
    return ALIGNMENT + sum(align_up(shape.num_bytes, ALIGNMENT) for shape in shapes)


class SequenceStates:
    """See the module docstring.

    Attributes:
        shapes: of all tensors, in the order in which they are packed.
        num_tokens: how many tokens the current state is behind; 0: there is none.
        written: of a fork, when the tensors that it began with are written; others' streams wait
            for it. None: it is no fork.
    """

    def __init__(self, shapes: Sequence[StateShape], device: torch.device) -> None:
        """Begin before the first token; memory comes with the first state."""
        self.shapes = shapes
        self.num_tokens = 0
        self.written: Mark | None = None
        self._device = device
        self._shape_of = {shape.place: shape for shape in shapes}
        self._current: dict[StatePlace, Tensor] = {}
        self._pending: dict[StatePlace, Tensor] = {}

    def begin(self) -> None:
        """Forget what a forward before has put and nobody has committed."""
        self._pending.clear()

    def read(self, place: StatePlace) -> Tensor | None:
        """Return a tensor for a forward; None: there is none before the first token.

        If the model is going to change it in place, it is a copy, and the new tensor at once.
        """
        found = self.peek(place)
        if found is not None and place not in self._pending and self.is_overwritten(place):
            found = self._pending[place] = found.clone()
        return found

    def peek(self, place: StatePlace) -> Tensor | None:
        """Return a tensor that nobody is going to change; None before the first token."""
        found = self._pending.get(place)
        return self._current.get(place) if found is None else found

    def is_overwritten(self, place: StatePlace) -> bool:
        """Whether the model changes this tensor in place."""
        return self._shape_of[place].is_overwritten

    def put(self, place: StatePlace, state: Tensor) -> None:
        """Keep a forward's new tensor; it becomes current with `commit`.

        Raises:
            AssertionError: it is not one of this model's.
        """
        shape = self._shape_of.get(place)
        if shape is None or tuple(state.shape) != shape.shape:
            raise AssertionError(f"a state of shape {tuple(state.shape)} at {place}: {shape}")
        state = state.to(shape.dtype)
        if not state.is_contiguous() or state.untyped_storage().nbytes() != shape.num_bytes:
            state = state.clone(memory_format=torch.contiguous_format)  # not all it is a part of
        self._pending[place] = state

    def check_pending(self) -> None:
        """Raise AssertionError unless a forward has put, or left, every tensor."""
        missing = self._shape_of.keys() - self._pending.keys() - self._current.keys()
        if missing:
            raise AssertionError(f"a forward left no state at {min(missing)}")

    def commit(self, num_tokens: int) -> None:
        """Make what was put current: the state behind this many tokens."""
        self._current.update(self._pending)
        self._pending.clear()
        self.num_tokens = num_tokens

    def clear(self) -> None:
        """Forget everything, as before the first token."""
        self._current.clear()
        self._pending.clear()
        self.num_tokens = 0

    def fork(self) -> "SequenceStates":
        """Return another sequence's that begins with the current state; nothing is copied.

        Tensors that are current are never written to, so that both may have them. To be called
        where their step was computed, or once it is over.
        """
        forked = SequenceStates(self.shapes, self._device)
        forked._current, forked.num_tokens = dict(self._current), self.num_tokens
        forked.written = mark_enqueued(self._device)
        return forked

    def snapshot(self) -> Tensor:
        """Pack the current state into memory of its own.

        Returns:
            [packed_bytes] uint8, on the device of the sequence.

        Raises:
            AssertionError: before the first token.
        """
        if not self._current:
            raise AssertionError("a snapshot before the first token")
        packed = torch.zeros(packed_bytes(self.shapes), dtype=torch.uint8, device=self._device)
        header = _HEADER.pack(_MAGIC, _digest(self.shapes), self.num_tokens)
        packed[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for shape, part in zip(self.shapes, self._parts(packed), strict=True):
            part.copy_(self._current[shape.place].reshape(-1).view(torch.uint8))
        return packed

    def room(self) -> dict[StatePlace, Tensor]:
        """Allocate memory for a state; on a device it is the current stream's.

        That has to be the one which computes, whoever fills it: memory that is given back is
        lent again in the order of its own stream, and forwards may still read it then.
        """
        return {
            shape.place: torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
            for shape in self.shapes
        }

    def restore(self, packed: Tensor, room: Mapping[StatePlace, Tensor] | None = None) -> None:
        """Make a packed state current; it is copied, and the position is the one it has.

        Args:
            packed: [packed_bytes] uint8, on any device; it may be longer, as slots are.
            room: where it is copied to, from `room`; None: to memory of the current stream's.

        Raises:
            LoadFailedError: it is no state of this model, or of other code; nothing has changed.
        """
        header = packed[: _HEADER.size].cpu().numpy().tobytes()
        expected = _HEADER.size if len(packed) >= packed_bytes(self.shapes) else -1
        if len(header) != expected or header[:24] != _MAGIC + _digest(self.shapes):
            raise LoadFailedError("a stored state is not one of this model", "recompute")
        restored = self.room() if room is None else room
        for shape, part in zip(self.shapes, self._parts(packed), strict=True):
            restored[shape.place].view(-1).view(torch.uint8).copy_(part)
        self._pending.clear()
        self._current = dict(restored)
        self.num_tokens = _HEADER.unpack(header)[2]

    def _parts(self, packed: Tensor) -> list[Tensor]:
        """View the bytes of each tensor."""
        parts, offset = [], ALIGNMENT
        for shape in self.shapes:
            parts.append(packed.narrow(0, offset, shape.num_bytes))
            offset += align_up(shape.num_bytes, ALIGNMENT)
        return parts


class JointStates:
    """The states of several sequences that a module goes on from at once, as of a batch.

    Attributes:
        num_tokens: how many tokens the shortest of them is behind.
    """

    def __init__(self, states: Sequence[SequenceStates]) -> None:
        """Begin a batch of sequences that each have a state."""
        self.num_tokens = min(state.num_tokens for state in states)
        self._states = states
        self._new: dict[StatePlace, Tensor] = {}

    def read(self, place: StatePlace) -> Tensor:
        """Return a tensor of all sequences, [sequences, ...]; as `SequenceStates.read`."""
        found = self._new.get(place)
        if found is not None:
            return found
        parts = [states.peek(place) for states in self._states]
        joined = torch.cat([part for part in parts if part is not None])
        if len(joined) != len(parts):
            raise AssertionError(f"a sequence without a state at {place} is among those with one")
        if self._states[0].is_overwritten(place):
            self._new[place] = joined
        return joined

    def put(self, place: StatePlace, state: Tensor) -> None:
        """Keep a new tensor of all sequences, until `split`."""
        self._new[place] = state

    def split(self) -> None:
        """Put each sequence's part of what is new to its own states."""
        for place, joined in self._new.items():
            for states, part in zip(
                self._states, joined.split_with_sizes([1] * len(self._states)), strict=True
            ):
                states.put(place, part)
        self._new.clear()


def _digest(shapes: Sequence[StateShape]) -> bytes:
    """Digest what decides how a packed state is read."""
    facts = [(*shape.place, shape.shape, str(shape.dtype)) for shape in shapes]
    text = repr((transformers.__version__, facts))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
