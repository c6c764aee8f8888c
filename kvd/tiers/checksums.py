"""Checksums of a block: xxh3_64 of each layer slice's used bytes (D11).

Used bytes are, of every component in order, the first num_tokens rows; padding and unused rows are
never hashed. Packed as little-endian uint64, one per layer. Pure, and safe in any thread: xxhash
gives the GIL up for large slices.
"""

import struct
from typing import TypeAlias

import xxhash

from kvd.tiers.slot_rows import SlotRows
from shared.types.kv_layout import KVLayout

CHECKSUM_BYTES = 8  # per layer
Bytes: TypeAlias = bytes | bytearray | memoryview
_CHECKSUM = struct.Struct("<Q")


def checksum(data: Bytes) -> int:
    """Of bytes that lie together."""
    return xxhash.xxh3_64_intdigest(data)


class BlockHasher:
    """Hashes the blocks of one layout."""

    def __init__(self, layout: KVLayout) -> None:
        self._rows = SlotRows(layout)

    def layer_checksum(self, memory: memoryview, layer_index: int, num_tokens: int) -> int:
        """Checksum of one layer slice of a slot."""
        runs = self._rows.runs(layer_index, num_tokens)
        if len(runs) == 1:
            return checksum(memory[runs[0][0] : runs[0][1]])
        digest = xxhash.xxh3_64()
        for start, end in runs:
            digest.update(memory[start:end])
        return digest.intdigest()

    def checksums(self, memory: memoryview, num_tokens: int) -> bytes:
        """Checksums of all layer slices of a slot."""
        layers = range(self._rows.num_layers)
        return b"".join(
            _CHECKSUM.pack(self.layer_checksum(memory, layer, num_tokens)) for layer in layers
        )

    def matches(
        self, memory: memoryview, num_tokens: int, checksums: bytes, layers: range | None = None
    ) -> bool:
        """Whether a slot's bytes, in these layers or all, are the ones that were hashed."""
        if len(checksums) != CHECKSUM_BYTES * self._rows.num_layers:
            return False
        return all(
            self.layer_checksum(memory, layer, num_tokens) == checksum_at(checksums, layer)
            for layer in (range(self._rows.num_layers) if layers is None else layers)
        )


def checksum_at(checksums: bytes, layer_index: int) -> int:
    """One layer's checksum out of the packed ones."""
    return int(_CHECKSUM.unpack_from(checksums, CHECKSUM_BYTES * layer_index)[0])
