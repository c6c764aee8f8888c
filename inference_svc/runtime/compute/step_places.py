"""StepPlaces: where a step's new tokens go, in sequences' KV and in write buffers.

Places are computed once per step and written once per layer, in one call for all sequences where
that is possible.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.layer_tensors import Places, SlotTensors
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer


class NewTokens(Protocol):
    """The places of all sequences' new tokens of a step."""

    def write(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new tokens.

        Args:
            layer_index: the layer.
            key: [1, kv_heads, tokens, head_dim], after RoPE, the sequences one after another.
            value: [1, kv_heads, tokens, value_dim].
        """

    def write_index(self, layer_index: int, index: Tensor) -> None:
        """Write the index keys, [1, 1, tokens, index_dim], of a layer that has some."""


def new_tokens(appended: Sequence[tuple[SequenceKv, int]]) -> NewTokens:
    """Return the places of new tokens.

    Args:
        appended: (sequence's KV, number of its new tokens); the KV is either all paged or all not.
    """
    paged = [(kv, number) for kv, number in appended if isinstance(kv, PagedKv)]
    if not paged:
        return _SideBySide(appended)
    region = paged[0][0]
    by_group = [
        [
            slot
            for kv, number in paged
            for slot in kv.tables.by_group[group].slots_of(kv.num_tokens, number)
        ]
        for group in range(len(region.tables.by_group))
    ]
    return NewOnPages(region, [Places(slots, region.device) for slots in by_group])


class _SideBySide:
    """Places in sequences that each have contiguous memory of their own."""

    def __init__(self, appended: Sequence[tuple[SequenceKv, int]]) -> None:
        self._sizes = [num_tokens for _, num_tokens in appended]
        # Per layer, keys and then values of each sequence, [1, kv_heads, tokens, dim].
        self._places = list(
            zip(
                *[kv.keys.cut(kv.num_tokens, num_tokens) for kv, num_tokens in appended],
                *[kv.values.cut(kv.num_tokens, num_tokens) for kv, num_tokens in appended],
                strict=True,
            )
        )
        self._index_places = list(
            zip(
                *[
                    kv.indexes.cut(kv.num_tokens, num_tokens)
                    for kv, num_tokens in appended
                    if kv.indexes is not None
                ],
                strict=True,
            )
        )

    def write(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new tokens; see the protocol."""
        sizes = self._sizes
        written = [*key.split_with_sizes(sizes, 2), *value.split_with_sizes(sizes, 2)]
        torch._foreach_copy_(self._places[layer_index], written)

    def write_index(self, layer_index: int, index: Tensor) -> None:
        """Write a layer's index keys; see the protocol."""
        places = self._index_places[layer_index]
        torch._foreach_copy_(places, index.split_with_sizes(self._sizes, 2))


class NewOnPages:
    """Places on pages of one memory region, which all sequences of the step share."""

    def __init__(self, kv: PagedKv, places: Sequence[Places]) -> None:
        """Store the places.

        Args:
            kv: any KV in that region.
            places: by group of layers, the slots of all new tokens.
        """
        parts = (kv.keys, kv.values, kv.indexes)
        self._components = [tokens.slots for tokens in parts if tokens is not None]
        self._places = [places[group] for group in kv.tables.groups.group_of]

    def write(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new tokens; see the protocol."""
        keys, values = self._components[:2]
        places = self._places[layer_index]
        places.write(keys[layer_index], key[0].transpose(0, 1))
        places.write(values[layer_index], value[0].transpose(0, 1))

    def write_index(self, layer_index: int, index: Tensor) -> None:
        """Write a layer's index keys; see the protocol."""
        places = self._places[layer_index]
        places.write(self._components[2][layer_index], index[0].transpose(0, 1))


class BufferedTokens(NamedTuple):
    """New tokens that go to write buffers in one memory; one call writes to all of them.

    Attributes:
        components: keys, values and, if there are any, index keys of that memory.
        chosen: [n] indices into the step's tokens that are written; None: all are.
        places: the slots of these tokens.
        cuts: by layer, the slots' rows of each component, [n, kv_heads, dim]; None: the slots are
            not adjacent.
    """

    components: Sequence[SlotTensors]
    chosen: Tensor | None
    places: Places
    cuts: Sequence[tuple[Tensor, ...]] | None

    @classmethod
    def of(cls, buffer: WriteBuffer, chosen: Tensor | None, places: Places) -> "BufferedTokens":
        """Return places in the memory of this buffer."""
        cuts = None
        if places.are_adjacent:
            cuts = list(zip(*map(places.cut, buffer.components), strict=True))
        return cls(buffer.components, chosen, places, cuts)

    def write(self, layer_index: int, *components: Tensor, first: int = 0) -> None:
        """Write components of one layer's tokens.

        Args:
            layer_index: the layer.
            components: before RoPE, [tokens, kv_heads, dim] each, of all tokens of the step.
            first: index of the first of them; 0: keys, 2: index keys.
        """
        if self.chosen is not None:
            chosen = self.chosen
            components = tuple(tokens.index_select(0, chosen) for tokens in components)
        if self.cuts is not None:  # one call instead of four
            targets = self.cuts[layer_index][first : first + len(components)]
            torch._foreach_copy_(targets, components)
            return
        for component_index, rows in enumerate(components, first):
            self.places.write(self.components[component_index][layer_index], rows)


class StepPlaces(NamedTuple):
    """The places of one step's tokens.

    Attributes:
        new_tokens: places in sequences' KV.
        buffered: places in write buffers, by memory; usually all are in the write ring.
    """

    new_tokens: NewTokens
    buffered: Sequence[BufferedTokens]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "StepPlaces":
        """Return the places of these chunks' tokens."""
        return cls(
            new_tokens([(chunk.kv, len(chunk.token_ids)) for chunk in chunks]),
            _buffered_tokens(chunks),
        )


def _buffered_tokens(chunks: Sequence[Chunk]) -> list[BufferedTokens]:
    # By the id of a memory's keys: any buffer in it, indices of the tokens, and their slots.
    chosen: dict[int, tuple[WriteBuffer, list[int], list[int]]] = {}
    start = 0
    for chunk in chunks:
        end = start + len(chunk.token_ids)
        count = chunk.end_token - chunk.first_written_token
        if chunk.write_buffer is not None and count:
            known = chosen.setdefault(id(chunk.write_buffer.keys), (chunk.write_buffer, [], []))
            known[1].extend(range(end - count, end))
            known[2].extend(chunk.write_buffer.slots_of(chunk.first_written_token, count))
        start = end
    return [
        BufferedTokens.of(
            buffer,
            torch.tensor(rows, device=buffer.device) if len(rows) < start else None,
            Places(slots, buffer.device),
        )
        for buffer, rows, slots in chosen.values()
    ]
