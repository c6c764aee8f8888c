"""Where a step's new tokens go: to their sequences' KV, and to the write buffers beside it.

Places are cut once a step and written once a layer, in few calls: those of all sequences in one.
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
    """Places of new tokens, of all sequences of a step."""

    def write(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new tokens.

        Args:
            layer_index: the layer.
            key: [1, kv_heads, tokens, head_dim], after RoPE, the sequences' one after another.
            value: [1, kv_heads, tokens, value_dim].
        """

    def write_index(self, layer_index: int, index: Tensor) -> None:
        """Write index keys, [1, 1, tokens, index_dim], of a layer that has them."""


def new_tokens(appended: Sequence[tuple[SequenceKv, int]]) -> NewTokens:
    """Cut the places of so many new tokens behind each sequence's; all of them are of one kind."""
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
    """Tokens of sequences that have memory of their own."""

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
    """Tokens that go to slots of one region: the one that this KV is in."""

    def __init__(self, kv: PagedKv, places: Sequence[Places]) -> None:
        """Store where the tokens go, by group of layers."""
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
    """New tokens that go to write buffers of one memory, all buffers in one call.

    Attributes:
        components: keys, values and, if there are any, index keys of that memory.
        chosen: which of the step's tokens, as it runs them; None: all.
        places: where each of these goes.
    """

    components: Sequence[SlotTensors]
    chosen: Tensor | None
    places: Places

    @classmethod
    def of(cls, buffer: WriteBuffer, chosen: Tensor | None, places: Places) -> "BufferedTokens":
        """Return places in the memory that this buffer is in."""
        return cls(buffer.components, chosen, places)

    def write(self, layer_index: int, *made: Tensor, first: int = 0) -> None:
        """Write components of one layer's tokens, of the whole step.

        Args:
            layer_index: the layer.
            made: components before RoPE, [tokens, kv_heads, dim] each.
            first: which component the first of them is; 0: keys, 2: index keys.
        """
        for component_index, tokens in enumerate(made, first):
            rows = tokens if self.chosen is None else tokens.index_select(0, self.chosen)
            self.places.write(self.components[component_index][layer_index], rows)


class StepPlaces(NamedTuple):
    """See the module docstring.

    Attributes:
        new_tokens: their places in sequences' KV.
        buffered: those in write buffers, by memory: usually all in the write ring.
    """

    new_tokens: NewTokens
    buffered: Sequence[BufferedTokens]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "StepPlaces":
        """Cut the places of these chunks' tokens."""
        return cls(
            new_tokens([(chunk.kv, len(chunk.token_ids)) for chunk in chunks]), _buffered(chunks)
        )


def _buffered(chunks: Sequence[Chunk]) -> list[BufferedTokens]:
    chosen: dict[int, tuple[WriteBuffer, list[int], list[int]]] = {}  # by memory
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
