"""The address the service listens on: a Unix socket guarded by its group, or a guarded TCP port."""

from pathlib import Path

import grpc

from inference_svc.core.errors import ListenError
from shared.access.addresses import UNIX, is_unix
from shared.access.credentials import server_credentials
from shared.access.settings import TlsSettings
from shared.access.sockets import open_to_group
from shared.access.tls_connections import TlsConnections
from shared.unix_path import SocketInUseError, claim_path


def prepare_socket(listen: str) -> None:
    """Make way for a Unix socket: its directory exists, nobody serves there, no stale file is left.

    Raises:
        ListenError: another service answers there, or the directory cannot be used.
    """
    if not is_unix(listen):
        return
    try:
        claim_path(Path(listen.removeprefix(UNIX)))
    except SocketInUseError as error:
        raise ListenError(
            error.message, "give --listen another path, in a directory this user may write"
        ) from error


def bind(
    server: grpc.aio.Server,
    listen: str,
    tls: TlsSettings,
    group: str = "",
    connections: TlsConnections | None = None,
) -> int:
    """Bind the server; return the port, which is chosen for port 0.

    Args:
        server: not started yet.
        listen: "unix:/path" or "host:port".
        tls: of a TCP port.
        group: that may open a Unix socket; "": the group it has.
        connections: is told of each TLS connection.

    Raises:
        ConfigError: the address cannot be bound, the group or the TLS files cannot be used.
    """
    try:
        if is_unix(listen):
            port: int = server.add_insecure_port(listen)
            open_to_group(Path(listen.removeprefix(UNIX)), group)
        elif tls.is_on:
            port = server.add_secure_port(listen, server_credentials(tls, connections))
        else:
            port = server.add_insecure_port(listen)
    except (RuntimeError, OSError) as error:
        raise ListenError(
            f"cannot listen on {listen}", "choose an address that is free, with --listen"
        ) from error
    return port
