"""Stamps: headers of objects in stores that keep neither times nor checksums. Pure.

    offset  bytes
    0       8      magic "BLOBSTM1"
    8       8      time at which it was stored, nanoseconds since 1970, by its writer's clock
    16      8      nonce, different for each put
    24      8      number of bytes that follow the stamp
    32      8      xxh3_64 of these bytes
    40      8      xxh3_64 of the stamp before this field, and of the object's key

Little-endian. The last checksum includes the key, so that bytes are refused that were read from
memory which meanwhile holds another object.
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
    """A decoded stamp: what it says about the bytes behind it.

    Attributes:
        unix_ns: Unix time at which they were stored, in nanoseconds.
        num_bytes: their number.
        checksum: their xxh3_64.
    """

    unix_ns: int
    num_bytes: int
    checksum: int

    def matches(self, data: bytes | memoryview) -> bool:
        """Whether these bytes have the stamp's length and checksum."""
        return len(data) == self.num_bytes and xxhash.xxh3_64_intdigest(data) == self.checksum


def stamp_bytes(key: str, data: bytes | bytearray, unix_ns: int, nonce: bytes) -> bytes:
    """Encode the stamp for an object's bytes."""
    checksum = xxhash.xxh3_64_intdigest(data)
    start = _START.pack(MAGIC, unix_ns, nonce, len(data), checksum)
    return start + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + key.encode()))


def read_stamp(key: str, head: bytes) -> Stamp | None:
    """Decode an object's first STAMP_BYTES; None if they are no valid stamp for this key."""
    if len(head) != STAMP_BYTES or not head.startswith(MAGIC):
        return None
    start = head[: _START.size]
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + key.encode())) != head[_START.size :]:
        return None
    _, unix_ns, _, num_bytes, checksum = _START.unpack(start)
    return Stamp(unix_ns, num_bytes, checksum)
