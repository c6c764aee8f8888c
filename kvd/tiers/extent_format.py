"""The format of extents: how the blocks of one layout lie on SSD. Used by readers and writers.

Everything that depends on the layout only is computed once: reading a block of 80 layers takes
less time than iterating over its layout. Layers are transferred in groups, because a single I/O
pays from about a mebibyte on.

An extent begins with a header, which names its block and holds the checksums of its bytes.

     0  magic "KVDX"
     4  version, uint32
     8  xxh3_64 of bytes [16, end of the token ids)
    16  block key, 16 bytes
    32  layout fingerprint, 16 bytes
    48  num_tokens, uint32; 0: a part of a state or of a window
    52  number of layers, uint32
    56  zero, 8 bytes
    64  checksums, uint64 per layer: see kvd/tiers/slot_rows.py
     …  token ids, uint32 per token
     …  zeros to the next sector

Little-endian. Pure.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvd.core.records.entries import StoredBlock
from kvd.core.records.extent_shape import HEADER_FIXED_BYTES, ExtentShape
from kvd.tiers.slot_rows import CHECKSUM_BYTES, BlockHasher, SlotRows, checksum
from shared.types.block_key import KEY_BYTES, TOKEN_BYTES
from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES, align_up

MAGIC = b"KVDX"
VERSION = 1

_START = struct.Struct("<4sIQ")
_FIXED = struct.Struct(f"<4sIQ{KEY_BYTES}s{KEY_BYTES}sII8x")
assert _FIXED.size == HEADER_FIXED_BYTES  # noqa: S101 - the shape and the format agree


class HeaderFormat:
    """The headers of one layout's extents."""

    def __init__(self, shape: ExtentShape) -> None:
        self.num_bytes = shape.header_bytes
        self._num_layers = len(shape.layout.layers)
        self._block_tokens = shape.layout.block_tokens
        self._fewest_tokens = shape.layout.fewest_block_tokens
        self._digest = bytes.fromhex(shape.layout.fingerprint)
        self._tokens_offset = HEADER_FIXED_BYTES + CHECKSUM_BYTES * self._num_layers

    def pack_into(
        self, buffer: memoryview, key: bytes, num_tokens: int, block: StoredBlock
    ) -> None:
        """Write a header to the first `num_bytes` of `buffer`."""
        end = self._tokens_offset + TOKEN_BYTES * num_tokens
        _FIXED.pack_into(
            buffer, 0, MAGIC, VERSION, 0, key, self._digest, num_tokens, self._num_layers
        )
        buffer[HEADER_FIXED_BYTES : self._tokens_offset] = block.checksums
        buffer[self._tokens_offset : end] = block.token_ids
        buffer[end : self.num_bytes] = bytes(self.num_bytes - end)
        _START.pack_into(buffer, 0, MAGIC, VERSION, checksum(buffer[_START.size : end]))

    def unpack(self, buffer: memoryview, key: bytes, num_tokens: int) -> StoredBlock | None:
        """Read a header; return None unless it is intact and names this block."""
        magic, version, crc, found_key, digest, found_tokens, num_layers = _FIXED.unpack_from(
            buffer
        )
        expected = (MAGIC, VERSION, key, self._digest, num_tokens, self._num_layers)
        if (magic, version, found_key, digest, found_tokens, num_layers) != expected:
            return None
        if not self._fewest_tokens <= num_tokens <= self._block_tokens:
            return None
        end = self._tokens_offset + TOKEN_BYTES * num_tokens
        if checksum(buffer[_START.size : end]) != crc:
            return None
        return StoredBlock(
            token_ids=bytes(buffer[self._tokens_offset : end]),
            checksums=bytes(buffer[HEADER_FIXED_BYTES : self._tokens_offset]),
        )


LAYERED_IO_BYTES = 1 << 20


def layer_groups(layer_bytes: Sequence[int], least_bytes: float) -> tuple[range, ...]:
    """Split layers into runs of at least `least_bytes` each; a remainder joins the last run."""
    groups: list[range] = []
    first, size = 0, 0
    for layer, num_bytes in enumerate(layer_bytes):
        size += num_bytes
        if size >= least_bytes:
            groups.append(range(first, layer + 1))
            first, size = layer + 1, 0
    if first < len(layer_bytes):
        start = groups.pop().start if groups else 0
        groups.append(range(start, len(layer_bytes)))
    return tuple(groups)


class ToWrite(NamedTuple):
    """A block that is to be written to its extent.

    Attributes:
        extent: first sector of the extent.
        key: block key.
        num_tokens: number of the block's tokens.
        stored: the block's token ids and checksums, for the header.
        memory: memory of the block's slot.
        tenant: tenant whose key seals the extent.
    """

    extent: int
    key: bytes
    num_tokens: int
    stored: StoredBlock
    memory: memoryview
    tenant: str


@dataclass(frozen=True)
class GroupPlan:
    """Consecutive layers of an extent that are transferred in one I/O.

    Attributes:
        layers: indices of the layers.
        offset: byte offset of the first layer's slice in the extent.
        num_bytes: size of all slices of the layers, padding included.
    """

    layers: range
    offset: int
    num_bytes: int


class ExtentFormat:
    """The extents of one layout: sizes, slices, headers and groups."""

    def __init__(self, layout: KVLayout) -> None:
        self.shape = ExtentShape(layout)
        self.header = HeaderFormat(self.shape)
        self.hasher = BlockHasher(layout)
        self.rows = SlotRows(layout)
        self.slot_bytes = layout.block_bytes
        is_filled = self.shape.num_sectors(layout.block_tokens) == self.shape.sectors_per_extent
        self._full_tokens = (layout.block_tokens, 0) if is_filled else (0,)
        self._plans: dict[tuple[int, float], tuple[GroupPlan, ...]] = {}
        self._token_bytes = tuple(layer.token_bytes for layer in layout.token_layers)

    def is_full(self, num_tokens: int) -> bool:
        """Whether an extent of this many tokens holds the slot's bytes as they are."""
        return num_tokens in self._full_tokens

    def used_bytes(self, layer_index: int, num_tokens: int) -> int:
        """Return how many bytes of one layer slice are used, and so hashed."""
        if not num_tokens:
            return self.shape.slice_bytes(layer_index, 0)
        return self._token_bytes[layer_index] * num_tokens

    def slice_bytes(self, layer_index: int, num_tokens: int) -> int:
        """Return the size of one layer slice in its extent, padding included."""
        return align_up(self.used_bytes(layer_index, num_tokens), SECTOR_BYTES)

    def used_rows(
        self, memory: memoryview, layer_index: int, num_tokens: int
    ) -> bytes | memoryview:
        """Return the used bytes of a slot's layer slice; a copy if they are not contiguous."""
        runs = self.rows.runs(layer_index, num_tokens)
        if len(runs) == 1:
            ((start, end),) = runs
            return memory[start:end]
        return b"".join(memory[start:end] for start, end in runs)

    def scatter(
        self, layer_index: int, num_tokens: int, used: bytes | memoryview, memory: memoryview
    ) -> None:
        """Copy the contiguous used bytes of a layer slice to their places in a slot."""
        done = 0
        for start, end in self.rows.runs(layer_index, num_tokens):
            memory[start:end] = used[done : done + end - start]
            done += end - start

    def plan(self, num_tokens: int, least_bytes: float) -> tuple[GroupPlan, ...]:
        """Return groups of at least `least_bytes` each; the first one follows the header."""
        known = self._plans.get((num_tokens, least_bytes))
        if known is None:
            known = self._plans[num_tokens, least_bytes] = self._plan(num_tokens, least_bytes)
        return known

    def _plan(self, num_tokens: int, least_bytes: float) -> tuple[GroupPlan, ...]:
        sizes = [self.slice_bytes(i, num_tokens) for i in range(len(self._token_bytes))]
        plans: list[GroupPlan] = []
        offset = self.header.num_bytes
        for layers in layer_groups(sizes, least_bytes):
            num_bytes = sum(sizes[layers.start : layers.stop])
            plans.append(GroupPlan(layers, offset, num_bytes))
            offset += num_bytes
        return tuple(plans)
