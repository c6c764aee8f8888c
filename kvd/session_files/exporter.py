"""Exports a session: its rows, copied into the frames of a session file, a few blocks at a time.

To the core kvd itself is the loader here, under a number of its own. A slow reader of the file
holds no lease: rows are copied, and their slots released, before they are sent.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from kvd.caches.caches import Caches
from kvd.core.engine import CacheEngine
from kvd.core.records.errors import LeaseLostError, UnknownLineageError
from kvd.core.records.records import ExportedRows, LeaseState, LoadAnswer
from kvd.errors import BusyTransferError
from kvd.runtime.cache import Cache
from kvd.session_files.chunks import Chunker, ChunkSealer, step_tokens
from kvd.session_files.file_format import (
    VERSION,
    VERSION_WITH_STATE,
    VERSION_WITH_WINDOWS,
    FileHeader,
    StatePart,
    WindowRows,
    end_bytes,
    frame_bytes,
    header_bytes,
    part_bytes,
    part_bytes_of,
    row_bytes,
    window_bytes,
)
from kvd.session_files.slot_runs import SlotRuns, finished_in_thread
from shared.types.granted_slots import Lookup
from shared.types.session_key import SessionKey
from shared.version import __version__

BATCH_BYTES = 8 << 20  # of rows copied at once; at least one block
WAIT_S = 60.0  # for reads, or for a slot to read into


class Exporter:
    """One session on its way out.

    Args:
        caches: where it is.
        asked: which; an empty model if its id is enough.

    Raises:
        UnknownSessionError: there is none.
    """

    def __init__(self, caches: Caches, asked: SessionKey) -> None:
        self._caches = caches
        self._cache, key = caches.find(asked)
        self._export = self._cache.act(lambda core: core.session_files.begin_export(key))
        self._runs = SlotRuns.of_tokens(self._cache.layout)
        self._window_runs = SlotRuns.of_windows(self._cache.layout)
        self._max_spans = max(1, BATCH_BYTES // self._cache.layout.block_bytes)

    @property
    def key(self) -> SessionKey:
        """The session, with its model."""
        return self._export.key

    async def pieces(self, *, prefix: bool) -> AsyncGenerator[bytes, None]:
        """Yield the session's file, in pieces of about BATCH_BYTES; see `frames`."""
        yield self.header()
        async with aclosing(self.frames(prefix=prefix)) as batches:
            async for batch in batches:
                yield b"".join(frame for _, frame in batch)
        yield end_bytes(self._export.num_tokens)

    async def chunks(
        self, chunk_bytes: int, sealer: ChunkSealer | None, header: bytes, *, prefix: bool
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the same without its end, in chunks (chunks.py), each with where it ends.

        Args:
            chunk_bytes: about how large they are.
            sealer: seals them; None: they stay as they are.
            header: of `header`.
            prefix: see `frames`.
        """
        layout = self._cache.layout
        step = step_tokens(chunk_bytes, layout.block_tokens, row_bytes(layout))
        chunker = Chunker(step, chunk_bytes)
        yield 0, header
        async with aclosing(self.frames(prefix=prefix)) as batches:
            async for batch in batches:
                for frame in batch:
                    if (chunk := chunker.add(*frame)) is not None:
                        yield await _sealed(chunk, sealer)
        if (chunk := chunker.rest()) is not None:
            yield await _sealed(chunk, sealer)

    def header(self) -> bytes:
        """Return the beginning of its file."""
        export, layout = self._export, self._cache.layout
        version = VERSION
        if export.parts:
            version = VERSION_WITH_WINDOWS if layout.window else VERSION_WITH_STATE
        return header_bytes(
            FileHeader(export.key, layout, export.lineage, __version__, time.time(), version)
        )

    async def frames(self, *, prefix: bool) -> AsyncGenerator[list[tuple[int, bytes]], None]:
        """Yield its frames, each with its number of tokens, some at a time.

        Args:
            prefix: be content with what comes before discards that kvd does not know.

        Raises:
            SessionChangedError: it became another one meanwhile.
            UnknownLineageError: of what follows nobody knows what it was computed after.
            BusyTransferError: its blocks do not come.
        """
        export = self._export
        while not export.is_done:
            try:
                batch = await self._next()
            except UnknownLineageError:
                if not prefix or not export.num_tokens:
                    raise
                break
            yield batch
        while export.num_tokens >= export.position and export.next_part < len(export.parts):
            yield await self._next_parts()

    async def _next_parts(self) -> list[tuple[int, bytes]]:
        """Copy the next parts of the state, or of windows, out: frames of no new tokens."""
        cache, export, owner = self._cache, self._export, secrets.randbits(63)
        with _ending(cache, owner):
            answer = await self._granted(
                lambda core: core.session_files.prepare_export_parts(export, self._max_spans, owner)
            )
            first = export.next_part
            slot_ids = cache.act(
                lambda core: core.session_files.parts_exported(export, answer.lease_id)
            )
            batch = await finished_in_thread(self._copied_parts, first, slot_ids)
            cache.act(lambda core: core.loads.complete(answer.lease_id, owner))
        return batch

    def _copied_parts(self, first: int, slot_ids: list[int]) -> list[tuple[int, bytes]]:
        """Make frames of leased parts."""
        export, layout, arena = self._export, self._cache.layout, self._cache.arena
        assert arena is not None, "parts are leased where there is an arena"  # noqa: S101
        frames = []
        for index, slot_id in enumerate(slot_ids, first):
            slot = arena.slots.slot(slot_id)
            if layout.window:
                frames.append((0, self._window_frame(index, slot)))
                continue
            part = StatePart(export.position, index, slot[: part_bytes_of(layout, index)])
            frames.append((0, part_bytes(export.num_tokens, part)))
        return frames

    def _window_frame(self, index: int, slot: memoryview) -> bytes:
        """Make the frame of one of all parts of windows."""
        export = self._export
        window, part = divmod(index, len(self._window_runs))
        token_offset, num_tokens, start = export.windows[window]
        runs = self._window_runs[part].read(slot, start, num_tokens)
        rows = WindowRows(export.position, token_offset, num_tokens, part, memoryview(b""))
        return window_bytes(export.num_tokens, rows, runs)

    async def _next(self) -> list[tuple[int, bytes]]:
        """Copy the next rows out."""
        cache, export, owner = self._cache, self._export, secrets.randbits(63)
        with _ending(cache, owner):
            answer = await self._granted(
                lambda core: core.session_files.prepare_export(export, self._max_spans, owner)
            )
            token_offset = export.num_tokens
            rows = cache.act(lambda core: core.session_files.exported(export, answer.lease_id))
            batch = await finished_in_thread(self._copied, token_offset, rows)
            # What raises here was given to somebody else, or is corrupt: nothing of it is sent.
            cache.act(lambda core: core.loads.complete(answer.lease_id, owner))
        return batch

    async def _granted(self, prepare: Callable[[CacheEngine], LoadAnswer]) -> LoadAnswer:
        """Lease what comes next and wait until it is in its slots."""
        cache, loop = self._cache, asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            await self._caches.open(cache.layout, prefault=False)
            answer = cache.act(prepare)
            if answer.lookup is Lookup.PENDING:
                answer = await _settled(cache, answer.lease_id, until)
            if answer.lookup is Lookup.HIT:
                return answer
            left_s = until - loop.time()
            if left_s <= 0 or not await cache.changed(left_s):
                raise BusyTransferError(
                    f"the blocks of session {self._export.key} do not come ({answer.miss_reason})",
                    "try again when less is under way, and see: kvd stats",
                )

    def _copied(self, token_offset: int, rows: list[ExportedRows]) -> list[tuple[int, bytes]]:
        """Make frames of leased rows."""
        arena = self._cache.arena
        assert arena is not None, "rows are leased where there is an arena"  # noqa: S101
        frames = []
        for row in rows:
            memory = self._runs.read(arena.slots.slot(row.slot_id), row.start, row.num_tokens)
            frames.append((row.num_tokens, frame_bytes(token_offset, row.token_ids, memory)))
            token_offset += row.num_tokens
        return frames


async def _sealed(chunk: tuple[int, bytes], sealer: ChunkSealer | None) -> tuple[int, bytes]:
    end_token, frames = chunk
    if sealer is None:
        return chunk
    return end_token, await finished_in_thread(sealer.seal, frames)


@contextmanager
def _ending(cache: Cache, owner: int) -> Iterator[None]:
    """Release whatever is still leased in the end."""
    try:
        yield
    finally:
        cache.act(lambda core: core.engines.gone(owner))


async def _settled(cache: Cache, lease_id: int, until: float) -> LoadAnswer:
    """Wait for a lease's reads, until the deadline."""
    loop = asyncio.get_running_loop()
    while cache.act(lambda core: core.loads.state_of(lease_id)) is LeaseState.PENDING:
        if not await cache.changed(max(0.0, until - loop.time())):
            break
    try:
        return cache.act(lambda core: core.loads.settle(lease_id))
    except LeaseLostError:  # a copy turned out corrupt; there may be another one
        return LoadAnswer(Lookup.MISS, miss_reason="corrupt")
