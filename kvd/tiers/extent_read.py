"""The read of one extent, one group of layers at a time. Each group is verified.

The first group includes the header. Once it has succeeded, the other groups may be read in any
order and at the same time. If a group's outcome is not OK, its bytes in the slot may have been
overwritten.

Where tenants have keys, an extent may be sealed or plain. That is known only when its header is
read, so every extent goes through the staging buffer there.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kvd.core.records.actions import IoOutcome
from kvd.tiers.direct_io import Staging
from kvd.tiers.extent_format import ExtentFormat, GroupPlan
from kvd.tiers.sealed_extents import SPARE_BYTES, OpenedExtent, SealedFormat, is_sealed
from kvd.tiers.slot_rows import checksum, checksum_at
from shared.process.log import get_logger

if TYPE_CHECKING:
    from kvd.core.records.entries import StoredBlock

# Fills buffers from an offset of the extent on; False if the file ends before.
Source: TypeAlias = Callable[[int, list[memoryview]], bool]

log = get_logger(__name__)


class ExtentRead:
    """A planned or running read of one extent. Several threads may run its groups.

    Attributes:
        groups: groups of layers to read, in order.
        stored: token ids and checksums of the header; None until the first group is read.
    """

    def __init__(
        self,
        extent_format: ExtentFormat,
        key: bytes,
        num_tokens: int,
        memory: memoryview | None,
        groups: tuple[GroupPlan, ...],
        source: Source,
        sealed: SealedFormat | None,
    ) -> None:
        """Plan the read of an extent.

        Args:
            extent_format: format of the layout's extents.
            key: key of the block.
            num_tokens: number of tokens of the block.
            memory: memory of the slot to fill; None: the extent is only verified.
            groups: groups of layers, in order.
            source: reads from the extent.
            sealed: format of sealed extents; None: no extent is sealed.
        """
        self._format = extent_format
        self._key = key
        self._num_tokens = num_tokens
        self._memory = memory
        self._source = source
        self._sealed = sealed
        self._opened: OpenedExtent | None = None  # set once the header shows a sealed extent
        self.groups = groups
        self.stored: StoredBlock | None = None

    def run(self, index: int, staging: Staging) -> IoOutcome:
        """Read and verify one group; blocks.

        Args:
            index: index of the group in `groups`.
            staging: staging buffer of the calling thread.
        """
        try:
            is_valid = self._run(index, staging)
        except FileNotFoundError:
            is_valid = False
        except OSError as error:
            log.warning("ssd_read_failed", block=self._key.hex(), error=str(error))
            return IoOutcome.TRANSIENT
        return IoOutcome.OK if is_valid else IoOutcome.CORRUPT

    def _run(self, index: int, staging: Staging) -> bool:
        group = self.groups[index]
        header_bytes = 0 if index else self._format.header.num_bytes
        if self._sealed or self._memory is None or not self._format.is_full(self._num_tokens):
            end = header_bytes + group.num_bytes
            buffer = staging.take(end + SPARE_BYTES)
            return (
                self._source(group.offset - header_bytes, [buffer[:end]])
                and self._read_header(buffer[:header_bytes])
                and self._unpack_staged(group, buffer[header_bytes:])
            )
        header = staging.take(header_bytes)
        start = group.offset - self._format.header.num_bytes  # offset in the slot
        body = self._memory[start : start + group.num_bytes]
        buffers = [header, body] if header_bytes else [body]
        if not self._source(group.offset - header_bytes, buffers) or not self._read_header(header):
            return False
        hasher, checksums = self._format.hasher, self._checksums()
        return hasher.matches(self._memory, self._num_tokens, checksums, group.layers)

    def _read_header(self, header: memoryview) -> bool:
        """Decode the header, which only the first group has; return whether it is valid."""
        if not len(header):
            return self.stored is not None
        if self._sealed and is_sealed(header):
            self._opened = self._sealed.open_extent(header, self._key, self._num_tokens)
            self.stored = self._opened.stored if self._opened else None
        else:
            self.stored = self._format.header.unpack(header, self._key, self._num_tokens)
        return self.stored is not None

    def _unpack_staged(self, group: GroupPlan, body: memoryview) -> bool:
        """Verify slices in the staging buffer, then copy their rows to the slot.

        `body` has SPARE_BYTES more than the slices.
        """
        if self._opened:
            return self._opened.open_group(group, body, self._memory)
        offset, checksums = 0, self._checksums()
        for layer in group.layers:
            used_bytes = self._format.used_bytes(layer, self._num_tokens)
            used = body[offset : offset + used_bytes]
            if checksum(used) != checksum_at(checksums, layer):
                return False
            if self._memory is not None:
                self._format.scatter(layer, self._num_tokens, used, self._memory)
            offset += self._format.slice_bytes(layer, self._num_tokens)
        return True

    def _checksums(self) -> bytes:
        assert self.stored is not None, "the first group brings the header"  # noqa: S101
        return self.stored.checksums
