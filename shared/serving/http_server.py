"""HttpServer: an HTTP server at some addresses, in the event loop of its process.

It knows sockets, hostile connections and the identity of callers, and nothing of what is served.
Its promises:

1. A Unix socket has its mode (and group, if one is named) before any client can connect to it.
2. A connection that sends nothing, or its headers byte by byte, is closed after `header_s`. A new
   connection that comes while all places are taken gets that of one that only waits
   (http_connections). The size of a request's body is limited by the application's
   `client_max_size`.
3. A handler is cancelled when its client goes away.
4. `stop` accepts no new connection, closes the idle ones, and lets requests under way finish in the
   time it is given; then they are cancelled.

Errors at the start are ConfigErrors that name the address and the remedy.
"""

import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from shared.access.addresses import UNIX, is_unix
from shared.access.clients import Clients, authenticate
from shared.access.identity import Identity
from shared.access.sockets import claim_path, open_to_group
from shared.serving.http_connections import Bounds, ConnectionMetrics
from shared.serving.http_listener import Connection, HttpListener, Place
from shared.types.errors import ConfigError

_OF_SUBJECT = "commonName"
API_KEY = "X-Api-Key"  # the header with which Anthropic's clients send a token


def identity_of(
    request: web.Request, clients: Clients, socket_identity: Identity | None = None
) -> Identity:
    """Return the identity of a request's caller, before its body is read.

    Args:
        request: a request of an aiohttp server.
        clients: the clients in force (ClientBook.current).
        socket_identity: the identity of callers at the Unix socket of the request; None: TCP.

    Raises:
        UnauthenticatedError: the caller is not known.
    """
    authorization = request.headers.get("Authorization", "")
    if not authorization and API_KEY in request.headers:
        authorization = f"Bearer {request.headers[API_KEY]}"
    return authenticate(clients, authorization, list(_certificate_names(request)), socket_identity)


def _certificate_names(request: web.Request) -> Iterator[str]:
    """Yield the names in the client's certificate, which TLS has verified."""
    found = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    if not isinstance(found, ssl.SSLObject | ssl.SSLSocket):
        return
    certificate: Any = found.getpeercert() or {}
    for _kind, name in certificate.get("subjectAltName", ()):
        yield str(name)
    for part in certificate.get("subject", ()):
        yield from (str(name) for kind, name in part if kind == _OF_SUBJECT)


SOCKET_MODE = 0o660  # user and group may connect
RETRY_AFTER = {"Retry-After": "1"}


class HttpListenError(ConfigError):
    """An address for HTTP cannot be used."""

    reason = "http_listen"


def split_address(listen: str) -> tuple[str, int]:
    """Split "host:port" or "[host]:port".

    Raises:
        HttpListenError: it is neither.
    """
    host, colon, port = listen.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise HttpListenError(
            f"{listen!r} is not an address", "write it as unix:/path or host:port"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_free(listen: Iterable[str]) -> None:
    """Refuse ports that are taken, before a start does any expensive work.

    Raises:
        HttpListenError: a port is taken; the first one is named.
    """
    for address in listen:
        if not is_unix(address):
            sock, _ = _bind_tcp(address)
            sock.close()


def accepted_at(request: web.Request) -> str:
    """Return the address at which a request came in, as it was given to its HttpServer."""
    return _connection_of(request).place.address


def _connection_of(request: web.Request) -> Connection:
    connection = request.protocol
    assert isinstance(connection, Connection), connection  # noqa: S101
    return connection


class HttpServer:
    """Serves an aiohttp application at some addresses.

    Args:
        app: the application with its routes. It is not started yet, and served only here.
        listen: TLS context by address, "unix:/path" or "host:port"; None: no TLS. With port 0 the
            system chooses one.
        socket_mode: mode of Unix sockets.
        socket_group: name or number of the group of Unix sockets; "": unchanged.
        name: the server's name, in metrics and log lines.
        bounds: limits of connections, at all addresses together.
        metrics: counts of connections.
        reserved: paths whose requests are answered even if all other places are taken.
    """

    def __init__(
        self,
        app: web.Application,
        listen: Mapping[str, ssl.SSLContext | None],
        socket_mode: int = SOCKET_MODE,
        *,
        socket_group: str = "",
        name: str = "http",
        bounds: Bounds | None = None,
        metrics: ConnectionMetrics | None = None,
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._listen = listen
        self._socket_mode = socket_mode
        self._socket_group = socket_group
        self._name = name
        self._bounds = bounds or Bounds()
        self._metrics = metrics or ConnectionMetrics()
        self._reserved = reserved
        app.middlewares.insert(0, self._make_admission())
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self._listener: HttpListener | None = None
        self._bound: dict[str, str] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses it listens at, with the chosen ports; before the start, those it was given."""
        return tuple(self._bound.get(address, address) for address in self._listen)

    async def start(self) -> None:
        """Bind all addresses and serve.

        Raises:
            ConfigError: an address cannot be used.
        """
        places = self._bind()
        await self._runner.setup()
        assert self._runner.server is not None, "set up"  # noqa: S101
        self._listener = HttpListener(
            self._name,
            places,
            self._runner.server,
            bounds=self._bounds,
            metrics=self._metrics,
            reserved=self._reserved,
        )
        self._listener.start()

    async def stop(self, grace_s: float) -> None:
        """Stop; cancel requests that still run after grace_s. No effect if it is not started.

        Before that, the caller ends streams that never end on their own.
        """
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        await listener.stop()
        self._unlink()
        http = self._runner.server
        if http is not None:
            http.pre_shutdown()
            await self._app.shutdown()
            await http.shutdown(grace_s)
        await self._runner.cleanup()

    def _unlink(self) -> None:
        for address in filter(is_unix, self._bound):
            Path(address.removeprefix(UNIX)).unlink(missing_ok=True)

    def _make_admission(self) -> Middleware:
        """Return a middleware that reports each request to the listener, or answers it with 503."""

        @web.middleware
        async def admit(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            connection = _connection_of(request)
            if connection.listener.begin(connection, request.path):
                return await handler(request)
            refused = web.Response(
                status=503,
                text="all connections are in use: try again later\n",
                headers=RETRY_AFTER,
            )
            refused.force_close()
            return refused

        return admit

    def _bind(self) -> list[Place]:
        """Bind all addresses, or none."""
        places: list[Place] = []
        try:
            for address, ssl_context in self._listen.items():
                sock, self._bound[address] = self._bind_one(address)
                places.append(Place(address, sock, ssl_context))
        except BaseException:
            for place in places:
                place.sock.close()
            self._unlink()
            self._bound.clear()
            raise
        return places

    def _bind_one(self, address: str) -> tuple[socket.socket, str]:
        """Return a socket bound to an address, and the address with the port that was chosen."""
        if not is_unix(address):
            return _bind_tcp(address)
        try:
            return self._bind_unix(Path(address.removeprefix(UNIX))), address
        except OSError as error:
            raise _cannot_listen(address, error) from error

    def _bind_unix(self, path: Path) -> socket.socket:
        claim_path(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.bind(str(path))
            # Before listening, because no client can connect until then.
            open_to_group(path, self._socket_group, self._socket_mode)
        except BaseException:
            sock.close()
            raise
        return sock


def _cannot_listen(address: str, error: OSError) -> HttpListenError:
    return HttpListenError(
        f"cannot listen on {address} ({error})", "choose a free address of this machine"
    )


def _bind_tcp(listen: str) -> tuple[socket.socket, str]:
    """Return a socket bound to "host:port", and that address with the port that was chosen."""
    host, port = split_address(listen)
    try:
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
    except OSError as error:
        raise _cannot_listen(listen, error) from error
    shown = f"[{host}]" if ":" in host else host
    return sock, f"{shown}:{sock.getsockname()[1]}"
