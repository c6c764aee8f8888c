"""CpuAttention: sequences attend by kernels in C++, all of a step in one call or two.

torch computes one sequence after another. The kernels (`attention_kernel.py`) take all of a step,
read keys and values once for all query heads that share them, in place: contiguous or on pages.

A lone token attends by the kernel of decode steps whatever else is in the step, so that its result
does not depend on other parts. Parts of several tokens attend by that of prefill, or by
`TorchAttention` where the processor has instructions that only torch uses.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_svc.runtime.attention.attention import (
    NewKv,
    Part,
    StepAttention,
    TorchAttention,
    WritingAttention,
)
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.cpu.attention_kernel import (
    END,
    FIRST,
    FIRSTS,
    KEY_ROW,
    NUM_TOKENS,
    PAGE_TOKENS,
    PAGES,
    PART_NUMBERS,
    VALUE_ROW,
    AttendedLayer,
    AttentionKernel,
)
from inference_svc.runtime.kv.layer_tensors import ContiguousTokens, SlotTensors, TokenTensors
from inference_svc.runtime.kv.paged_kv import PagedKv, PagedTokens
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer

Addresses = npt.NDArray[np.int64]


class _Places(NamedTuple):
    """Where a sequence's KV is.

    Attributes:
        numbers: [layers, numbers], as `Part` has them; the range of tokens is left open.
        layers: sizes of each layer.
    """

    numbers: Addresses
    layers: tuple[AttendedLayer, ...]


class PlacedPart(NamedTuple):
    """A part, and where its KV is.

    Attributes:
        part: the part.
        places: of its KV.
        rows: [layers, 2] addresses in its write buffer, of the new token's key and value before
            RoPE; None: it has several tokens, or none goes there.
    """

    part: Part
    places: _Places
    rows: Addresses | None


class CpuAttention:
    """The back-end; for one thread."""

    def __init__(self, kernel: AttentionKernel) -> None:
        """Store the kernels."""
        self._kernel = kernel
        self._portable = TorchAttention()
        self._places: WeakKeyDictionary[SequenceKv, _Places] = WeakKeyDictionary()
        # By a buffer's keys, which are those of all buffers in the same memory.
        self._buffers: WeakKeyDictionary[SlotTensors, tuple[Addresses, Addresses]] = (
            WeakKeyDictionary()
        )

    def prepare(self, parts: Sequence[Part]) -> StepAttention:
        """Plan a step; cheap, as a sequence's addresses are kept from step to step."""
        lone = [part for part in parts if part.num_tokens == 1]
        several = [part for part in parts if part.num_tokens > 1]
        if not several:
            return LoneAttention(self._kernel, self._placed(lone))
        rest: StepAttention = self._portable.prepare(several)
        # All layers have the same dtype.
        if self._kernel.can_prefill(_layers_of(parts[0].kv.keys)[0].dtype):
            rest = KernelAttention(self._kernel, self._placed(several))
        if not lone:
            return rest
        lone_attention = LoneAttention(self._kernel, self._placed(lone))
        return MixedAttention(lone_attention, rest, [part.num_tokens for part in parts])

    def _placed(self, parts: Sequence[Part]) -> list[PlacedPart]:
        return [PlacedPart(part, self._places_of(part.kv), self._rows_of(part)) for part in parts]

    def _places_of(self, kv: SequenceKv) -> _Places:
        places = self._places.get(kv)
        if places is None:
            places = self._places[kv] = _find_places(kv)
        return places

    def _rows_of(self, part: Part) -> Addresses | None:
        """Return where a lone token goes in its write buffer, [layers, 2]; None: nowhere."""
        buffer = part.write_buffer
        if buffer is None or part.num_tokens > 1:
            return None
        found = self._buffers.get(buffer.keys)
        if found is None:
            found = self._buffers[buffer.keys] = _find_rows(buffer)
        (slot,) = buffer.slots_of(part.length - 1, 1)
        first, row_bytes = found
        return first + slot * row_bytes


class KernelAttention:
    """The attention of parts by one kernel; see `StepAttention` for shapes.

    All parts have several tokens, or all have one (`LoneAttention`).
    """

    def __init__(self, kernel: AttentionKernel, parts: Sequence[PlacedPart]) -> None:
        """Store the parts."""
        self._parts, self._kernel = parts, kernel
        self._attend = kernel.prefill
        self._layers = parts[0].places.layers
        # By window and chunk [layers, parts, numbers].
        self._found: dict[tuple[int | None, int | None], Tensor] = {}
        # These are kept until the step is over, as their addresses are.
        self._firsts: list[Addresses] = []
        self._tables = [
            table.numbers
            for part, *_ in parts
            if isinstance(part.kv, PagedKv)
            for table in part.kv.tables.by_group
        ]

    def attend(self, query: Tensor, layer_index: int, options: AttentionOptions) -> Tensor:
        """Attend each part to its own KV, [1, tokens, heads, value_dim]; see the protocol."""
        return self._attend(query, self._addresses(options), self._layers[layer_index], options)

    def _addresses(self, options: AttentionOptions) -> Tensor:
        kind = (options.window, options.chunk)
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = self._find_addresses(options)
        return found

    def _find_addresses(self, options: AttentionOptions) -> Tensor:
        """Return the parts' numbers by layer, for calls with this window and chunk."""
        by_part = []
        for part, places, rows in self._parts:
            kv, numbers = part.kv, places.numbers.copy()
            held_from = np.zeros(len(numbers), np.int64)
            if kv.window_from:
                layers = range(len(numbers))
                held_from[:] = [kv.keys.first_token(index) for index in layers]
            # Layers with a window hold their tokens from slot 0 on, unless they are on pages.
            slot_0 = held_from * (not isinstance(kv, PagedKv))
            new = range(part.length - part.num_tokens, part.length)
            firsts = np.zeros(part.num_tokens, np.int64)
            if options.window is not None or options.chunk is not None:
                firsts[:] = [options.first_visible(position) for position in new]
            firsts = np.maximum(firsts, held_from[:, None]) - slot_0[:, None]  # [layers, tokens]
            if isinstance(kv, PagedKv):
                tables = [table.numbers.data_ptr() for table in kv.tables.by_group]
                numbers[:, PAGES] = [tables[group] for group in kv.tables.groups.group_of]
            numbers[:, FIRST], numbers[:, END] = firsts[:, 0], part.length - slot_0
            numbers[:, NUM_TOKENS] = part.num_tokens
            if part.num_tokens > 1:
                self._firsts.append(firsts)
                numbers[:, FIRSTS] = firsts.ctypes.data + np.arange(len(firsts)) * firsts.strides[0]
            elif rows is not None:
                numbers[:, [KEY_ROW, VALUE_ROW]] = rows
            by_part.append(numbers)
        return torch.from_numpy(np.stack(by_part, axis=1))


class LoneAttention(KernelAttention, WritingAttention):
    """The attention of parts of one token each, which it can also write."""

    def __init__(self, kernel: AttentionKernel, parts: Sequence[PlacedPart]) -> None:
        """Store the parts."""
        super().__init__(kernel, parts)
        self._attend = kernel.decode

    def write_and_attend(
        self, query: Tensor, new: NewKv, layer_index: int, options: AttentionOptions
    ) -> Tensor:
        """Write the parts' tokens and attend, [1, tokens, heads, value_dim]; see the base class."""
        numbers = self._addresses(options)
        return self._kernel.write_and_decode(query, new, numbers, layer_index, options)


class MixedAttention:
    """The attention of a step with parts of one token and of several; see `StepAttention`."""

    def __init__(self, lone: StepAttention, several: StepAttention, sizes: Sequence[int]) -> None:
        """Store the attention of both kinds of parts, and the number of tokens of each part."""
        self._lone, self._several = lone, several
        is_lone = torch.tensor(sizes).eq(1).repeat_interleave(torch.tensor(sizes))
        self._lone_tokens, self._other_tokens = is_lone.nonzero()[:, 0], (~is_lone).nonzero()[:, 0]

    def attend(self, query: Tensor, layer_index: int, options: AttentionOptions) -> Tensor:
        """Attend each part to its own KV, [1, tokens, heads, value_dim]; see the protocol."""
        pieces = [
            (tokens, attention.attend(query.index_select(2, tokens), layer_index, options))
            for tokens, attention in (
                (self._lone_tokens, self._lone),
                (self._other_tokens, self._several),
            )
        ]
        sizes = pieces[0][1].shape
        attended = query.new_empty(1, query.shape[2], *sizes[2:])
        for tokens, piece in pieces:
            attended.index_copy_(1, tokens, piece)
        return attended


def _find_places(kv: SequenceKv) -> _Places:
    """Find a sequence's layers in memory."""
    is_paged = isinstance(kv, PagedKv)
    # Pages are [slots, kv_heads, dim], contiguous KV is [1, kv_heads, slots, dim].
    head, slot = (1, 0) if is_paged else (1, 2)
    rows: list[tuple[int, ...]] = []
    layers: list[AttendedLayer] = []
    for keys, values in zip(_layers_of(kv.keys), _layers_of(kv.values), strict=True):
        strides = (keys.stride(head), keys.stride(slot), values.stride(head), values.stride(slot))
        place = (keys.data_ptr(), values.data_ptr(), 0, 0, 0, 0, *strides)
        rows.append(place + (0,) * (PART_NUMBERS - len(place)))
        layers.append(AttendedLayer(len(layers), values.shape[head], values.shape[-1]))
    numbers = np.array(rows, np.int64)
    if isinstance(kv, PagedKv):
        on_page = kv.tables.groups.tokens_on_page
        numbers[:, PAGE_TOKENS] = [on_page[group] for group in kv.tables.groups.group_of]
    return _Places(numbers, tuple(layers))


def _find_rows(buffer: WriteBuffer) -> tuple[Addresses, Addresses]:
    """Return the addresses of a buffer's slot 0, [layers, 2], and the bytes from slot to slot."""
    layers = list(zip(buffer.keys.layers, buffer.values.layers, strict=True))
    first = [[tokens.data_ptr() for tokens in layer] for layer in layers]
    row_bytes = [[tokens.stride(0) * tokens.itemsize for tokens in layer] for layer in layers]
    return np.array(first, np.int64), np.array(row_bytes, np.int64)


def _layers_of(tokens: TokenTensors) -> Sequence[Tensor]:
    """Return the tensors that hold a component's tokens, by layer."""
    if isinstance(tokens, PagedTokens):
        return tokens.slots.layers
    if isinstance(tokens, ContiguousTokens):
        return tokens.layers
    raise AssertionError(f"the kernel does not know where {type(tokens).__name__} lie")
