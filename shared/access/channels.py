"""Channels of gRPC clients, which authenticate with a token or a certificate.

A token is sent over a Unix socket, to this machine, or over TLS, and nowhere else. gRPC has call
credentials for `authorization: Bearer TOKEN`, but refuses to send them without TLS, even to a
loopback port. Hence our own interceptors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from shared.access.addresses import is_loopback, is_tcp, is_unix
from shared.access.tokens import read_token
from shared.types.errors import InvalidInputError

AUTHORIZATION = "authorization"


class TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Sends a token with each call of a synchronous channel."""

    def __init__(self, token: str) -> None:
        self._metadata = (AUTHORIZATION, f"Bearer {token}")

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), self._metadata]
        return continuation(details._replace(metadata=metadata), request)

    intercept_unary_unary: Any = _intercept
    intercept_unary_stream: Any = _intercept
    intercept_stream_unary: Any = _intercept
    intercept_stream_stream: Any = _intercept


class _AioToken:
    def __init__(self, token: str) -> None:
        self._metadata = (AUTHORIZATION, f"Bearer {token}")

    async def intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), self._metadata)
        return await continuation(details._replace(metadata=metadata), request)


# grpc.aio uses an interceptor of several kinds as one of the first kind only.
class _AioUnaryUnary(_AioToken, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary: Any = _AioToken.intercept


class _AioUnaryStream(_AioToken, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream: Any = _AioToken.intercept


class _AioStreamUnary(_AioToken, grpc.aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_unary: Any = _AioToken.intercept


class _AioStreamStream(_AioToken, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream: Any = _AioToken.intercept


def aio_interceptors(token: str) -> list[Any]:
    """Return interceptors that send a token with each call of a grpc.aio channel."""
    kinds = (_AioUnaryUnary, _AioUnaryStream, _AioStreamUnary, _AioStreamStream)
    return [kind(token) for kind in kinds]


Options = Sequence[tuple[str, Any]]


class ConnectionOptionsError(InvalidInputError):
    """The address, or a file that the command line names, cannot be used."""

    reason = "connection_options"


@dataclass(frozen=True)
class ClientCredentials:
    """What a client proves its identity with, and how it verifies the server.

    Attributes:
        token: the client's token; "" for none.
        authorities: authorities of the server's certificate, PEM; None: the system's.
        certificate: the client's certificate with its chain, PEM; None for none.
        key: the certificate's key, PEM; None for none.
    """

    token: str = field(default="", repr=False)
    authorities: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @property
    def names_tls(self) -> bool:
        """Whether it has parts that only make sense with TLS."""
        return self.authorities is not None or self.certificate is not None


def read_credentials(
    token_file: Path | None = None,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> ClientCredentials:
    """Read the files that a command line names.

    Raises:
        InvalidInputError: a file cannot be read, or a key or certificate is missing.
    """
    if (tls_cert is None) != (tls_key is None):
        raise ConnectionOptionsError(
            "a TLS certificate is given without its key, or a key without its certificate",
            "give both --tls-cert and --tls-key, or neither",
        )
    return ClientCredentials(
        read_token(token_file) if token_file is not None else "",
        _read(tls_ca, "--tls-ca"),
        _read(tls_cert, "--tls-cert"),
        _read(tls_key, "--tls-key"),
    )


def channel_of(
    address: str, credentials: ClientCredentials | None, options: Options
) -> grpc.Channel:
    """Return a synchronous channel. It connects at the first call.

    Raises:
        InvalidInputError: the address is invalid.
    """
    credentials = credentials or ClientCredentials()
    if _uses_tls(address, credentials):
        channel = grpc.secure_channel(address, _tls(credentials), options=options)
    else:
        channel = grpc.insecure_channel(address, options=options)
    if not credentials.token:
        return channel
    return grpc.intercept_channel(channel, TokenInterceptor(credentials.token))


def aio_channel_of(
    address: str, credentials: ClientCredentials | None, options: Options
) -> grpc.aio.Channel:
    """Return a channel for asyncio. It connects at the first call.

    Raises:
        InvalidInputError: the address is invalid.
    """
    credentials = credentials or ClientCredentials()
    interceptors = aio_interceptors(credentials.token) if credentials.token else []
    if _uses_tls(address, credentials):
        tls = _tls(credentials)
        return grpc.aio.secure_channel(address, tls, options=options, interceptors=interceptors)
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)


def _uses_tls(address: str, credentials: ClientCredentials) -> bool:
    """Whether to use TLS: if credentials ask for it, and wherever others could listen in."""
    if is_unix(address):
        return False
    if not is_tcp(address):
        raise ConnectionOptionsError(
            f"{address[:100]!r} is not an address", "write it as unix:/path or host:port"
        )
    return credentials.names_tls or not is_loopback(address)


def _tls(credentials: ClientCredentials) -> grpc.ChannelCredentials:
    channel_credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(
        credentials.authorities, credentials.key, credentials.certificate
    )
    return channel_credentials


def _read(path: Path | None, option: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConnectionOptionsError(
            f"cannot read {path} ({error.strerror})",
            f"give another file with {option}, or let this user read it",
        ) from error
