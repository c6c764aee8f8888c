"""Volumes of a small layout over real files, with memory fit for direct I/O."""

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.core.records.entries import StoredBlock
from kvd.core.records.extent_shape import ExtentShape
from kvd.tiers.direct_io import Staging
from kvd.tiers.extent_format import ToWrite
from kvd.tiers.faults import NoFaults
from kvd.tiers.segment_files import SegmentFiles
from kvd.tiers.slot_rows import BlockHasher
from kvd.tiers.space_budget import SpaceBudget
from kvd.tiers.volume import SegmentVolume
from kvd.tiers.volume_identity import ID_NAME
from shared.types.kv_layout import Component, KVLayout, Layer

if TYPE_CHECKING:
    from kvd.encryption.keyring import Keyring

TENANT = "t"

# Slices of 1, 0, 10 and 2 sectors; the last one fills its padding completely.
LAYOUT = KVLayout(
    "ab" * 16,
    (
        Layer((Component("k", (2, 8), "float32"), Component("v", (3,), "bfloat16"))),
        Layer(()),
        Layer((Component("k", (600,), "float32"), Component("v", (1,), "float32"))),
        Layer((Component("k", (128,), "float32"),)),
    ),
    block_tokens=16,
)


def new_slot(layout: KVLayout = LAYOUT) -> memoryview:
    """Make a zeroed slot, aligned as in an arena."""
    return memoryview(mmap.mmap(-1, layout.block_bytes))


def random_slot(layout: KVLayout = LAYOUT) -> memoryview:
    slot = new_slot(layout)
    slot[:] = os.urandom(layout.block_bytes)
    return slot


class Block:
    """A block in a slot: the written bytes, which a read must return."""

    def __init__(self, num_tokens: int = 16, layout: KVLayout = LAYOUT) -> None:
        self.key = os.urandom(16)
        self.num_tokens = num_tokens
        self.slot = random_slot(layout)
        self.hasher = BlockHasher(layout)
        checksums = self.hasher.checksums(self.slot, num_tokens)
        self.stored = StoredBlock(os.urandom(4 * num_tokens), checksums)

    def at(self, extent: int) -> ToWrite:
        """Return the action that writes the block to an extent."""
        return ToWrite(extent, self.key, self.num_tokens, self.stored, self.slot, TENANT)

    def is_in(self, slot: memoryview) -> bool:
        """Return whether another slot's used bytes are this block's."""
        return self.hasher.matches(slot, self.num_tokens, self.stored.checksums)


class Disk:
    """Opens volumes in one directory, and moves blocks to and from them in this thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.staging = Staging()
        self.made: list[SegmentVolume] = []
        self.keys: Keyring | None = None  # faults of the next volumes

    def volume(
        self, total_bytes=None, extents_per_segment=3, direct="auto", faults=None, layout=LAYOUT
    ) -> SegmentVolume:
        """Close the last volume and open the next one on the same files."""
        self.close()
        budget = SpaceBudget(total_bytes, 0, self.directory)
        faults = faults or NoFaults()
        extent_bytes = ExtentShape(layout).full_bytes
        files = SegmentFiles(
            self.directory / "v", extent_bytes, extents_per_segment, budget, direct, faults
        )
        volume = SegmentVolume(layout, files, self.keys)
        volume.files.open()
        self.made.append(volume)
        return volume

    def write(self, extent: int, block: Block):
        """Write a block and make it durable."""
        volume = self.made[-1]
        return volume.sync([volume.write([block.at(extent)], self.staging)])[0]

    def read(self, extent: int, block: Block, slot: memoryview | None, *, layered=False):
        """Read group by group; return the outcome, and the header's contents."""
        read = self.made[-1].plan_read(extent, block.key, block.num_tokens, slot, layered=layered)
        for index in range(len(read.groups)):
            outcome = read.run(index, self.staging)
            if outcome.value != "ok":
                return outcome, None
        return outcome, read.stored

    def segments(self) -> dict[str, int]:
        """Return the size of each file in the volume's directory, except the one with its id."""
        files = (path for path in (self.directory / "v").iterdir() if path.name != ID_NAME)
        return {path.name: path.stat().st_size for path in files}

    def close(self) -> None:
        while self.made:
            self.made.pop().files.close()
