"""Session files in and out, on behalf of operators: few at once, within what each may see.

A session on its way out has its blocks leased a few at a time, and their rows copied into its file.
To the core kvd itself is the loader then, under a number of its own. A slow reader of the file
holds no lease: rows are copied, and their slots released, before they are sent.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from kvd.caches.caches import Caches
from kvd.core.engine import CacheEngine
from kvd.core.records.errors import InvalidRequestError, LeaseLostError, UnknownLineageError
from kvd.core.records.records import ExportedRows, LeaseState, LoadAnswer
from kvd.encryption.key_file import WrongKeyError
from kvd.errors import BusyTransferError, LimitReachedError, StalledTransferError
from kvd.runtime.cache import Cache
from kvd.session_files.chunks import Chunker, ChunkOpener, ChunkSealer, step_tokens
from kvd.session_files.file_format import (
    FileHeader,
    StatePart,
    end_bytes,
    frame_bytes,
    header_bytes,
    part_bytes,
    part_bytes_of,
    row_bytes,
)
from kvd.session_files.importer import Target, read_file
from kvd.session_files.slot_runs import SlotRuns, finished_in_thread
from kvd.wire.messages import key_of
from kvd.wire.selection import check_allowed
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.granted_slots import Lookup
from shared.types.session_key import SessionKey
from shared.version import __version__

BATCH_BYTES = 8 << 20  # of rows copied at once; at least one block
WAIT_S = 60.0  # for reads, or for a slot to read into
MOST_TRANSFERS = 4  # at once: each holds some tens of megabytes
SILENCE_S = 60.0  # between two messages of a caller
PIECE_BYTES = 1 << 20  # of a message: a small part of what gRPC lets through

T = TypeVar("T")


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
        self._runs = SlotRuns(self._cache.layout)
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
        chunker = Chunker(step_tokens(chunk_bytes, layout.block_tokens, row_bytes(layout)))
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
        has_state = bool(export.state)
        return header_bytes(
            FileHeader(export.key, layout, export.lineage, __version__, time.time(), has_state)
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
        while export.num_tokens >= export.position and export.next_part < len(export.state):
            yield await self._next_parts()

    async def _next_parts(self) -> list[tuple[int, bytes]]:
        """Copy the next parts of the state out: frames of no tokens."""
        cache, export, owner = self._cache, self._export, secrets.randbits(63)
        with _ending(cache, owner):
            answer = await self._granted(
                lambda core: core.session_files.prepare_export_state(export, self._max_spans, owner)
            )
            first = export.next_part
            slot_ids = cache.act(
                lambda core: core.session_files.state_exported(export, answer.lease_id)
            )
            batch = await finished_in_thread(self._copied_parts, first, slot_ids)
            cache.act(lambda core: core.loads.complete(answer.lease_id, owner))
        return batch

    def _copied_parts(self, first: int, slot_ids: list[int]) -> list[tuple[int, bytes]]:
        """Make frames of leased parts of the state."""
        export, layout, arena = self._export, self._cache.layout, self._cache.arena
        assert arena is not None, "parts are leased where there is an arena"  # noqa: S101
        frames = []
        for index, slot_id in enumerate(slot_ids, first):
            data = arena.slots.slot(slot_id)[: part_bytes_of(layout, index)]
            part = StatePart(export.position, index, data)
            frames.append((0, part_bytes(export.num_tokens, part)))
        return frames

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


class Transfers:
    """What runs at the moment."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._num_running = 0

    async def export(
        self, request: kvd_pb2.ExportSessionRequest, allowed: frozenset[str] | None
    ) -> AsyncGenerator[kvd_pb2.SessionFilePart, None]:
        """Yield a session's file; see Exporter.

        Args:
            request: of the caller.
            allowed: whose sessions the caller may see; None: everybody's.
        """
        key = key_of(request.session)
        check_allowed(key, allowed)
        with self._counted():
            exporter = Exporter(self._caches, key)
            if request.chunk_bytes:
                async with aclosing(self._chunks(exporter, request)) as parts:
                    async for part in parts:
                        yield part
                return
            async with aclosing(exporter.pieces(prefix=request.prefix)) as pieces:
                async for piece in pieces:
                    for part in _parts(piece):
                        yield part

    async def _chunks(
        self, exporter: Exporter, request: kvd_pb2.ExportSessionRequest
    ) -> AsyncGenerator[kvd_pb2.SessionFilePart, None]:
        """Yield a session in chunks, and what opens them if kvd encrypts."""
        keys, tenant, header = self._caches.secrets.keys, exporter.key.tenant, exporter.header()
        sealer, wrapped = None, b""
        if keys is not None and keys.is_sealing:
            sealer = ChunkSealer(keys.key_of(tenant), tenant, header)
            wrapped = keys.wrapped_key_of(tenant)
        chunks = exporter.chunks(request.chunk_bytes, sealer, header, prefix=request.prefix)
        async with aclosing(chunks):
            async for end_token, chunk in chunks:
                for part in _parts(chunk):
                    yield part
                yield kvd_pb2.SessionFilePart(chunk_end=kvd_pb2.ChunkEnd(num_tokens=end_token))
        if keys is not None and sealer is not None:
            yield kvd_pb2.SessionFilePart(
                seal=kvd_pb2.SessionSeal(
                    master_key=keys.fingerprint, wrapped_key=wrapped, tag=sealer.tag()
                )
            )

    async def import_session(
        self,
        requests: AsyncIterator[kvd_pb2.ImportSessionRequest],
        allowed: frozenset[str] | None,
    ) -> kvd_pb2.ImportSessionResponse:
        """Take a session's file; see read_file.

        Raises:
            InvalidRequestError: it is not said first where to.
            StalledTransferError: the caller has fallen silent.
        """
        async with aclosing(with_timeout(requests, SILENCE_S)) as messages:
            first = await anext(messages, None)
            if first is None or first.WhichOneof("part") != "target":
                raise InvalidRequestError(
                    "where to import to is not said", "send the target first, then the file"
                )
            return await self._imported(first.target, messages, allowed)

    async def _imported(
        self,
        to: kvd_pb2.ImportTarget,
        messages: AsyncIterator[kvd_pb2.ImportSessionRequest],
        allowed: frozenset[str] | None,
    ) -> kvd_pb2.ImportSessionResponse:
        target = Target(
            tenant=to.tenant,
            session_id=to.session_id,
            replaces=to.replace,
            may_add_layout=to.new_layout,
            allowed=allowed,
        )
        with self._counted():
            pieces = _pieces(messages)
            if to.HasField("seal"):
                pieces = _opened(pieces, self._opener(to.seal))
            key, num_tokens = await read_file(self._caches, target, pieces)
        return kvd_pb2.ImportSessionResponse(session=key_message(key), num_tokens=num_tokens)

    def _opener(self, seal: kvd_pb2.SessionSeal) -> ChunkOpener:
        """Return what opens sealed chunks.

        Raises:
            WrongKeyError: this kvd does not have the key for it.
        """
        keys = self._caches.secrets.keys
        found = None if keys is None else keys.unwrapped_key(seal.wrapped_key)
        if found is None:
            raise WrongKeyError(
                f"the session is sealed under master key {seal.master_key[:8]}, "
                f"this kvd has {'none' if keys is None else keys.fingerprint[:8]}",
                "give both servers one encryption.key_file; push it again after a rotation",
            )
        return ChunkOpener(found[1], found[0], seal.tag)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._num_running >= MOST_TRANSFERS:
            raise LimitReachedError(
                f"{self._num_running} sessions are exported or imported", "wait for one to end"
            )
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1


async def _pieces(requests: AsyncIterator[kvd_pb2.ImportSessionRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if request.WhichOneof("part") != "data":
            raise InvalidRequestError("a second target", "send the file after the first one")
        yield request.data


async def _opened(pieces: AsyncIterator[bytes], opener: ChunkOpener) -> AsyncIterator[bytes]:
    async for piece in pieces:
        for part in await finished_in_thread(lambda data: list(opener.feed(data)), piece):
            yield part


def _parts(data: bytes) -> Iterator[kvd_pb2.SessionFilePart]:
    for start in range(0, len(data), PIECE_BYTES):
        yield kvd_pb2.SessionFilePart(data=data[start : start + PIECE_BYTES])


async def with_timeout(messages: AsyncIterator[T], silence_s: float) -> AsyncGenerator[T, None]:
    """Yield messages as they come, but do not wait for them for ever.

    Raises:
        StalledTransferError: the next one has not come within `silence_s`.
    """
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise StalledTransferError(
                f"nothing has come for {silence_s:g} s", "send the file again"
            ) from error
        yield message
