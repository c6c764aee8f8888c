"""The byte ranges of a block's rows in its slot, and the checksums of these rows (D11).

A row is one token's bytes of one component (such as the keys) of one layer. Components are
token-major, so the first rows of a component are one run of bytes, and all rows of a full block are
one run per layer.

A block has one checksum per layer slice: xxh3_64 of its used bytes, which are the first num_tokens
rows of every component, in order. Padding and unused rows are never hashed. A part of a state or of
a window has no tokens: all bytes of its slot are used. Checksums are packed as little-endian
uint64, one per layer.

Pure and thread-safe; xxhash releases the GIL for large slices.
"""

import struct
from itertools import accumulate, chain
from typing import TypeAlias

import xxhash

from shared.types.kv_layout import KVLayout

CHECKSUM_BYTES = 8  # per layer
_CHECKSUM = struct.Struct("<Q")

Bytes: TypeAlias = bytes | bytearray | memoryview
Run: TypeAlias = tuple[int, int]  # half-open, in bytes from the slot's start


class SlotRows:
    """The runs of one layout, computed once: they are looked up for every block.

    Attributes:
        num_layers: number of layers of the layout.
        components: (offset in a token block's slot, bytes of one row) of each component of each
            layer that has tokens.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.num_layers = len(layout.layers)
        self._block_tokens = layout.block_tokens
        self._full = tuple(
            (start, start + layer.token_bytes * layout.block_tokens)
            for start, layer in zip(layout.slice_offsets, layout.token_layers, strict=True)
        )
        ends = tuple(accumulate(layout.slot_slices))
        self._slices = tuple(zip((0, *ends), ends, strict=False))
        self._of_layer = tuple(
            tuple(
                (layout.component_offset(layer_index, component_index), component.token_bytes)
                for component_index, component in enumerate(layer.components)
            )
            for layer_index, layer in enumerate(layout.token_layers)
        )
        self.components = tuple(chain.from_iterable(self._of_layer))

    def whole_runs(self, num_tokens: int) -> tuple[Run, ...]:
        """Return the used byte range of each layer slice, if each is one run; else nothing."""
        if num_tokens == self._block_tokens:
            return self._full
        return () if num_tokens else self._slices

    def runs(self, layer_index: int, num_tokens: int) -> tuple[Run, ...]:
        """Return the used byte ranges of a layer slice: the first rows of each component."""
        whole = self.whole_runs(num_tokens)
        if whole:
            return (whole[layer_index],)
        return tuple(
            (start, start + token_bytes * num_tokens)
            for start, token_bytes in self._of_layer[layer_index]
        )


def checksum(data: Bytes) -> int:
    """Return the checksum of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(data)


class BlockHasher:
    """Hashes the blocks of one layout."""

    def __init__(self, layout: KVLayout) -> None:
        self._rows = SlotRows(layout)
        self._packing = struct.Struct(f"<{self._rows.num_layers}Q")

    def layer_checksum(self, memory: memoryview, layer_index: int, num_tokens: int) -> int:
        """Return the checksum of one layer slice of a slot."""
        runs = self._rows.runs(layer_index, num_tokens)
        if len(runs) == 1:
            return checksum(memory[runs[0][0] : runs[0][1]])
        digest = xxhash.xxh3_64()
        for start, end in runs:
            digest.update(memory[start:end])
        return digest.intdigest()

    def checksums(self, memory: memoryview, num_tokens: int) -> bytes:
        """Return the packed checksums of all layer slices of a slot."""
        whole = self._rows.whole_runs(num_tokens)
        if whole:  # as nearly always: without calls that cost more than the hash of a small slice
            digest = xxhash.xxh3_64_intdigest
            return self._packing.pack(*[digest(memory[start:end]) for start, end in whole])
        layers = range(self._rows.num_layers)
        return self._packing.pack(
            *[self.layer_checksum(memory, layer, num_tokens) for layer in layers]
        )

    def matches(
        self, memory: memoryview, num_tokens: int, checksums: bytes, layers: range | None = None
    ) -> bool:
        """Whether a slot's bytes have these checksums, in the given layers or in all."""
        if len(checksums) != CHECKSUM_BYTES * self._rows.num_layers:
            return False
        if layers is None:
            return self.checksums(memory, num_tokens) == checksums
        return all(
            self.layer_checksum(memory, layer, num_tokens) == checksum_at(checksums, layer)
            for layer in layers
        )


def checksum_at(checksums: bytes, layer_index: int) -> int:
    """Return one layer's checksum of the packed ones."""
    return int(_CHECKSUM.unpack_from(checksums, CHECKSUM_BYTES * layer_index)[0])
