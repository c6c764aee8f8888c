"""Where a step's new tokens go: to their sequences' KV, and to the write buffers beside it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.kv.layer_tensors import Places, SlotTensors
from inference_svc.runtime.kv.new_tokens import NewTokens, new_tokens
from inference_svc.runtime.kv.sequence_kv import WriteBuffer


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
