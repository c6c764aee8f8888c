"""Session files in and out for operators: a few at once, limited to the tenants each may access.

An exporter yields the pieces of a file that goes out. The pieces of a file that comes in are read
here, and each of its frames is passed to the import (`importer.py`).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from typing import TypeVar

from kvd.caches.caches import Caches
from kvd.core.records.errors import InvalidRequestError
from kvd.encryption.keyring import WrongKeyError
from kvd.errors import (
    BrokenTransferError,
    LimitReachedError,
    StalledTransferError,
    UnknownLayoutError,
)
from kvd.session_files.byte_streams import SILENCE_S, ByteStream, ByteStreams
from kvd.session_files.chunks import ChunkOpener, ChunkSealer
from kvd.session_files.exporter import Exporter
from kvd.session_files.file_format import (
    FileHeader,
    HeldTokens,
    SessionFileError,
    StatePart,
    WindowRows,
)
from kvd.session_files.file_reader import AnyFrame, FileReader
from kvd.session_files.importer import Import
from kvd.session_files.in_thread import run_in_thread
from kvd.session_files.pieces import Piece
from kvd.session_files.target import Target
from kvd.wire.messages import key_of
from kvd.wire.selection import check_allowed
from shared.access.identity import TenantDeniedError
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey, session_key

MOST_TRANSFERS = 8  # at once: each holds tens of megabytes. kvd remote follow uses up to five
PIECE_BYTES = 1 << 20  # in one message: well below gRPC's limit
MOST_BYTES = 16 << 20  # of memory to receive into from a stream
# Errors of the file or its transfer, not of kvd: a session that grows keeps what came before.
CUT_SHORT = (SessionFileError, BrokenTransferError, StalledTransferError)

T = TypeVar("T")
Pieces = AsyncIterator[bytes | memoryview]


class Transfers:
    """The exports and imports that are running.

    Args:
        caches: the caches that have the sessions.
        streams: byte streams of callers on this machine.
    """

    def __init__(self, caches: Caches, streams: ByteStreams) -> None:
        self._caches = caches
        self._streams = streams
        self._num_running = 0

    async def export(
        self, request: kvd_pb2.ExportSessionRequest, allowed: frozenset[str] | None
    ) -> AsyncGenerator[kvd_pb2.SessionFilePart, None]:
        """Yield a session's file; see Exporter.

        Args:
            request: the caller's request.
            allowed: tenants whose sessions the caller may read; None: all.
        """
        key = key_of(request.session)
        check_allowed(key, allowed)
        with self._limited():
            exporter = Exporter(self._caches, key)
            sealer = self._sealer(exporter) if request.chunk_bytes else None
            async with (
                self._stream(request.stream) as stream,
                aclosing(_pieces_of(exporter, request, sealer)) as pieces,
            ):
                async for piece in pieces:
                    for part in _parts(piece, is_streamed=stream is not None):
                        yield part
                    if stream is not None:
                        await stream.send(piece.data)
                if stream is not None:
                    await stream.finish()
            if sealer is not None:
                yield kvd_pb2.SessionFilePart(seal=self._seal_of(exporter, sealer))

    def _stream(self, token: bytes) -> AbstractAsyncContextManager[ByteStream | None]:
        return self._streams.claim(token) if token else nullcontext()

    def _sealer(self, exporter: Exporter) -> ChunkSealer | None:
        """Return the sealer of the session's chunks; None: kvd does not encrypt."""
        keys, tenant = self._caches.secrets.keys, exporter.key.tenant
        if keys is None or not keys.is_sealing:
            return None
        return ChunkSealer(keys.key_of(tenant), tenant, exporter.header)

    def _seal_of(self, exporter: Exporter, sealer: ChunkSealer) -> kvd_pb2.SessionSeal:
        """Return what another kvd needs to open the sealed chunks."""
        keys = self._caches.secrets.keys
        assert keys is not None, "something was sealed"  # noqa: S101
        return kvd_pb2.SessionSeal(
            master_key=keys.fingerprint,
            wrapped_key=keys.wrap_key(exporter.key.tenant),
            tag=sealer.tag(),
        )

    async def import_session(
        self,
        requests: AsyncIterator[kvd_pb2.ImportSessionRequest],
        allowed: frozenset[str] | None,
    ) -> kvd_pb2.ImportSessionResponse:
        """Import a session's file; see read_file.

        Raises:
            InvalidRequestError: the first message is no target.
            StalledTransferError: the caller sends nothing for SILENCE_S.
        """
        async with aclosing(with_timeout(requests, SILENCE_S)) as messages:
            first = await anext(messages, None)
            if first is None or first.WhichOneof("part") != "target":
                raise InvalidRequestError(
                    "the first message does not say where to import the session to",
                    "send the target first, then the file",
                )
            with self._limited():
                async with self._stream(first.target.stream) as stream:
                    return await self._import_from(first.target, _data(messages, stream), allowed)

    async def _import_from(
        self, to: kvd_pb2.ImportTarget, pieces: Pieces, allowed: frozenset[str] | None
    ) -> kvd_pb2.ImportSessionResponse:
        target = Target(
            tenant=to.tenant,
            session_id=to.session_id,
            replaces=to.replace,
            may_add_layout=to.new_layout,
            allowed=allowed,
            replaces_up_to=to.replace_up_to,
            # Missing chunks of a sealed session are detected at the end only: it may not grow.
            grow_bytes=0 if to.HasField("seal") else to.grow_bytes,
        )
        if to.HasField("seal"):
            pieces = _open_chunks(pieces, self._opener(to.seal))
        key, num_tokens = await read_file(self._caches, target, pieces)
        return kvd_pb2.ImportSessionResponse(session=key_message(key), num_tokens=num_tokens)

    def _opener(self, seal: kvd_pb2.SessionSeal) -> ChunkOpener:
        """Return the opener of sealed chunks.

        Raises:
            WrongKeyError: this kvd does not have their key.
        """
        keys = self._caches.secrets.keys
        found = None if keys is None else keys.unwrap_key(seal.wrapped_key)
        if found is None:
            raise WrongKeyError(
                f"the session is encrypted under master key {seal.master_key[:8]}, but this kvd "
                f"has {'none' if keys is None else keys.fingerprint[:8]}",
                "give both servers the same encryption.key_file; after a key rotation, push the "
                "session again",
            )
        return ChunkOpener(found[1], found[0], seal.tag)

    @contextmanager
    def _limited(self) -> Iterator[None]:
        if self._num_running >= MOST_TRANSFERS:
            raise LimitReachedError(
                f"{self._num_running} sessions are being exported or imported, and no more are "
                "allowed at once",
                "wait until one has ended",
            )
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1


# ------------------------------------------------------------------- an import, frame by frame


async def read_file(caches: Caches, target: Target, pieces: Pieces) -> tuple[SessionKey, int]:
    """Import a file from its pieces.

    Each piece is valid until the next one is requested. If the file is damaged or incomplete, a
    session that grows keeps the tokens before that.

    Returns:
        The session, and the number of its tokens that are stored.

    Raises:
        SessionFileError: the file is damaged, incomplete, or no session file.
        ReportedError: see _begin_import and Import.
    """
    reader = FileReader()
    current: Import | None = None
    is_done = False
    try:
        async for piece in pieces:
            for frame in await run_in_thread(lambda data: list(reader.feed(data)), piece):
                if current is None:
                    current = await _begin_import(caches, _header(reader), target)
                await _import_frame(current, frame)
            if current is None and reader.header is not None:
                # Begun with the header: a refused layout is refused before a frame is kept.
                current = await _begin_import(caches, reader.header, target)
            if current is not None:
                await current.keep()
        reader.close()
        if current is None or not reader.num_tokens:
            raise SessionFileError("the session file contains no tokens", "export another session")
        num_tokens = await current.finish()
        is_done = True
    except CUT_SHORT:
        if current is not None:
            await current.keep_begun()
        raise
    finally:
        if current is not None and not is_done:  # also if the caller was cancelled
            current.cancel()
    return current.key, num_tokens


async def _begin_import(caches: Caches, header: FileHeader, target: Target) -> Import:
    """Check that a session may be imported, and open the cache of its layout.

    Returns:
        The import; the caller owes `finish` or `cancel`.

    Raises:
        TenantDeniedError: the caller may not write to that tenant, or not add a layout.
        UnknownLayoutError: kvd has no such layout.
        SessionExistsError: the session exists and is not to be replaced.
    """
    layout = header.layout
    key = session_key(
        target.tenant or header.key.tenant,
        layout.model,
        target.session_id or header.key.session_id,
    )
    if target.allowed is not None and key.tenant not in target.allowed:
        raise TenantDeniedError(
            f"the session belongs to tenant {key.tenant!r}, which you may not use",
            "give one of your own tenants with --tenant",
        )
    _check_layout(caches, layout, target)
    cache, _ = await caches.open(layout, prefault=False)
    target.check(cache.act(lambda core: core.inspection.info(key)))
    return Import(caches, cache, key, header.lineage, target)


def _check_layout(caches: Caches, layout: KVLayout, target: Target) -> None:
    fingerprints = [cache.layout.fingerprint for cache in caches]
    if layout.fingerprint in fingerprints:
        return
    what = f"the file has layout {layout.fingerprint[:12]} (model {layout.model[:12]})"
    if not target.may_add_layout:
        raise UnknownLayoutError(
            f"{what}, but kvd has {', '.join(name[:12] for name in fingerprints) or 'none yet'}",
            "start the engine with exactly this model, dtype and positions first, or add "
            "--new-layout",
        )
    if target.allowed is not None:
        raise TenantDeniedError(
            f"{what}, which kvd does not have yet, and adding it would take memory from all "
            "tenants",
            'start its engine first, or import it as a client with tenants = ["*"]',
        )


async def _import_frame(current: Import, frame: AnyFrame) -> None:
    """Pass a frame to the import."""
    if isinstance(frame, HeldTokens):
        await current.hold(frame)
    elif isinstance(frame, StatePart):
        await current.add_part(frame)
    elif isinstance(frame, WindowRows):
        await current.add_rows(frame)
    else:
        await current.add(frame)


def _header(reader: FileReader) -> FileHeader:
    assert reader.header is not None, "a frame comes behind the header"  # noqa: S101
    return reader.header


# ------------------------------------------------------------------------ messages and streams


def _pieces_of(
    exporter: Exporter, request: kvd_pb2.ExportSessionRequest, sealer: ChunkSealer | None
) -> AsyncGenerator[Piece, None]:
    if request.chunk_bytes:
        return exporter.chunks(request.chunk_bytes, sealer, prefix=request.prefix)
    return exporter.pieces(prefix=request.prefix)


def _parts(piece: Piece, *, is_streamed: bool) -> Iterator[kvd_pb2.SessionFilePart]:
    """Yield the messages of a piece; if its data goes over a stream, they only announce it."""
    data, end_token = piece
    if is_streamed and data:
        yield kvd_pb2.SessionFilePart(stream_bytes=len(data))
    elif data:
        for start in range(0, len(data), PIECE_BYTES):
            yield kvd_pb2.SessionFilePart(data=bytes(data[start : start + PIECE_BYTES]))
    if end_token is not None:
        yield kvd_pb2.SessionFilePart(chunk_end=kvd_pb2.ChunkEnd(num_tokens=end_token))


async def _data(
    requests: AsyncIterator[kvd_pb2.ImportSessionRequest], stream: ByteStream | None
) -> AsyncIterator[bytes | memoryview]:
    """Yield data from messages or over the stream; each piece is valid until the next one."""
    memory = bytearray()
    async for request in requests:
        kind = request.WhichOneof("part")
        if kind == "data":
            yield request.data
        elif kind == "stream_bytes" and stream is not None:
            left = request.stream_bytes
            memory = bytearray(min(left, MOST_BYTES)) if len(memory) < left else memory
            while left:
                piece = memoryview(memory)[:left]
                await stream.receive_into(piece)
                yield piece
                left -= len(piece)
        else:
            raise InvalidRequestError(
                f"after the target came {kind or 'nothing'}",
                "send the file after the target, in the way that the target announces",
            )


async def _open_chunks(pieces: Pieces, opener: ChunkOpener) -> AsyncIterator[bytes]:
    async for piece in pieces:
        for part in await run_in_thread(lambda data: list(opener.feed(data)), piece):
            yield part


async def with_timeout(messages: AsyncIterator[T], silence_s: float) -> AsyncGenerator[T, None]:
    """Yield messages as they arrive, with a timeout for each.

    Raises:
        StalledTransferError: the next message has not arrived within `silence_s`.
    """
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise StalledTransferError(
                f"no data has come for {silence_s:g} s", "send the file again"
            ) from error
        yield message
