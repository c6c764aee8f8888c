"""The connection of the `kvd` commands to a daemon: its sockets on this machine, or a TCP port."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvd.errors import SocketDeniedError
from shared.access.denials import denial_of
from shared.process.runtime_dir import (
    OPERATOR_SOCKET,
    READER_SOCKET,
    SYSTEM_RUNTIME_DIR,
    default_runtime_dir,
)
from shared.version import __version__

# Imported where they are used, so that --help and --version need not import gRPC.
if TYPE_CHECKING:
    from kvd.client.operator_client import OperatorClient
    from shared.access.channels import ClientCredentials

# These options may come before or after the command's name: a retyped command is edited at its end.
MOVABLE = ("--runtime-dir", "--address", "--token-file", "--tls-ca", "--tls-cert", "--tls-key")
_USABLE = os.R_OK | os.W_OK


@dataclass(frozen=True)
class Connection:
    """The connection options that come before the command's name.

    Attributes:
        address: of the TCP port; "": use the sockets in the runtime directory.
        credentials: token and certificates; None: none were named.
    """

    address: str = ""
    credentials: "ClientCredentials | None" = None


_CONNECTION: ContextVar[Connection] = ContextVar("connection")  # set once, by connection_options


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


def connection_options(
    address: Annotated[
        str,
        typer.Option(
            envvar="KVD_ADDRESS",
            help="Address of a remote kvd, host:port (its access.tcp); instead of --runtime-dir.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="KVD_TOKEN_FILE", help="File with the token to send."),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="KVD_TLS_CA_FILE", help="PEM: authority of kvd's certificate."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="KVD_TLS_CERT_FILE", help="PEM: own certificate.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="KVD_TLS_KEY_FILE", help="PEM: key of the certificate.")
    ] = None,
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Keep what stands at the program itself for open_client."""
    credentials = None
    if any((token_file, tls_ca, tls_cert, tls_key)):
        from shared.access.channels import read_credentials

        credentials = read_credentials(token_file, tls_ca, tls_cert, tls_key)
    _CONNECTION.set(Connection(address, credentials))


@contextmanager
def open_client(runtime_dir: Path | None) -> Iterator["OperatorClient"]:
    """Open a client of the kvd that the command line names; it connects at the first call.

    Raises:
        SocketDeniedError: this user may open none of its sockets.
    """
    from kvd.client.operator_client import connect_to

    connection = _CONNECTION.get(Connection())
    address = connection.address or f"unix:{_nearest_socket(runtime_dir)}"
    with connect_to(address, connection.credentials) as client:
        yield client


def local_directory(runtime_dir: Path | None) -> Path | None:
    """Return the runtime directory of the named kvd; None: it is on another machine."""
    is_elsewhere = bool(_CONNECTION.get(Connection()).address)
    return None if is_elsewhere else _nearest_socket(runtime_dir).parent


def _nearest_socket(runtime_dir: Path | None) -> Path:
    """Return a socket in the named directory; if none is named, in the user's or the system's.

    Raises:
        SocketDeniedError: the user may open no socket there, or may not enter the directory.
    """
    path = socket_of(runtime_dir or default_runtime_dir())
    if runtime_dir is None and not os.access(path, os.F_OK, effective_ids=True):
        socket_of(SYSTEM_RUNTIME_DIR)  # so that a denial is reported, and not that no kvd runs
    return path


def socket_of(runtime_dir: Path) -> Path:
    """Return the socket with the most rights among those the user may open.

    If there is no socket at all, return the operators'.

    Raises:
        SocketDeniedError: there are sockets, and the user may open none.
    """
    found = [runtime_dir / name for name in (OPERATOR_SOCKET, READER_SOCKET)]
    usable = [path for path in found if os.access(path, _USABLE, effective_ids=True)]
    if usable:
        return usable[0]
    denial = denial_of(*found)
    if denial is not None:
        raise SocketDeniedError(*denial)
    return found[0]
