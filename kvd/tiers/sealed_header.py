"""The header of a sealed extent: by which key its bytes are read; the rest of it is sealed, too.

     0  magic "KVDS"
     4  version, uint32
     8  zero, 8 bytes
    16  id of the tenant's key, 16 bytes
    32  salt of this extent, 32 bytes: see kvd/encryption/sealing.py
    64  part 0, sealed: tag of each layer slice, 16 bytes each
                        checksums, uint64 per layer: see kvd/tiers/checksums.py
                        token ids, uint32 per token
     …  tag of part 0, 16 bytes
     …  zeros to the end of the header

Part 0 is bound to the bytes before it, and to block key, layout and number of tokens, which are not
in it: the index says which block lies here, and no other one opens. Layer slice n is part n + 1.
"""

import struct
from typing import NamedTuple

from kvd.core.records.extent_shape import HEADER_FIXED_BYTES, ExtentShape
from kvd.core.records.rows import StoredBlock
from kvd.encryption.keyring import Keyring
from kvd.encryption.sealing import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, Seal, key_id, new_salt
from kvd.tiers.checksums import CHECKSUM_BYTES
from shared.types.block_key import TOKEN_BYTES

SEALED_MAGIC = b"KVDS"
VERSION = 1

_START = struct.Struct(f"<4sI8x{KEY_ID_BYTES}s{SALT_BYTES}s")
_COUNT = struct.Struct("<I")
assert _START.size == HEADER_FIXED_BYTES  # noqa: S101 - the shape and the format agree


class NewSeal(NamedTuple):
    """A seal for an extent that is about to be written, and what its header begins with."""

    seal: Seal
    start: bytes


class OpenedHeader(NamedTuple):
    """What a header says, and the seal of the slices behind it."""

    seal: Seal
    tags: bytes
    stored: StoredBlock


def new_seal(key: bytes) -> NewSeal:
    """Draw a seal for one extent of the tenant with this key."""
    salt = new_salt()
    return NewSeal(Seal(key, salt), _START.pack(SEALED_MAGIC, VERSION, key_id(key), salt))


class SealedHeaderFormat:
    """Headers of one layout's sealed extents."""

    def __init__(self, shape: ExtentShape) -> None:
        self.num_bytes = shape.header_bytes
        self._tags_bytes = TAG_BYTES * len(shape.layout.layers)
        self._checksums_end = self._tags_bytes + CHECKSUM_BYTES * len(shape.layout.layers)
        self._digest = bytes.fromhex(shape.layout.fingerprint)

    def pack_into(
        self, buffer: memoryview, new: NewSeal, key: bytes, tags: bytes, block: StoredBlock
    ) -> None:
        """Write a header to the first num_bytes of `buffer`."""
        num_tokens = len(block.token_ids) // TOKEN_BYTES
        contents = tags + block.checksums + block.token_ids
        end = _START.size + len(contents) + TAG_BYTES
        buffer[: _START.size] = new.start
        bound = self._bound(new.start, key, num_tokens)
        new.seal.seal_into(0, contents, buffer[_START.size : end], bound)
        buffer[end : self.num_bytes] = bytes(self.num_bytes - end)

    def unpack(
        self, buffer: memoryview, key: bytes, num_tokens: int, keys: Keyring
    ) -> OpenedHeader | None:
        """Read a header; None unless it is whole, that of this block, and its key is there."""
        magic, version, name, salt = _START.unpack_from(buffer)
        tenant_key = keys.key_named(name)
        if (magic, version) != (SEALED_MAGIC, VERSION) or tenant_key is None:
            return None
        end = _START.size + self._checksums_end + TOKEN_BYTES * num_tokens + TAG_BYTES
        if not 0 < end <= self.num_bytes:
            return None
        seal = Seal(tenant_key, salt)
        bound = self._bound(bytes(buffer[: _START.size]), key, num_tokens)
        contents = seal.open(0, buffer[_START.size : end], bound)
        if contents is None:
            return None
        return OpenedHeader(
            seal,
            contents[: self._tags_bytes],
            StoredBlock(
                token_ids=contents[self._checksums_end :],
                checksums=contents[self._tags_bytes : self._checksums_end],
            ),
        )

    def _bound(self, start: bytes, key: bytes, num_tokens: int) -> bytes:
        return start + key + self._digest + _COUNT.pack(num_tokens)
