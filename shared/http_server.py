"""An HTTP server at one address, in the event loop of the process that it belongs to.

Knows sockets and hostile connections, and nothing of what is served. Its promises:

1. A Unix socket has its mode (and group, if one is named) before anybody can connect to it.
2. A connection that says nothing, or a header byte by byte, is closed after `idle_s`; one that
   comes while `max_connections` are open is closed at once. What a request's body may cost is the
   application's `client_max_size`.
3. A handler is cancelled when its client goes away.
4. `stop` takes no new connection, closes the idle ones, and lets requests under way finish for as
   long as it is given; then they are cancelled.

Errors that a start meets are ConfigErrors that name the address and the remedy.
"""

import asyncio
import socket
import ssl
from pathlib import Path

from aiohttp import web

from shared.access.sockets import open_to_group
from shared.errors import ConfigError
from shared.unix_path import claim_path

UNIX = "unix:"
SOCKET_MODE = 0o660  # user and group
BACKLOG = 128
IDLE_S = 75.0  # longer than proxies keep an idle connection, so that they close first
MAX_CONNECTIONS = 1024


class HttpListenError(ConfigError):
    """An address that HTTP was to be served at cannot be used."""

    reason = "http_listen"


def split_address(listen: str) -> tuple[str, int]:
    """Split "host:port" or "[host]:port".

    Raises:
        HttpListenError: it is neither.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise HttpListenError(
            f"{listen!r} is no address to listen at", "write unix:/path or host:port"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


class HttpServer:
    """Serves an aiohttp application at one address.

    Args:
        app: with its routes; not started yet, and served by nobody else.
        listen: "unix:/path" or "host:port"; port 0 lets the system choose one.
        ssl_context: for TLS; None for none.
        socket_mode: of a Unix socket.
        socket_group: name or number of the group that gets a Unix socket; "" leaves it.
    """

    def __init__(
        self,
        app: web.Application,
        listen: str,
        ssl_context: ssl.SSLContext | None = None,
        socket_mode: int = SOCKET_MODE,
        *,
        socket_group: str = "",
        max_connections: int = MAX_CONNECTIONS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._app = app
        self._listen = listen
        self._ssl_context = ssl_context
        self._socket_mode = socket_mode
        self._socket_group = socket_group
        self._max_connections = max_connections
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=idle_s, handler_cancellation=True
        )
        self._server: asyncio.AbstractServer | None = None
        self._bound = ""

    @property
    def address(self) -> str:
        """Where it listens, with the port that was chosen; as given before the start."""
        return self._bound or self._listen

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            ConfigError: the address cannot be used.
        """
        loop = asyncio.get_running_loop()
        sock = self._bind()
        await self._runner.setup()
        if self._listen.startswith(UNIX):
            self._server = await loop.create_unix_server(
                self._accept, sock=sock, ssl=self._ssl_context, backlog=BACKLOG
            )
        else:
            self._server = await loop.create_server(
                self._accept, sock=sock, ssl=self._ssl_context, backlog=BACKLOG
            )

    async def stop(self, grace_s: float) -> None:
        """End; requests still running after grace_s are cancelled. Nothing happens if it is not on.

        Streams that never end on their own should have been told to end before.
        """
        if self._server is None:
            return
        self._close()
        http = self._runner.server
        if http is not None:
            http.pre_shutdown()
            await self._app.shutdown()
            await http.shutdown(grace_s)
        await self._runner.cleanup()

    def _close(self) -> None:
        assert self._server is not None, "started"  # noqa: S101
        self._server.close()
        self._server = None
        if self._listen.startswith(UNIX):
            Path(self._listen.removeprefix(UNIX)).unlink(missing_ok=True)

    def _accept(self) -> asyncio.BaseProtocol:
        http = self._runner.server
        if http is None or len(http.connections) >= self._max_connections:
            return _Turned()
        return http()

    def _bind(self) -> socket.socket:
        try:
            if self._listen.startswith(UNIX):
                return self._bind_unix(Path(self._listen.removeprefix(UNIX)))
            return self._bind_tcp()
        except OSError as error:
            raise HttpListenError(
                f"cannot listen on {self._listen} ({error})", "choose an address that is free"
            ) from error

    def _bind_unix(self, path: Path) -> socket.socket:
        claim_path(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.bind(str(path))
            # Before listening: nobody can connect until then.
            open_to_group(path, self._socket_group, self._socket_mode)
        except BaseException:
            sock.close()
            raise
        self._bound = self._listen
        return sock

    def _bind_tcp(self) -> socket.socket:
        host, port = split_address(self._listen)
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self._bound = f"{shown}:{sock.getsockname()[1]}"
        return sock


class _Turned(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.abort() if isinstance(transport, asyncio.Transport) else transport.close()
