"""Session files in and out, on behalf of operators: few at once, within what each may see."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from kvd.caches.caches import Caches
from kvd.core.records.errors import InvalidRequestError
from kvd.encryption.key_file import WrongKeyError
from kvd.errors import LimitReachedError, StalledTransferError
from kvd.session_files.chunks import ChunkOpener, ChunkSealer
from kvd.session_files.exporter import Exporter
from kvd.session_files.importer import read_file
from kvd.session_files.slot_runs import finished_in_thread
from kvd.session_files.target import Target
from kvd.wire.messages import key_of
from kvd.wire.selection import check_allowed
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2

MOST_TRANSFERS = 8  # at once: each holds some tens of megabytes; kvd remote follow has up to five
SILENCE_S = 60.0  # between two messages of a caller
PIECE_BYTES = 1 << 20  # of a message: a small part of what gRPC lets through

T = TypeVar("T")


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
            replaces_up_to=to.replace_up_to,
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
