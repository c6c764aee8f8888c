"""Sealed extents: encryption of a block's layer slices when written, decryption when read.

Everything goes through the staging buffer. A slice of a full block is sealed from the slot directly
into the buffer, and opened from the buffer directly into the slot. For a partial block the used
rows are gathered first. Only used bytes are sealed; the rest of a slice on SSD is zeros.

The cipher reads and writes a part and its tag contiguously, but in an extent the next slice begins
where the tag would be. So slices are sealed in ascending order, and each overwrites the tag behind
the previous one; they are opened in descending order, and each tag overwrites the beginning of a
slice that has been opened already.

The header of a sealed extent names the key in plain; the rest of the header is sealed, too:

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

Part 0 is bound to the bytes before it, and to block key, layout and number of tokens, which it does
not contain: the index says which block lies here, and an extent of another block does not open.
Layer slice n is part n + 1.
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
SPARE_BYTES = TAG_BYTES  # room that `OpenedExtent.open_group` needs behind the last slice

_START = struct.Struct(f"<4sI8x{KEY_ID_BYTES}s{SALT_BYTES}s")
_COUNT = struct.Struct("<I")
assert _START.size == HEADER_FIXED_BYTES  # noqa: S101 - the shape and the format agree


class NewSeal(NamedTuple):
    """The seal of an extent that is about to be written, and the plain start of its header."""

    seal: Seal
    start: bytes


class OpenedHeader(NamedTuple):
    """The contents of an opened header, and the seal of the slices behind it.

    Attributes:
        seal: opens the slices.
        tags: tags of all layer slices, concatenated.
        stored: token ids and checksums of the block.
    """

    seal: Seal
    tags: bytes
    stored: StoredBlock


def new_seal(key: bytes) -> NewSeal:
    """Return a new seal, with a random salt, for one extent of the tenant with this key."""
    salt = new_salt()
    return NewSeal(Seal(key, salt), _START.pack(SEALED_MAGIC, VERSION, key_id(key), salt))


class SealedHeaderFormat:
    """The headers of one layout's sealed extents."""

    def __init__(self, shape: ExtentShape) -> None:
        self.num_bytes = shape.header_bytes
        self._tags_bytes = TAG_BYTES * len(shape.layout.layers)
        self._checksums_end = self._tags_bytes + CHECKSUM_BYTES * len(shape.layout.layers)
        self._digest = bytes.fromhex(shape.layout.fingerprint)

    def pack_into(
        self, buffer: memoryview, new: NewSeal, key: bytes, tags: bytes, block: StoredBlock
    ) -> None:
        """Seal a header into the first `num_bytes` of `buffer`.

        Args:
            buffer: memory to write to.
            new: the extent's new seal.
            key: block key.
            tags: tags of all layer slices, concatenated.
            block: the block's token ids and checksums.
        """
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
        """Open a header; return None unless it is intact, of this block, and its key is known."""
        magic, version, name, salt = _START.unpack_from(buffer)
        tenant_key = keys.find_key(name)
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
    """The sealed extents of one layout.

    Args:
        extent_format: format of the layout's extents.
        keys: keys of the tenants; `keys.is_sealing` says whether new extents are sealed.
    """

    def __init__(self, extent_format: ExtentFormat, keys: Keyring) -> None:
        self._format = extent_format
        self.keys = keys
        self._header = SealedHeaderFormat(extent_format.shape)

    # ----------------------------------------------------------------------------------- writing

    def pieces(self, run: Sequence[ToWrite], staging: Staging) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset from the first extent's start, bytes) of each piece to write.

        Several blocks make one piece. A single block has a piece for each group of layers. The
        piece with the header is the last: only then all tags are known.

        Args:
            run: blocks whose extents lie side by side.
            staging: staging buffer of the calling thread; it holds one piece at a time.
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
        first, *later = self._format.plan(block.num_tokens, STAGED_IO_BYTES)
        for group in reversed(later):
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
        """Seal a group's slices into the buffer; return their tags, concatenated."""
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

    def open_extent(self, header: memoryview, key: bytes, num_tokens: int) -> "OpenedExtent | None":
        """Open the header of a sealed extent; return None unless it is valid and of this block."""
        opened = self._header.unpack(header, key, num_tokens, self.keys)
        return None if opened is None else OpenedExtent(self._format, num_tokens, opened)


class OpenedExtent:
    """A sealed extent whose header was opened.

    Attributes:
        stored: token ids and checksums of the block.
    """

    def __init__(self, extent_format: ExtentFormat, num_tokens: int, header: OpenedHeader) -> None:
        self._format = extent_format
        self._num_tokens = num_tokens
        self._header = header
        self.stored = header.stored

    def open_group(self, group: GroupPlan, body: memoryview, memory: memoryview | None) -> bool:
        """Open and verify a group's slices; return False if one of them is not valid.

        Args:
            group: group of layers.
            body: slices of the group as they were read, and SPARE_BYTES behind; overwritten.
            memory: memory of the slot to fill; None: the slices are only verified.
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
    """Whether an extent that begins with these bytes is sealed."""
    return header[: len(SEALED_MAGIC)] == SEALED_MAGIC
