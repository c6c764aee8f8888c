"""One extent being read, group of layers by group of layers, each verified before it counts.

The first group brings the header; the others may be read in any order, at the same time, once that
has succeeded. Bytes of a group whose outcome is not OK may have been overwritten in the slot.

Where tenants have keys an extent may be sealed or plain, which shows once it is read; so it goes
through the staging buffer, whatever it is.
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

Source: TypeAlias = Callable[[int, list[memoryview]], bool]  # fills buffers from an offset on

log = get_logger(__name__)


class ExtentRead:
    """See the module docstring. Its groups may be run by several threads.

    Attributes:
        groups: what there is to read, in order.
        stored: what the header says, once the first group is there.
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
        """Plan to read an extent; see the module docstring.

        Args:
            extent_format: extent format of its layout.
            key: key of the block.
            num_tokens: number of tokens of the block.
            memory: the slot to fill; None: the extent is only verified.
            groups: groups of layers, in order.
            source: reads from the extent; False: its file ends before.
            sealed: opens extents that are sealed; None: none is.
        """
        self._format = extent_format
        self._key = key
        self._num_tokens = num_tokens
        self._memory = memory
        self._source = source
        self._sealed = sealed
        self._opened: OpenedExtent | None = None  # if this one is sealed
        self.groups = groups
        self.stored: StoredBlock | None = None

    def run(self, index: int, staging: Staging) -> IoOutcome:
        """Read and verify one group; blocks."""
        try:
            is_good = self._run(index, staging)
        except FileNotFoundError:
            is_good = False
        except OSError as error:
            log.warning("ssd_read_failed", block=self._key.hex(), error=str(error))
            return IoOutcome.TRANSIENT
        return IoOutcome.OK if is_good else IoOutcome.CORRUPT

    def _run(self, index: int, staging: Staging) -> bool:
        group = self.groups[index]
        header_bytes = 0 if index else self._format.header.num_bytes
        if self._sealed or self._memory is None or not self._format.is_full(self._num_tokens):
            end = header_bytes + group.num_bytes
            buffer = staging.take(end + SPARE_BYTES)
            return (
                self._source(group.offset - header_bytes, [buffer[:end]])
                and self._has_header(buffer[:header_bytes])
                and self._take_staged(group, buffer[header_bytes:])
            )
        header = staging.take(header_bytes)
        start = group.offset - self._format.header.num_bytes  # the slot's own offset
        body = self._memory[start : start + group.num_bytes]
        buffers = [header, body] if header_bytes else [body]
        if not self._source(group.offset - header_bytes, buffers) or not self._has_header(header):
            return False
        hasher, checksums = self._format.hasher, self._checksums()
        return hasher.matches(self._memory, self._num_tokens, checksums, group.layers)

    def _has_header(self, header: memoryview) -> bool:
        """Take over the header, which only the first group has."""
        if not len(header):
            return self.stored is not None
        if self._sealed and is_sealed(header):
            self._opened = self._sealed.opened(header, self._key, self._num_tokens)
            self.stored = self._opened.stored if self._opened else None
        else:
            self.stored = self._format.header.unpack(header, self._key, self._num_tokens)
        return self.stored is not None

    def _take_staged(self, group: GroupPlan, body: memoryview) -> bool:
        """Verify slices in the staging buffer, then copy their rows to the slot.

        `body` has SPARE_BYTES more than the slices.
        """
        if self._opened:
            return self._opened.take(group, body, self._memory)
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
