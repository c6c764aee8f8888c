"""Export of a session: its KV rows, copied into frames of a session file, a few blocks at a time.

To the core, kvd is an engine that loads the session, under a random engine id. Rows are copied and
their slots released before they are sent: a slow reader of the file holds no lease.
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
from kvd.session_files.in_thread import run_in_thread
from kvd.session_files.pieces import Piece
from kvd.session_files.slot_runs import SlotRuns
from shared.types.granted_slots import Lookup
from shared.types.session_key import SessionKey
from shared.version import __version__

BATCH_BYTES = 8 << 20  # bytes of rows copied at once; at least one block
WAIT_S = 60.0  # the longest wait for reads from SSD, or for a slot to read into


class Exporter:
    """The export of one session.

    Args:
        caches: the caches, one of which has the session.
        wanted: the session; its model may be empty if its id is unambiguous.

    Attributes:
        key: the session, with its model.

    Raises:
        UnknownSessionError: there is no such session.
    """

    def __init__(self, caches: Caches, wanted: SessionKey) -> None:
        self._caches = caches
        self._cache, self.key = caches.find(wanted)
        self._export = self._cache.act(lambda core: core.session_files.begin_export(self.key))
        self._runs = SlotRuns.of_tokens(self._cache.layout)
        self._window_runs = SlotRuns.of_windows(self._cache.layout)
        self._max_spans = max(1, BATCH_BYTES // self._cache.layout.block_bytes)
        self._frames = FrameWriter()

    @cached_property
    def header(self) -> bytes:
        """The header of the session's file."""
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
        """Yield the file without its end, in chunks (chunks.py); the first one is the header.

        Args:
            chunk_bytes: about how large chunks are.
            sealer: seals them; None: they are not sealed.
            prefix: see `frames`.
        """
        yield Piece(self.header, 0)
        pieces = self._plain_chunks(chunk_bytes, prefix=prefix)
        async with aclosing(pieces if sealer is None else _seal_chunks(pieces, sealer)) as chunks:
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
        """Yield the session's frames, in batches.

        Args:
            prefix: if kvd does not know all discards, export the tokens before the unknown ones.

        Raises:
            SessionChangedError: the session has changed meanwhile.
            UnknownLineageError: kvd does not know which tokens were discarded before the next ones.
            BusyTransferError: the next blocks are not readable in time.
        """
        export = self._export
        while not export.is_done:
            try:
                batch = await self._next_batch()
            except UnknownLineageError:
                if not prefix or not export.num_tokens:
                    raise
                break
            yield batch
        while export.num_tokens >= export.position and export.next_part < len(export.parts):
            yield await self._next_parts()

    async def _next_parts(self) -> FrameBatch:
        """Copy the next parts of the state, or of windows; their frames add no tokens."""
        cache, export, engine_id = self._cache, self._export, secrets.randbits(63)
        with _released_on_failure(cache, engine_id):
            answer = await self._lease_next(
                lambda core: core.session_files.prepare_export_parts(
                    export, self._max_spans, engine_id
                )
            )
            first = export.next_part
            slot_ids = cache.act(
                lambda core: core.session_files.confirm_export_parts(export, answer.lease_id)
            )
            batch = await run_in_thread(self._write_parts, first, slot_ids)
            cache.act(lambda core: core.loads.complete(answer.lease_id, engine_id))
        return batch

    def _write_parts(self, first: int, slot_ids: list[int]) -> FrameBatch:
        """Write frames of leased parts; in a thread."""
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
        """Write the frame of a part of a window; `index` counts the parts of all windows."""
        export = self._export
        window, part = divmod(index, len(self._window_runs))
        token_offset, num_tokens, start = export.windows[window]
        runs = self._window_runs[part].read(slot, start, num_tokens)
        rows = WindowRows(export.position, token_offset, num_tokens, part, memoryview(b""))
        self._frames.add_window(export.num_tokens, rows, runs)

    async def _next_batch(self) -> FrameBatch:
        """Copy the rows of the next tokens."""
        cache, export, engine_id = self._cache, self._export, secrets.randbits(63)
        with _released_on_failure(cache, engine_id):
            answer = await self._lease_next(
                lambda core: core.session_files.prepare_export(export, self._max_spans, engine_id)
            )
            token_offset = export.num_tokens
            rows = cache.act(
                lambda core: core.session_files.confirm_export(export, answer.lease_id)
            )
            batch = await run_in_thread(self._write_rows, token_offset, rows)
            # This raises if a slot was reused meanwhile, or is corrupt: then the batch is not sent.
            cache.act(lambda core: core.loads.complete(answer.lease_id, engine_id))
        return batch

    async def _lease_next(self, prepare: Callable[[CacheEngine], LoadAnswer]) -> LoadAnswer:
        """Lease the next blocks, and wait until they are in DRAM.

        Raises:
            BusyTransferError: they are not within WAIT_S.
        """
        cache, loop = self._cache, asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            await self._caches.open(cache.layout, prefault=False)
            answer = cache.act(prepare)
            if answer.lookup is Lookup.PENDING:
                answer = await _wait_for_reads(cache, answer.lease_id, until)
            if answer.lookup is Lookup.HIT:
                return answer
            left_s = until - loop.time()
            if left_s <= 0 or not await cache.wait_for_change(left_s):
                raise BusyTransferError(
                    f"the blocks of session {self._export.key} could not be read "
                    f"({answer.miss_reason})",
                    "try again when less is running; kvd stats shows the load",
                )

    def _write_rows(self, token_offset: int, rows: list[ExportedRows]) -> FrameBatch:
        """Write frames of leased rows; in a thread."""
        arena = self._cache.arena
        assert arena is not None, "rows are leased where there is an arena"  # noqa: S101
        for row in rows:
            memory = self._runs.read(arena.slots.slot(row.slot_id), row.start, row.num_tokens)
            self._frames.add_tokens(token_offset, row.token_ids, memory)
            token_offset += row.num_tokens
        return self._frames.take()


async def _seal_chunks(
    pieces: AsyncGenerator[Piece, None], sealer: ChunkSealer
) -> AsyncGenerator[Piece, None]:
    """Yield each chunk sealed, as one piece."""
    chunk = bytearray()
    async with aclosing(pieces):
        async for data, end_token in pieces:
            chunk += data
            if end_token is not None:
                yield Piece(await run_in_thread(sealer.seal, chunk), end_token)
                chunk.clear()


@contextmanager
def _released_on_failure(cache: Cache, engine_id: int) -> Iterator[None]:
    """Release the leases of `engine_id` if the block inside fails or is cancelled."""
    try:
        yield
    except BaseException:
        cache.act(lambda core: core.engines.remove(engine_id))
        raise


async def _wait_for_reads(cache: Cache, lease_id: int, until: float) -> LoadAnswer:
    """Wait until the reads of a lease have ended, or until the deadline."""
    loop = asyncio.get_running_loop()
    while cache.act(lambda core: core.loads.state_of(lease_id)) is LeaseState.PENDING:
        if not await cache.wait_for_change(max(0.0, until - loop.time())):
            break
    try:
        return cache.act(lambda core: core.loads.settle(lease_id))
    except LeaseLostError:  # a copy was corrupt; there may be another one
        return LoadAnswer(Lookup.MISS, miss_reason="corrupt")
