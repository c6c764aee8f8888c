"""HttpListener: accepts HTTP connections, and closes those that exceed their limits.

It accepts connections itself and then hands each to the event loop. So each is counted, and can be
closed, from the first moment on, with or without TLS. The limits, and which connection is closed
when they are reached, are in http_connections. A connection is also cut for these reasons:

    handshake   its TLS handshake has not ended in time
    headers     its headers have not come in time
    unread      its client does not read what was sent
    tls         its TLS handshake failed
    malformed   it sends no valid HTTP: it gets a 400 that repeats nothing of what was sent

Each is counted by its reason. For each reason one line a second is logged, with the number of
connections that had no line, and never with anything that was sent.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from shared.process.log import RefusalLog, get_logger
from shared.serving.http_connections import (
    Bounds,
    ConnectionMetrics,
    ConnectionTable,
    Phase,
    address_of,
)

BACKLOG = 1024  # of the kernel: connections that come while the loop is busy
LINGER_S = 2.0  # for the rest of a body after its answer: closing at once would destroy the answer
ACCEPT_AGAIN_S = 0.1  # pause after a connection for which there was no file descriptor
_NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_LEFT = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # a client that only tests whether a port is open

log = get_logger(__name__)


class Place(NamedTuple):
    """An address at which connections come in.

    Attributes:
        address: the address as it was given.
        sock: a socket bound to it; the listener closes it.
        ssl_context: for TLS; None: no TLS.
    """

    address: str
    sock: socket.socket
    ssl_context: ssl.SSLContext | None


class HttpListener:
    """Accepts HTTP connections at some sockets, and closes those that exceed their limits.

    Args:
        name: the server's name, in metrics and log lines.
        places: the addresses to listen at.
        http: aiohttp's server, which parses requests.
        bounds: limits of the connections at all places together.
        metrics: counts of connections.
        reserved: paths whose requests are answered on the reserve.
    """

    def __init__(
        self,
        name: str,
        places: Sequence[Place],
        http: web.Server,
        *,
        bounds: Bounds,
        metrics: ConnectionMetrics,
        reserved: frozenset[str],
    ) -> None:
        self.bounds = bounds
        self._name = name
        self._places = places
        self._http = http
        self._metrics = metrics
        self._reserved = reserved
        self._table: ConnectionTable[Connection] = ConnectionTable(bounds)
        self._opening: set[asyncio.Task[None]] = set()
        self._lines: dict[str, RefusalLog] = {}  # by reason
        self._accepting: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Listen, and accept connections."""
        for place in self._places:
            place.sock.setblocking(False)
            place.sock.listen(BACKLOG)
        self._accepting = {asyncio.create_task(self._accept(place)) for place in self._places}

    async def stop(self) -> None:
        """Stop accepting, and cancel the handshakes under way. Open connections stay open."""
        tasks = self._accepting | self._opening
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for place in self._places:
            place.sock.close()

    # ------------------------------------------------------------------- reports of connections

    def begin(self, connection: "Connection", path: str) -> bool:
        """Record a request whose headers are complete; return whether it can be answered now."""
        if path not in self._reserved and not self._table.may_answer():
            self._count("places", connection.peer)
            return False
        self.enter(connection, Phase.ANSWERING)
        return True

    def enter(self, connection: "Connection", phase: Phase) -> None:
        """Move a connection to another phase, unless it has been cut."""
        if self._table.phase_of(connection) is not None:
            self._table.move(connection, phase)
            connection.expect(phase)

    def is_in(self, connection: "Connection", phase: Phase) -> bool:
        """Whether a connection is in that phase."""
        return self._table.phase_of(connection) is phase

    def count_malformed(self, connection: "Connection", error: BaseException) -> None:
        """Count and log a connection that has sent no valid HTTP, by the kind of the error."""
        self._count("malformed", connection.peer, error=type(error).__name__)

    def cut(self, connection: "Connection", reason: str, **facts: str) -> None:
        """Close a connection now, and count it."""
        self._count(reason, connection.peer, **facts)
        connection.abort()

    def forget(self, connection: "Connection") -> None:
        """Record the end of a connection. A second call has no effect."""
        connection.expect(None)
        self._table.remove(connection)
        self._metrics.open[self._name] = len(self._table)

    def _count(self, reason: str, peer: str, **facts: str) -> None:
        self._metrics.cut.add(self._name, reason)
        line = self._lines.setdefault(reason, RefusalLog("http_connection_cut"))
        line.note(reason, server=self._name, peer=peer, **facts)

    # ---------------------------------------------------------------------------------- accepting

    async def _accept(self, place: Place) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(place.sock)
            except ConnectionAbortedError:
                continue  # the client was gone before it was accepted
            except OSError as error:
                if error.errno in _NO_FILES:
                    self._spare_file()
                else:
                    self._count("accept", "", error=errno.errorcode.get(error.errno or 0, ""))
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            try:
                self._admit(loop, place, sock, peer[0] if isinstance(peer, tuple) else "")
            except Exception:  # the edge: without this the task ends, and accepts no more
                sock.close()
                log.exception("http_connection_failed", server=self._name)

    def _spare_file(self) -> None:
        """Close a waiting connection, when no file descriptor is left for a new one."""
        waiting = self._table.longest_waiting()
        if waiting is not None:
            self.cut(waiting, "files")
            self.forget(waiting)

    def _admit(
        self, loop: asyncio.AbstractEventLoop, place: Place, sock: socket.socket, peer: str
    ) -> None:
        """Register an accepted connection and start its handshake, or refuse it."""
        connection = Connection(self, self._http, place, peer, loop)
        admission = self._table.admit(connection, address_of(peer, self.bounds.proxies))
        if isinstance(admission.cut, Connection):
            self.cut(admission.cut, admission.why)
        if not admission.is_in:
            self._count(admission.why, peer)
            sock.close()
            return
        self._metrics.open[self._name] = len(self._table)
        connection.expect(Phase.UNFINISHED)
        opening = loop.create_task(self._open(loop, sock, connection))
        connection.opening = opening
        self._opening.add(opening)
        opening.add_done_callback(partial(self._on_opened, sock, connection))

    async def _open(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, connection: "Connection"
    ) -> None:
        connection.has_socket = True
        context = connection.place.ssl_context
        await loop.connect_accepted_socket(lambda: connection, sock, ssl=context)

    def _on_opened(
        self, sock: socket.socket, connection: "Connection", opening: "asyncio.Task[None]"
    ) -> None:
        """Record the end of a handshake; count it if it failed."""
        self._opening.discard(opening)
        connection.opening = None
        if not connection.has_socket:
            sock.close()
        error = None if opening.cancelled() else opening.exception()
        if error is None and not opening.cancelled():
            return
        self.forget(connection)
        if isinstance(error, ssl.SSLError) and not isinstance(error, _LEFT):
            self._count("tls", connection.peer, error=error.reason or type(error).__name__)
        elif error is not None and not isinstance(error, OSError):
            log.error("http_connection_failed", server=self._name, exc_info=error)


class Connection(web.RequestHandler):
    """One connection of aiohttp, which reports its progress to the listener.

    Attributes:
        place: where it came in.
        peer: address of the other side; "" on a Unix socket.
        opening: task that hands the socket to the event loop and waits for the TLS handshake.
        has_socket: whether the event loop owns the socket, and closes it.
    """

    def __init__(
        self,
        listener: HttpListener,
        http: web.Server,
        place: Place,
        peer: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(
            http,
            loop=loop,
            keepalive_timeout=listener.bounds.idle_s,
            lingering_time=LINGER_S,
            auto_decompress=False,  # compressed bodies are not accepted
            access_log=None,  # type: ignore[arg-type]  # aiohttp allows None for its own servers
        )
        self.place = place
        self.peer = peer
        self.opening: asyncio.Task[None] | None = None
        self.has_socket = False
        self.listener = listener
        self._wire: asyncio.Transport | None = None  # aiohttp drops its own when it closes it
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def expect(self, phase: Phase | None) -> None:
        """Start the timer that ends a phase which takes too long; None: the connection is over."""
        _cancel(self._deadline)
        self._deadline = None
        if phase is Phase.UNFINISHED:
            self._deadline = self._loop.call_later(self.listener.bounds.header_s, self._on_deadline)
        elif phase is Phase.IDLE and self._num_unsent():
            self._deadline = self._loop.call_later(self.listener.bounds.write_s, self._on_deadline)
        elif phase is None:
            _cancel(self._unread)

    def abort(self) -> None:
        """Close it now, without sending what is unsent."""
        if self._wire is not None:
            self._wire.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def _on_deadline(self) -> None:
        if self.listener.is_in(self, Phase.UNFINISHED):
            self.listener.cut(self, "handshake" if self._wire is None else "headers")
        elif self._num_unsent():
            self.listener.cut(self, "unread")

    def _num_unsent(self) -> int:
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    # ----------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with the connection, after the TLS handshake if there is one."""
        self._wire = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self.expect(Phase.UNFINISHED)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Report the end to the listener."""
        self.listener.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Begin the next request with the first byte after an answer."""
        if data and self.listener.is_in(self, Phase.IDLE):
            self.listener.enter(self, Phase.UNFINISHED)
        super().data_received(data)

    def pause_writing(self) -> None:
        """Start a timer, because the client does not read what is sent to it."""
        super().pause_writing()
        self._unread = self._loop.call_later(
            self.listener.bounds.write_s, self.listener.cut, self, "unread"
        )

    def resume_writing(self) -> None:
        """Stop the timer, because the client has read."""
        _cancel(self._unread)
        super().resume_writing()

    # ------------------------------------------------------------------------- called by aiohttp

    async def start(self) -> None:
        """Answer requests. Afterwards only unsent bytes keep the connection open."""
        try:
            await super().start()
        finally:
            self.listener.enter(self, Phase.IDLE)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of an answer. After that the connection may be cut for another one."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.listener.enter(self, Phase.IDLE)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer invalid HTTP without repeating it in answer or log, because it may be secret."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        self.listener.count_malformed(self, exc)
        response = web.Response(status=status, text=f"{status}: {type(exc).__name__}\n")
        response.force_close()
        return response

    def log_exception(self, *_args: Any, **kw: Any) -> None:
        """Count a body that is invalid HTTP as malformed; log any other error as one of ours."""
        error = kw.get("exc_info")
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            self.listener.count_malformed(self, error)
        elif not isinstance(error, ConnectionError):  # its client has gone
            log.error("http_request_failed", exc_info=error)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
