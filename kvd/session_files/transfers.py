"""Session files in and out, on behalf of operators: few at once, within what each may see."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from kvd.caches.caches import Caches
from kvd.core.records.errors import InvalidRequestError
from kvd.errors import LimitReachedError, StalledTransferError
from kvd.session_files.exporter import Exporter
from kvd.session_files.importer import Target, read_file
from kvd.wire.messages import key_of
from kvd.wire.selection import check_allowed
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2

MOST_TRANSFERS = 4  # at once: each holds some tens of megabytes
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
            async with aclosing(exporter.pieces(prefix=request.prefix)) as pieces:
                async for piece in pieces:
                    for start in range(0, len(piece), PIECE_BYTES):
                        yield kvd_pb2.SessionFilePart(data=piece[start : start + PIECE_BYTES])

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
            key, num_tokens = await read_file(self._caches, target, _pieces(messages))
        return kvd_pb2.ImportSessionResponse(session=key_message(key), num_tokens=num_tokens)

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
