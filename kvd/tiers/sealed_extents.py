"""Extents that are sealed: how a block's slices are sealed on their way out, and opened again.

Everything goes through the staging buffer: a slot's slice is sealed straight into it, and opened
straight out of it into the slot, if the block is full; of a partial block the used rows are put
together first. Only used bytes are sealed; the rest of a slice on SSD is zeros.

A cipher wants a part and its tag side by side, but there they are the slice and whatever follows.
So slices are sealed in ascending order, each overwriting the tag that the one before it has left
behind; and opened in descending order, each tag overwriting the beginning of a slice that is done.

The header of a sealed extent says by which key its bytes are read; the rest of it is sealed, too:

     0  magic "KVDS"
     4  version, uint32
     8  zero, 8 bytes
    16  id of the tenant's key, 16 bytes
    32  salt of this extent, 32 bytes: see kvd/encryption/sealing.py
    64  part 0, sealed: tag of each layer slice, 16 bytes each
                        checksums, uint64 per layer: see kvd/tiers/slot_rows.py
                        token ids, uint32 per token
     …  tag of part 0, 16 bytes
     …  zeros to the end of the header

Part 0 is bound to the bytes before it, and to block key, layout and number of tokens, which are not
in it: the index says which block lies here, and no other one opens. Layer slice n is part n + 1.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvd.core.records.entries import StoredBlock
from kvd.core.records.extent_shape import HEADER_FIXED_BYTES, ExtentShape
from kvd.encryption.keyring import Keyring
from kvd.tiers.direct_io import STAGED_IO_BYTES, Staging
from kvd.tiers.extent_format import ExtentFormat, GroupPlan, ToWrite
from kvd.tiers.slot_rows import CHECKSUM_BYTES
from shared.encryption.sealing import KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, Seal, key_id, new_salt
from shared.types.block_key import TOKEN_BYTES

SEALED_MAGIC = b"KVDS"
VERSION = 1
SPARE_BYTES = TAG_BYTES  # that `OpenedExtent.take` needs behind the last slice

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


class SealedFormat:
    """One layout's sealed extents.

    Args:
        extent_format: extent format of the layout.
        keys: the tenants'; they say whether what is written now is to be sealed.
    """

    def __init__(self, extent_format: ExtentFormat, keys: Keyring) -> None:
        self._format = extent_format
        self.keys = keys
        self._header = SealedHeaderFormat(extent_format.shape)

    # ----------------------------------------------------------------------------------- writing

    def pieces(self, run: Sequence[ToWrite], staging: Staging) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset from the first extent's start, bytes) of what to write, in any order.

        Several blocks make one piece. One block has a piece for each group of layers, the header's
        last: only then are all tags known.
        """
        if len(run) == 1:
            yield from self._pieces_of_one(run[0], staging)
            return
        full_bytes = self._format.shape.full_bytes
        buffer = staging.take(full_bytes * len(run) + TAG_BYTES)
        for index, block in enumerate(run):
            extent = buffer[index * full_bytes : (index + 1) * full_bytes + TAG_BYTES]
            new = new_seal(self.keys.key_of(block.tenant))
            (group,) = self._format.plan(block.num_tokens, math.inf)
            tags = self._seal_group(new, block, group, extent[self._header.num_bytes :])
            self._header.pack_into(extent, new, block.key, tags, block.stored)
        yield 0, buffer[:-TAG_BYTES]

    def _pieces_of_one(self, block: ToWrite, staging: Staging) -> Iterator[tuple[int, memoryview]]:
        new = new_seal(self.keys.key_of(block.tenant))
        tags = b""
        first, *others = self._format.plan(block.num_tokens, STAGED_IO_BYTES)
        for group in reversed(others):
            buffer = staging.take(group.num_bytes + TAG_BYTES)
            tags = self._seal_group(new, block, group, buffer) + tags
            yield group.offset, buffer[:-TAG_BYTES]
        header_bytes = self._header.num_bytes
        buffer = staging.take(header_bytes + first.num_bytes + TAG_BYTES)
        tags = self._seal_group(new, block, first, buffer[header_bytes:]) + tags
        self._header.pack_into(buffer, new, block.key, tags, block.stored)
        yield 0, buffer[:-TAG_BYTES]

    def _seal_group(
        self, new: NewSeal, block: ToWrite, group: GroupPlan, buffer: memoryview
    ) -> bytes:
        """Fill the buffer with a group's slices, and a tag behind; returns all tags."""
        tags = []
        offset = 0
        for layer in group.layers:
            used = self._format.used_rows(block.memory, layer, block.num_tokens)
            used_end = offset + len(used)
            new.seal.seal_into(layer + 1, used, buffer[offset : used_end + TAG_BYTES])
            tags.append(bytes(buffer[used_end : used_end + TAG_BYTES]))
            offset += self._format.slice_bytes(layer, block.num_tokens)
            buffer[used_end:offset] = bytes(offset - used_end)
        return b"".join(tags)

    # ----------------------------------------------------------------------------------- reading

    def opened(self, header: memoryview, key: bytes, num_tokens: int) -> "OpenedExtent | None":
        """Read the header of a sealed extent; None unless it is this block's."""
        opened = self._header.unpack(header, key, num_tokens, self.keys)
        return None if opened is None else OpenedExtent(self._format, num_tokens, opened)


class OpenedExtent:
    """A sealed extent whose header could be read.

    Attributes:
        stored: what the header says.
    """

    def __init__(self, extent_format: ExtentFormat, num_tokens: int, header: OpenedHeader) -> None:
        self._format = extent_format
        self._num_tokens = num_tokens
        self._header = header
        self.stored = header.stored

    def take(self, group: GroupPlan, body: memoryview, memory: memoryview | None) -> bool:
        """Open a group's slices into the slot, if there is one; False if one is not what it was.

        Args:
            group: group of layers.
            body: slices of the group as they were read, and SPARE_BYTES behind.
            memory: memory of the slot.
        """
        end = group.num_bytes
        for layer in reversed(group.layers):
            offset = end - self._format.slice_bytes(layer, self._num_tokens)
            used_end = offset + self._format.used_bytes(layer, self._num_tokens)
            body[used_end : used_end + TAG_BYTES] = self._tag(layer)
            if not self._open(layer, body[offset : used_end + TAG_BYTES], memory):
                return False
            end = offset
        return True

    def _tag(self, layer: int) -> bytes:
        return self._header.tags[TAG_BYTES * layer : TAG_BYTES * (layer + 1)]

    def _open(self, layer: int, sealed: memoryview, memory: memoryview | None) -> bool:
        seal, part = self._header.seal, layer + 1
        if memory is not None and self._format.is_full(self._num_tokens):
            ((start, end),) = self._format.rows.runs(layer, self._num_tokens)
            return seal.open_into(part, sealed, memory[start:end])
        used = seal.open(part, sealed)
        if used is not None and memory is not None:
            self._format.scatter(layer, self._num_tokens, used, memory)
        return used is not None


def is_sealed(header: memoryview) -> bool:
    """Whether an extent that begins so is sealed."""
    return header[: len(SEALED_MAGIC)] == SEALED_MAGIC
