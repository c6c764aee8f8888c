"""A stamp before an object's bytes, for a store that keeps neither times nor checksums. Pure.

    offset  bytes
    0       8      magic "BLOBSTM1"
    8       8      when it was stored, nanoseconds since 1970, by its writer's clock
    16      8      nonce, which tells this writing from all others
    24      8      how many bytes follow
    32      8      xxh3_64 of these
    40      8      xxh3_64 of all the stamp before this, and of the object's key

Little-endian. The key is part of it: what was read from memory that is another object's by now is
found out.
"""

import struct
from dataclasses import dataclass

import xxhash

MAGIC = b"BLOBSTM1"
NONCE_BYTES = 8
_START = struct.Struct(f"<8sQ{NONCE_BYTES}sQQ")
_CHECKSUM = struct.Struct("<Q")
STAMP_BYTES = _START.size + _CHECKSUM.size


@dataclass(frozen=True)
class Stamp:
    """What a stamp says of the bytes behind it.

    Attributes:
        unix_ns: when they were stored.
        num_bytes: how many there are.
        checksum: of them.
    """

    unix_ns: int
    num_bytes: int
    checksum: int

    def is_of(self, data: bytes | memoryview) -> bool:
        """Whether these are the bytes."""
        return len(data) == self.num_bytes and xxhash.xxh3_64_intdigest(data) == self.checksum


def stamp_bytes(key: str, data: bytes | bytearray, unix_ns: int, nonce: bytes) -> bytes:
    """Encode the stamp of an object that is about to be stored."""
    checksum = xxhash.xxh3_64_intdigest(data)
    start = _START.pack(MAGIC, unix_ns, nonce, len(data), checksum)
    return start + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + key.encode()))


def read_stamp(key: str, head: bytes) -> Stamp | None:
    """Decode an object's first STAMP_BYTES; None: they are no stamp of it."""
    if len(head) != STAMP_BYTES or not head.startswith(MAGIC):
        return None
    start = head[: _START.size]
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + key.encode())) != head[_START.size :]:
        return None
    _, unix_ns, _, num_bytes, checksum = _START.unpack(start)
    return Stamp(unix_ns, num_bytes, checksum)
