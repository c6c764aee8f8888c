"""The header of an extent: which block lies here, and how its bytes are verified.

     0  magic "KVDX"
     4  version, uint32
     8  xxh3_64 of bytes [16, end of the token ids)
    16  block key, 16 bytes
    32  layout fingerprint, 16 bytes
    48  num_tokens, uint32
    52  number of layers, uint32
    56  zero, 8 bytes
    64  checksums, uint64 per layer: see kvd/tiers/checksums.py
     …  token ids, uint32 per token
     …  zeros to the next sector

Little-endian. Pure.
"""

import struct

from kvd.core.records.extent_shape import HEADER_FIXED_BYTES, ExtentShape
from kvd.core.records.rows import StoredBlock
from kvd.tiers.checksums import CHECKSUM_BYTES, checksum
from shared.types.block_key import KEY_BYTES, TOKEN_BYTES

MAGIC = b"KVDX"
VERSION = 1

_START = struct.Struct("<4sIQ")
_FIXED = struct.Struct(f"<4sIQ{KEY_BYTES}s{KEY_BYTES}sII8x")
assert _FIXED.size == HEADER_FIXED_BYTES  # noqa: S101 - the shape and the format agree


class HeaderFormat:
    """Headers of one layout's extents."""

    def __init__(self, shape: ExtentShape) -> None:
        self.num_bytes = shape.header_bytes
        self._num_layers = len(shape.layout.layers)
        self._block_tokens = shape.layout.block_tokens
        self._digest = bytes.fromhex(shape.layout.fingerprint)
        self._tokens_offset = HEADER_FIXED_BYTES + CHECKSUM_BYTES * self._num_layers

    def pack_into(
        self, buffer: memoryview, key: bytes, num_tokens: int, block: StoredBlock
    ) -> None:
        """Write a header to the first num_bytes of `buffer`."""
        end = self._tokens_offset + TOKEN_BYTES * num_tokens
        _FIXED.pack_into(
            buffer, 0, MAGIC, VERSION, 0, key, self._digest, num_tokens, self._num_layers
        )
        buffer[HEADER_FIXED_BYTES : self._tokens_offset] = block.checksums
        buffer[self._tokens_offset : end] = block.token_ids
        buffer[end : self.num_bytes] = bytes(self.num_bytes - end)
        _START.pack_into(buffer, 0, MAGIC, VERSION, checksum(buffer[_START.size : end]))

    def unpack(self, buffer: memoryview, key: bytes, num_tokens: int) -> StoredBlock | None:
        """Read a header; None unless it is whole and that of this block."""
        magic, version, crc, found_key, digest, found_tokens, num_layers = _FIXED.unpack_from(
            buffer
        )
        expected = (MAGIC, VERSION, key, self._digest, num_tokens, self._num_layers)
        if (magic, version, found_key, digest, found_tokens, num_layers) != expected:
            return None
        if not 0 < num_tokens <= self._block_tokens:
            return None
        end = self._tokens_offset + TOKEN_BYTES * num_tokens
        if checksum(buffer[_START.size : end]) != crc:
            return None
        return StoredBlock(
            token_ids=bytes(buffer[self._tokens_offset : end]),
            checksums=bytes(buffer[HEADER_FIXED_BYTES : self._tokens_offset]),
        )
