"""State directories with very many sessions, made through the index's own writer.

Their volumes have the size that the rows say, and no data: segments with nothing but a hole. No
start reads them, and a block is verified when it is used.
"""

import asyncio
import os
import threading
from pathlib import Path

import numpy as np

from kvd.bench.options import SMALL_LAYOUT
from kvd.bench.population import (
    NUM_SEGMENT_BLOCKS,
    SALT,
    SECTORS_PER_BLOCK,
    block_keys_of,
    session_record,
)
from kvd.bench.process import KvdSizes
from kvd.bench.sessions import TENANT
from kvd.core.extent_shape import ExtentShape
from kvd.core.records import BlockRecord
from kvd.tiers.faults import NoFaults
from kvd.tiers.manifest import LayoutRow, Manifest
from shared.block_key import KEY_BYTES
from shared.layout_message import layout_message
from shared.units import ceil_div

MANIFEST_NAME = "manifest.db"
ROWS_PER_GROUP = 50_000  # the writer's queue is bounded: wait for it from time to time
COMMIT_S = 120.0
DRAM_BYTES = 64 << 20
SPARE_BYTES = 1 << 30
INDEX_BYTES_PER_BLOCK = 512  # of the index file and its log, amply

_BLOCK_BYTES = ExtentShape(SMALL_LAYOUT).full_bytes
_SEGMENT_BYTES = NUM_SEGMENT_BLOCKS * _BLOCK_BYTES


class FilledIndexes:
    """One state directory for each number of sessions, made when it is first wanted."""

    def __init__(self, directory: Path, max_sessions: int, blocks_per_session: int) -> None:
        self._directory = directory
        self.blocks_per_session = blocks_per_session
        self._ssd_bytes = max_sessions * blocks_per_session * _BLOCK_BYTES + SPARE_BYTES

    def sizes(self, io_threads: int) -> KvdSizes:
        """What a kvd over any of them is given; small memory, and room for all its extents."""
        return KvdSizes(
            dram_bytes=DRAM_BYTES,
            ssd_bytes=self._ssd_bytes,
            segment_bytes=_SEGMENT_BYTES,
            io_threads=io_threads,
            prefault=False,
            admission="on_evict",
        )

    async def state_dir(self, num_sessions: int) -> Path:
        """The directory; filling it takes seconds."""
        path = self._directory / f"index-{num_sessions}"
        if not path.exists():
            path.mkdir(parents=True, mode=0o700)
            await asyncio.to_thread(fill_index, path, num_sessions, self.blocks_per_session)
        return path


def needed_bytes(max_sessions: int, blocks_per_session: int) -> int:
    """What the state directories take on disk, each as full as the fullest."""
    num_blocks = max_sessions * blocks_per_session
    return SPARE_BYTES + 3 * num_blocks * INDEX_BYTES_PER_BLOCK


def fill_index(state_dir: Path, num_sessions: int, blocks_per_session: int) -> None:
    """Write the rows of `num_sessions` sessions; waits until all are committed."""
    volumes = state_dir / "volumes"
    manifest = Manifest(state_dir / MANIFEST_NAME, volumes, NoFaults())
    manifest.open()
    try:
        message = layout_message(SMALL_LAYOUT).SerializeToString()
        manifest.put_layout(LayoutRow(SMALL_LAYOUT.fingerprint, message, NUM_SEGMENT_BLOCKS))
        manifest.put_salt(TENANT, SALT)
        _put_all(manifest, num_sessions, blocks_per_session)
    finally:
        manifest.close()
    _make_segments(volumes / SMALL_LAYOUT.fingerprint, num_sessions * blocks_per_session)


def _make_segments(directory: Path, num_blocks: int) -> None:
    directory.mkdir(mode=0o700, parents=True)
    for segment in range(ceil_div(num_blocks, NUM_SEGMENT_BLOCKS)):
        fd = os.open(directory / f"{segment:05}.segment", os.O_RDWR | os.O_CREAT, 0o600)
        os.truncate(fd, _SEGMENT_BYTES)
        os.close(fd)


def _put_all(manifest: Manifest, num_sessions: int, blocks_per_session: int) -> None:
    fingerprint, step = SMALL_LAYOUT.fingerprint, SMALL_LAYOUT.block_tokens
    joined = bytearray()
    for number in range(num_sessions):
        keys = block_keys_of(number, blocks_per_session)
        joined += b"".join(keys)
        manifest.put_session(fingerprint, session_record(number, keys))
        if number % ROWS_PER_GROUP == ROWS_PER_GROUP - 1:
            _until_committed(manifest)
    # In the order of the index: many times faster than as they come.
    halves = np.frombuffer(bytes(joined), dtype=[("first", ">u8"), ("last", ">u8")])
    for count, index in enumerate(np.lexsort((halves["last"], halves["first"])).tolist(), 1):
        key = bytes(joined[index * KEY_BYTES : (index + 1) * KEY_BYTES])
        record = BlockRecord(key, index * SECTORS_PER_BLOCK, step)
        manifest.put_block(fingerprint, record, _nothing)
        if count % ROWS_PER_GROUP == 0:
            _until_committed(manifest)
    _until_committed(manifest)


def _until_committed(manifest: Manifest) -> None:
    committed = threading.Event()
    manifest.when_committed(committed.set)
    if not committed.wait(COMMIT_S):
        raise TimeoutError(f"the index took no rows for {COMMIT_S} s")


def _nothing() -> None:
    """Nobody waits for a single row."""
