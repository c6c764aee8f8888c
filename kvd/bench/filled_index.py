"""State directories with very many idle sessions: an index that the bench fills itself.

The keys are properly chained, and the extents lie side by side. The volumes have the size that the
index says, but no data: each segment is a hole. This is enough, because a start reads only the
index, and a block is verified when it is used (D11).
"""

import asyncio
import os
import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import closing
from itertools import repeat
from pathlib import Path

import numpy as np

from kvd.bench.options import BLOCKS_PER_SESSION, MODEL, SMALL_LAYOUT
from kvd.bench.workspace import KvdSizes
from kvd.core.records.entries import IndexEntries, SessionRecord, columns_of, pack_spans, plain_span
from kvd.core.records.extent_shape import ExtentShape
from kvd.tiers.faults import NoFaults
from kvd.tiers.index_database import MANIFEST_NAME
from kvd.tiers.manifest import PUT_BLOCK, PUT_SESSION, LayoutRow, Manifest, Value
from shared.kvd_client.messages import layout_message
from shared.types.block_key import KEY_BYTES, SALT_BYTES, TOKEN_BYTES, block_keys, root_key
from shared.types.session_key import SessionKey
from shared.types.units import ceil_div

TENANT = "bench"


def bench_key(name: str) -> SessionKey:
    """Return the key of a session of the bench's layouts."""
    return SessionKey(TENANT, MODEL, name)


def token_ids_of(seed: int, num_tokens: int) -> bytes:
    """Return token ids (little-endian uint32); with different seeds the first ones differ."""
    tokens = np.arange(num_tokens, dtype="<u4")
    tokens[0] = 0x8000_0000 + seed
    return tokens.tobytes()


SALT = bytes(range(SALT_BYTES))  # needs no secrecy: these sessions are the bench's own
TOKENS_PER_SESSION = BLOCKS_PER_SESSION * SMALL_LAYOUT.block_tokens
SECTORS_PER_BLOCK = ExtentShape(SMALL_LAYOUT).sectors_per_extent
NUM_SEGMENT_BLOCKS = 1 << 16


def idle_key(number: int) -> SessionKey:
    """Return the key of the idle session of this number."""
    return bench_key(f"idle-{number:06}")


def block_tokens_of(number: int, num_blocks: int = BLOCKS_PER_SESSION) -> list[bytes]:
    """Return the token ids of each block of a session."""
    token_ids = token_ids_of(number, num_blocks * SMALL_LAYOUT.block_tokens)
    step = SMALL_LAYOUT.block_tokens * TOKEN_BYTES
    return [token_ids[start : start + step] for start in range(0, len(token_ids), step)]


def block_keys_of(number: int, num_blocks: int = BLOCKS_PER_SESSION) -> list[bytes]:
    """Return the key of each block of a session."""
    keys = []
    key = block_keys(SALT)
    parent = root_key(SALT, SMALL_LAYOUT.fingerprint)
    for token_ids in block_tokens_of(number, num_blocks):
        parent = key(parent, token_ids)
        keys.append(parent)
    return keys


def session_record(number: int, keys: list[bytes]) -> SessionRecord:
    """Return the index entry of a session; a higher number means a later last use."""
    step = SMALL_LAYOUT.block_tokens
    spans = [plain_span(key, step) for key in keys]
    return SessionRecord(idle_key(number), pack_spans(spans), last_access_ns=1 + number)


def population(num_sessions: int) -> IndexEntries:
    """Return the index entries of sessions 0 … num_sessions - 1."""
    keys: list[bytes] = []
    sessions: list[SessionRecord] = []
    for number in range(num_sessions):
        own = block_keys_of(number)
        keys += own
        sessions.append(session_record(number, own))
    extents = array("Q", extents_of(len(keys)))
    tokens = array("I", [SMALL_LAYOUT.block_tokens]) * len(keys)
    return IndexEntries([columns_of(sessions)], b"".join(keys), extents, tokens)


def extents_of(num_blocks: int) -> Iterator[int]:
    """Return the blocks' extents: one after the other."""
    return iter(range(0, num_blocks * SECTORS_PER_BLOCK, SECTORS_PER_BLOCK))


DRAM_BYTES = 64 << 20
SPARE_BYTES = 1 << 30
INDEX_BYTES_PER_BLOCK = 512  # of the index file and its log: an upper bound

_BLOCK_BYTES = ExtentShape(SMALL_LAYOUT).full_bytes
_SEGMENT_BYTES = NUM_SEGMENT_BLOCKS * _BLOCK_BYTES


class FilledIndexes:
    """A state directory for each number of sessions, made when it is first used.

    Attributes:
        blocks_per_session: blocks of each idle session.
    """

    def __init__(self, directory: Path, max_sessions: int, blocks_per_session: int) -> None:
        self._directory = directory
        self.blocks_per_session = blocks_per_session
        self._ssd_bytes = max_sessions * blocks_per_session * _BLOCK_BYTES + SPARE_BYTES

    def sizes(self, io_threads: int) -> KvdSizes:
        """Return the sizes of a kvd over any of them: little memory, room for all extents."""
        return KvdSizes(
            dram_bytes=DRAM_BYTES,
            ssd_bytes=self._ssd_bytes,
            segment_bytes=_SEGMENT_BYTES,
            io_threads=io_threads,
            prefault=False,
            admission="on_evict",
        )

    async def state_dir(self, num_sessions: int) -> Path:
        """Return the directory of an index with so many sessions; filling it takes seconds."""
        path = self._directory / f"index-{num_sessions}"
        if not path.exists():
            path.mkdir(parents=True, mode=0o700)
            await asyncio.to_thread(fill_index, path, num_sessions, self.blocks_per_session)
        return path


def needed_bytes(max_sessions: int, blocks_per_session: int) -> int:
    """Return the disk space of the state directories, each as full as the fullest."""
    num_blocks = max_sessions * blocks_per_session
    return SPARE_BYTES + 3 * num_blocks * INDEX_BYTES_PER_BLOCK


def fill_index(state_dir: Path, num_sessions: int, blocks_per_session: int) -> None:
    """Write the entries of `num_sessions` sessions, in one transaction."""
    path, volumes = state_dir / MANIFEST_NAME, state_dir / "volumes"
    manifest = Manifest(path, volumes, NoFaults())
    manifest.open()
    try:
        message = layout_message(SMALL_LAYOUT).SerializeToString()
        manifest.put_layout(LayoutRow(SMALL_LAYOUT.fingerprint, message, NUM_SEGMENT_BLOCKS))
        manifest.put_salt(TENANT, SALT)
    finally:
        manifest.close()
    with closing(sqlite3.connect(path)) as db, db:
        _put_all(db, num_sessions, blocks_per_session)
    _make_segments(volumes / SMALL_LAYOUT.fingerprint, num_sessions * blocks_per_session)


def _make_segments(directory: Path, num_blocks: int) -> None:
    directory.mkdir(mode=0o700, parents=True)
    for segment in range(ceil_div(num_blocks, NUM_SEGMENT_BLOCKS)):
        fd = os.open(directory / f"{segment:05}.segment", os.O_RDWR | os.O_CREAT, 0o600)
        os.truncate(fd, _SEGMENT_BYTES)
        os.close(fd)


def _put_all(db: sqlite3.Connection, num_sessions: int, blocks_per_session: int) -> None:
    (layout_id,) = db.execute("SELECT id FROM layouts").fetchone()
    joined = bytearray()

    def session_entries() -> Iterator[tuple[Value, ...]]:
        for number in range(num_sessions):
            keys = block_keys_of(number, blocks_per_session)
            joined.extend(b"".join(keys))
            row = session_record(number, keys)
            identity = (layout_id, row.key.tenant, row.key.session_id)
            yield (*identity, row.spans, row.last_access_ns, row.ttl_ns, row.pin.value, row.ended)

    db.executemany(PUT_SESSION, session_entries())
    # Inserting in the order of the index is many times faster than in the order of sessions.
    halves = np.frombuffer(bytes(joined), dtype=[("first", ">u8"), ("last", ">u8")])
    order = np.lexsort((halves["last"], halves["first"])).tolist()
    keys = (bytes(joined[index * KEY_BYTES : (index + 1) * KEY_BYTES]) for index in order)
    extents = (index * SECTORS_PER_BLOCK for index in order)
    num_tokens = SMALL_LAYOUT.block_tokens
    rows = zip(repeat(layout_id), keys, extents, repeat(num_tokens))
    db.executemany(PUT_BLOCK, rows)
