"""Where the service listens: Unix sockets guarded by their group, and guarded TCP ports.

A gRPC server has one answer to who comes without saying so. So there are at most two: one of all
sockets, whose callers are known by having opened them, and one of all ports, where everybody has to
say. Both serve the same.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from inference_svc.core.errors import ListenError
from shared.access.addresses import UNIX, is_unix
from shared.access.credentials import TlsConnections, server_credentials
from shared.access.settings import TlsSettings
from shared.access.sockets import SocketInUseError, claim_path, open_to_group


def prepare_sockets(listen: Sequence[str]) -> None:
    """Make way for Unix sockets: directories exist, nobody serves there, no stale file is left.

    Raises:
        ListenError: another service answers there, or the directory cannot be used.
    """
    for address in filter(is_unix, listen):
        try:
            claim_path(Path(address.removeprefix(UNIX)))
        except SocketInUseError as error:
            remedy = f'{error.remedy}, with --listen or server.listen ("auto": the unit\'s own)'
            raise ListenError(error.message, remedy) from error


@dataclass(frozen=True)
class Servers:
    """The gRPC servers of the service.

    Attributes:
        bound: their addresses, with the ports that were chosen for port 0.
    """

    servers: tuple[grpc.aio.Server, ...]
    bound: tuple[str, ...]

    async def start(self) -> None:
        """Serve."""
        for server in self.servers:
            await server.start()

    async def stop(self, grace_s: float | None) -> None:
        """End; calls still running after grace_s are cancelled. A second time changes nothing."""
        await asyncio.gather(*(server.stop(grace_s) for server in self.servers))


def bind_servers(
    make: Callable[[bool], grpc.aio.Server],
    listen: Sequence[str],
    tls: TlsSettings,
    group: str = "",
    connections: TlsConnections | None = None,
) -> Servers:
    """Make the servers that the addresses need, and bind them.

    Args:
        make: a server; of TCP ports, if told so.
        listen: each "unix:/path" or "host:port".
        tls: of TCP ports.
        group: that may open a Unix socket; "": the group it has.
        connections: is told of each TLS connection.

    Raises:
        ConfigError: an address cannot be bound, the group or the TLS files cannot be used.
    """
    servers: list[grpc.aio.Server] = []
    bound: dict[str, str] = {}
    for is_tcp in (False, True):
        addresses = [address for address in listen if is_unix(address) is not is_tcp]
        if addresses:
            server = make(is_tcp)
            servers.append(server)
            for address in addresses:
                bound[address] = _bind(server, address, tls, group, connections)
    return Servers(tuple(servers), tuple(bound[address] for address in listen))


def _bind(
    server: grpc.aio.Server,
    address: str,
    tls: TlsSettings,
    group: str,
    connections: TlsConnections | None,
) -> str:
    try:
        if is_unix(address):
            server.add_insecure_port(address)
            open_to_group(Path(address.removeprefix(UNIX)), group)
            return address
        if tls.is_on:
            port = server.add_secure_port(address, server_credentials(tls, connections))
        else:
            port = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise ListenError(
            f"cannot listen on {address}", "choose an address that is free, with --listen"
        ) from error
    return f"{address.rpartition(':')[0]}:{port}"
