"""SequenceStates: the recurrent state of one sequence, in addition to its keys and values if any.

A *state* is all recurrent tensors of a model behind one position. Its size does not depend on the
number of tokens, and it is usable at that position only. Layers with a convolution keep the last
inputs of it ("conv"); linear attention and Mamba keep their running sum ("recurrent"); of a model
that runs over its own cache, `own_layers.py` describes the state ("own").

A forward reads the current tensors and puts new ones beside them. These become current once all
forwards of the step have succeeded (`commit`). A step that fails leaves the state as it was.

A packed state is what is stored. Its size follows from the shapes:

    packed = header | tensor | padding | tensor | padding ...    each begins at a multiple of 64

The tensors are in the order of the shapes, each in C order. The header has the position, and a
digest of the shapes and of the version of Transformers, since the latter decides what the tensors
mean. So a state packed by another model's code is never mistaken for this model's.

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
    """The name of one of a model's recurrent tensors.

    Attributes:
        layer_index: the model's index of the layer; of "kept" tensors, the index of the module
            among those that keep some.
        kind: who keeps the tensor: "conv" and "recurrent": Transformers' cache, under these names;
            "kept": a module itself; "own": the model's own cache.
        number: index of the tensor among the layer's tensors of this kind.
    """

    layer_index: int
    kind: StateKind
    number: int


@dataclass(frozen=True)
class StateShape:
    """The shape of one of a model's recurrent tensors, for one sequence.

    Attributes:
        layer_index: see `StatePlace`.
        kind: see `StatePlace`.
        index: index of the tensor among the layer's tensors of this kind.
        shape: sizes, [1, ...].
        dtype: element type, which may be wider than the model's.
        is_overwritten: whether the model changes the tensor in place; then it receives a copy.
    """

    layer_index: int
    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_overwritten: bool = True

    @property
    def place(self) -> StatePlace:
        """The name of the tensor."""
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
    """The recurrent state of one sequence.

    Attributes:
        shapes: the shapes of all tensors, in the order in which they are packed.
        num_tokens: number of tokens that the current state covers; 0: there is no state.
        written: of a fork, the mark at which its first tensors are written, which other streams
            have to wait for; None: it is not a fork.
    """

    def __init__(self, shapes: Sequence[StateShape], device: torch.device) -> None:
        """Start before the first token; memory is allocated with the first state."""
        self.shapes = shapes
        self.num_tokens = 0
        self.written: Mark | None = None
        self._device = device
        self._shape_of = {shape.place: shape for shape in shapes}
        self._current: dict[StatePlace, Tensor] = {}
        self._pending: dict[StatePlace, Tensor] = {}

    def begin(self) -> None:
        """Begin a forward: drop tensors that an earlier one has put and that were not committed."""
        self._pending.clear()

    def read(self, place: StatePlace) -> Tensor | None:
        """Return a tensor for a forward; None before the first token.

        A tensor that the model changes in place is copied, and the copy becomes the new tensor.
        """
        found = self.peek(place)
        if found is not None and place not in self._pending and self.is_overwritten(place):
            found = self._pending[place] = found.clone()
        return found

    def peek(self, place: StatePlace) -> Tensor | None:
        """Return a tensor that the caller does not change; None before the first token."""
        found = self._pending.get(place)
        return self._current.get(place) if found is None else found

    def is_overwritten(self, place: StatePlace) -> bool:
        """Whether the model changes this tensor in place."""
        return self._shape_of[place].is_overwritten

    def put(self, place: StatePlace, state: Tensor) -> None:
        """Keep a forward's new tensor, which `commit` makes current.

        Raises:
            AssertionError: this model has no such tensor.
        """
        shape = self._shape_of.get(place)
        if shape is None or tuple(state.shape) != shape.shape:
            raise AssertionError(f"a state of shape {tuple(state.shape)} at {place}: {shape}")
        state = state.to(shape.dtype)
        if not state.is_contiguous() or state.untyped_storage().nbytes() != shape.num_bytes:
            # A view would keep the whole tensor alive that it is a part of.
            state = state.clone(memory_format=torch.contiguous_format)
        self._pending[place] = state

    def check_pending(self) -> None:
        """Raise AssertionError unless every tensor is new or was there before."""
        missing = self._shape_of.keys() - self._pending.keys() - self._current.keys()
        if missing:
            raise AssertionError(f"a forward left no state at {min(missing)}")

    def commit(self, num_tokens: int) -> None:
        """Make the new tensors current; the state covers `num_tokens` tokens from now on."""
        self._current.update(self._pending)
        self._pending.clear()
        self.num_tokens = num_tokens

    def clear(self) -> None:
        """Drop the state, as before the first token."""
        self._current.clear()
        self._pending.clear()
        self.num_tokens = 0

    def fork(self) -> "SequenceStates":
        """Return the states of another sequence that begins with the current state; copy nothing.

        Current tensors are never written to, so both may share them. To be called on the stream
        that computed their step, or once that step is over.
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
            AssertionError: there is no state before the first token.
        """
        if not self._current:
            raise AssertionError("a snapshot before the first token")
        packed = torch.zeros(packed_bytes(self.shapes), dtype=torch.uint8, device=self._device)
        header = _HEADER.pack(_MAGIC, _digest(self.shapes), self.num_tokens)
        packed[: _HEADER.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for shape, part in zip(self.shapes, self._parts(packed), strict=True):
            part.copy_(self._current[shape.place].reshape(-1).view(torch.uint8))
        return packed

    def allocate(self) -> dict[StatePlace, Tensor]:
        """Allocate memory for a state, on the current stream, which has to be the computing one.

        The caching allocator reuses freed memory in the order of the stream that it was allocated
        on. Forwards may still read this memory when it is freed, so it must not belong to the copy
        stream that fills it.
        """
        return {
            shape.place: torch.empty(shape.shape, dtype=shape.dtype, device=self._device)
            for shape in self.shapes
        }

    def restore(self, packed: Tensor, memory: Mapping[StatePlace, Tensor] | None = None) -> None:
        """Copy a packed state and make it current, at the position in its header.

        Args:
            packed: [packed_bytes] uint8, on any device; it may be longer, as slots are.
            memory: the tensors to copy to, from `allocate`; None: allocate on the current stream.

        Raises:
            LoadFailedError: it is not a state of this model and version; nothing has changed.
        """
        header = packed[: _HEADER.size].cpu().numpy().tobytes()
        expected = _HEADER.size if len(packed) >= packed_bytes(self.shapes) else -1
        if len(header) != expected or header[:24] != _MAGIC + _digest(self.shapes):
            raise LoadFailedError(
                "a stored state does not fit this model", "the turn is recomputed"
            )
        restored = self.allocate() if memory is None else memory
        for shape, part in zip(self.shapes, self._parts(packed), strict=True):
            restored[shape.place].view(-1).view(torch.uint8).copy_(part)
        self._pending.clear()
        self._current = dict(restored)
        self.num_tokens = _HEADER.unpack(header)[2]

    def _parts(self, packed: Tensor) -> list[Tensor]:
        """View the bytes of each tensor in a packed state, in order."""
        parts, offset = [], ALIGNMENT
        for shape in self.shapes:
            parts.append(packed.narrow(0, offset, shape.num_bytes))
            offset += align_up(shape.num_bytes, ALIGNMENT)
        return parts


class JointStates:
    """The states of several sequences as one batch, for a module that is called once for all.

    Attributes:
        num_tokens: number of tokens that the state of the shortest sequence covers.
    """

    def __init__(self, states: Sequence[SequenceStates]) -> None:
        """Start a batch of sequences that each have a state."""
        self.num_tokens = min(state.num_tokens for state in states)
        self._states = states
        self._new: dict[StatePlace, Tensor] = {}

    def read(self, place: StatePlace) -> Tensor:
        """Return a tensor of all sequences, [sequences, ...]; see `SequenceStates.read`."""
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
        """Keep a new tensor of all sequences, [sequences, ...], until `split`."""
        self._new[place] = state

    def split(self) -> None:
        """Put each sequence's part of the new tensors to its own states."""
        for place, joined in self._new.items():
            for states, part in zip(
                self._states, joined.split_with_sizes([1] * len(self._states)), strict=True
            ):
                states.put(place, part)
        self._new.clear()


def _digest(shapes: Sequence[StateShape]) -> bytes:
    """Digest the shapes and the version of Transformers, which decide what a packed state means."""
    facts = [(*shape.place, shape.shape, str(shape.dtype)) for shape in shapes]
    text = repr((transformers.__version__, facts))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
