"""Exports a session: its rows, copied into the frames of a session file, a few blocks at a time.

To the core kvd itself is the loader here, under a number of its own. A slow reader of the file
holds no lease: rows are copied, and their slots released, before they are sent.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import cached_property

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
    header_bytes,
    part_bytes_of,
    row_bytes,
)
from kvd.session_files.frame_writer import FrameBatch, FrameWriter, end_bytes
from kvd.session_files.in_thread import finished_in_thread
from kvd.session_files.pieces import Piece
from kvd.session_files.slot_runs import SlotRuns
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

    Attributes:
        key: the session, with its model.

    Raises:
        UnknownSessionError: there is none.
    """

    def __init__(self, caches: Caches, asked: SessionKey) -> None:
        self._caches = caches
        self._cache, self.key = caches.find(asked)
        self._export = self._cache.act(lambda core: core.session_files.begin_export(self.key))
        self._runs = SlotRuns.of_tokens(self._cache.layout)
        self._window_runs = SlotRuns.of_windows(self._cache.layout)
        self._max_spans = max(1, BATCH_BYTES // self._cache.layout.block_bytes)
        self._frames = FrameWriter()

    @cached_property
    def header(self) -> bytes:
        """The beginning of its file."""
        export, layout = self._export, self._cache.layout
        version = VERSION
        if export.parts:
            version = VERSION_WITH_WINDOWS if layout.window else VERSION_WITH_STATE
        return header_bytes(
            FileHeader(export.key, layout, export.lineage, __version__, time.time(), version)
        )

    async def pieces(self, *, prefix: bool) -> AsyncGenerator[Piece, None]:
        """Yield the session's file, in pieces of about BATCH_BYTES; see `frames`."""
        yield Piece(self.header)
        async with aclosing(self.frames(prefix=prefix)) as batches:
            async for batch in batches:
                yield Piece(batch.data)
        yield Piece(end_bytes(self._export.num_tokens))

    async def chunks(
        self, chunk_bytes: int, sealer: ChunkSealer | None, *, prefix: bool
    ) -> AsyncGenerator[Piece, None]:
        """Yield the same without its end, in chunks (chunks.py); the header is the first.

        Args:
            chunk_bytes: about how large they are.
            sealer: seals them; None: they stay as they are.
            prefix: see `frames`.
        """
        yield Piece(self.header, 0)
        pieces = self._plain_chunks(chunk_bytes, prefix=prefix)
        async with aclosing(pieces if sealer is None else _sealed(pieces, sealer)) as chunks:
            async for piece in chunks:
                yield piece

    async def _plain_chunks(self, chunk_bytes: int, *, prefix: bool) -> AsyncGenerator[Piece, None]:
        layout = self._cache.layout
        step = step_tokens(chunk_bytes, layout.block_tokens, row_bytes(layout))
        chunker = Chunker(step, chunk_bytes)
        async with aclosing(self.frames(prefix=prefix)) as batches:
            async for batch in batches:
                start = before = 0
                for num_tokens, end in batch.ends:
                    if chunker.ends_with(num_tokens, end - before):
                        yield Piece(batch.data[start:end], chunker.num_tokens)
                        start = end
                    before = end
                if start < before:
                    yield Piece(batch.data[start:before])
        if chunker.num_bytes:
            yield Piece(b"", chunker.num_tokens)

    async def frames(self, *, prefix: bool) -> AsyncGenerator[FrameBatch, None]:
        """Yield its frames, some at a time.

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

    async def _next_parts(self) -> FrameBatch:
        """Copy the next parts of the state, or of windows, out: frames of no new tokens."""
        cache, export, owner = self._cache, self._export, secrets.randbits(63)
        with _released_on_failure(cache, owner):
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

    def _copied_parts(self, first: int, slot_ids: list[int]) -> FrameBatch:
        """Make frames of leased parts."""
        export, layout, arena = self._export, self._cache.layout, self._cache.arena
        assert arena is not None, "parts are leased where there is an arena"  # noqa: S101
        for index, slot_id in enumerate(slot_ids, first):
            slot = arena.slots.slot(slot_id)
            if layout.window:
                self._add_window(index, slot)
                continue
            part = StatePart(export.position, index, slot[: part_bytes_of(layout, index)])
            self._frames.add_part(export.num_tokens, part)
        return self._frames.take()

    def _add_window(self, index: int, slot: memoryview) -> None:
        """Make the frame of one of all parts of windows."""
        export = self._export
        window, part = divmod(index, len(self._window_runs))
        token_offset, num_tokens, start = export.windows[window]
        runs = self._window_runs[part].read(slot, start, num_tokens)
        rows = WindowRows(export.position, token_offset, num_tokens, part, memoryview(b""))
        self._frames.add_window(export.num_tokens, rows, runs)

    async def _next(self) -> FrameBatch:
        """Copy the next rows out."""
        cache, export, owner = self._cache, self._export, secrets.randbits(63)
        with _released_on_failure(cache, owner):
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
            if left_s <= 0 or not await cache.wait_for_change(left_s):
                raise BusyTransferError(
                    f"the blocks of session {self._export.key} do not come ({answer.miss_reason})",
                    "try again when less is under way, and see: kvd stats",
                )

    def _copied(self, token_offset: int, rows: list[ExportedRows]) -> FrameBatch:
        """Make frames of leased rows."""
        arena = self._cache.arena
        assert arena is not None, "rows are leased where there is an arena"  # noqa: S101
        for row in rows:
            memory = self._runs.read(arena.slots.slot(row.slot_id), row.start, row.num_tokens)
            self._frames.add_tokens(token_offset, row.token_ids, memory)
            token_offset += row.num_tokens
        return self._frames.take()


async def _sealed(
    pieces: AsyncGenerator[Piece, None], sealer: ChunkSealer
) -> AsyncGenerator[Piece, None]:
    """Yield chunks sealed, whole."""
    chunk = bytearray()
    async with aclosing(pieces):
        async for data, end_token in pieces:
            chunk += data
            if end_token is not None:
                yield Piece(await finished_in_thread(sealer.seal, chunk), end_token)
                chunk.clear()


@contextmanager
def _released_on_failure(cache: Cache, owner: int) -> Iterator[None]:
    """Release what is leased if it is not completed."""
    try:
        yield
    except BaseException:
        cache.act(lambda core: core.engines.gone(owner))
        raise


async def _settled(cache: Cache, lease_id: int, until: float) -> LoadAnswer:
    """Wait for a lease's reads, until the deadline."""
    loop = asyncio.get_running_loop()
    while cache.act(lambda core: core.loads.state_of(lease_id)) is LeaseState.PENDING:
        if not await cache.wait_for_change(max(0.0, until - loop.time())):
            break
    try:
        return cache.act(lambda core: core.loads.settle(lease_id))
    except LeaseLostError:  # a copy turned out corrupt; there may be another one
        return LoadAnswer(Lookup.MISS, miss_reason="corrupt")
