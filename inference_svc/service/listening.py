"""The service's gRPC servers: on Unix sockets guarded by their group, and on guarded TCP ports.

A gRPC server has one rule for callers without credentials. So there are at most two servers: one
for all Unix sockets, whose callers are identified by being able to open them, and one for all TCP
ports, where every caller needs credentials. Both have the same services, health and reflection
included.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference_svc.config import InferenceSettings
from inference_svc.core.errors import ListenError
from shared.access.addresses import UNIX, is_unix
from shared.access.clients import ClientBook
from shared.access.credentials import server_credentials
from shared.access.identity import socket_identity
from shared.access.sockets import SocketInUseError, claim_path, open_to_group
from shared.pb.inference.v1 import inference_pb2, inference_pb2_grpc
from shared.serving.grpc_handlers import server_options
from shared.serving.grpc_status import ReportedErrorInterceptor
from shared.serving.interceptor import AccessInterceptor
from shared.serving.rpc_observer import RpcMetrics, RpcObserver

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
# RPCs beyond the turns that may wait: turns that are refused, so that they get our own error and
# not gRPC's, and calls other than SubmitTurn.
SPARE_RPCS = 4096
MAX_CONNECTIONS = 4096  # a client needs only one for all turns that it follows


def prepare_sockets(listen: Sequence[str]) -> None:
    """Prepare the paths of Unix sockets: make directories, remove stale files.

    Args:
        listen: the addresses to listen on; TCP ones are ignored.

    Raises:
        ListenError: another service answers at a path, or its directory cannot be used.
    """
    for address in filter(is_unix, listen):
        try:
            claim_path(Path(address.removeprefix(UNIX)))
        except SocketInUseError as error:
            remedy = (
                f'{error.remedy}, with --listen or server.listen ("auto" is the address of the '
                "systemd unit)"
            )
            raise ListenError(error.message, remedy) from error


class GrpcServers:
    """The gRPC servers of the service.

    Args:
        settings: the service's settings.
        service: the servicer that they serve.
        book: the clients that may connect.
        rpcs: counts calls.

    Attributes:
        bound: the addresses after `bind`, with the ports that were chosen for port 0.
    """

    def __init__(
        self,
        settings: InferenceSettings,
        service: inference_pb2_grpc.InferenceServicer,
        book: ClientBook,
        rpcs: RpcMetrics,
    ) -> None:
        self._settings = settings
        self._service = service
        self._book = book
        self._rpcs = rpcs
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._servers: list[grpc.aio.Server] = []
        self.bound: tuple[str, ...] = ()

    def bind(self) -> None:
        """Make the servers that the addresses need, and bind them.

        Raises:
            ConfigError: an address cannot be bound, the group or the TLS files cannot be used.
        """
        listen = self._settings.server.listen
        bound: dict[str, str] = {}
        for is_tcp in (False, True):
            addresses = [address for address in listen if is_unix(address) is not is_tcp]
            if addresses:
                server = self._make(is_tcp=is_tcp)
                self._servers.append(server)
                for address in addresses:
                    bound[address] = self._bind(server, address)
        self.bound = tuple(bound[address] for address in listen)

    async def start(self) -> None:
        """Start to serve, and report the service as ready."""
        for server in self._servers:
            await server.start()
        await self.set_ready(is_ready=True)

    async def set_ready(self, *, is_ready: bool) -> None:
        """Set the health of the process ("") to serving, and that of the service to `is_ready`."""
        statuses = health_pb2.HealthCheckResponse
        await self._health.set("", statuses.SERVING)
        await self._health.set(SERVICE, statuses.SERVING if is_ready else statuses.NOT_SERVING)

    async def stop(self, grace_s: float | None) -> None:
        """Stop the servers; cancel calls that still run after `grace_s`; None: cancel at once.

        A second call does nothing.
        """
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    def _make(self, *, is_tcp: bool) -> grpc.aio.Server:
        """Make the server of all TCP ports, or of all Unix sockets; it is not bound yet."""
        settings = self._settings
        tenants = settings.server.socket_tenants
        own = None if is_tcp else socket_identity("socket", tenants, {"client", "reader"})
        server = grpc.aio.server(
            interceptors=[
                RpcObserver(self._rpcs),
                ReportedErrorInterceptor("inference"),
                AccessInterceptor(self._book, {SERVICE: "client"}, own, metrics=self._rpcs),
            ],
            options=server_options(
                settings.server.max_message_bytes, MAX_CONNECTIONS, is_tcp=is_tcp
            ),
            maximum_concurrent_rpcs=2 * settings.scheduler.max_turns + SPARE_RPCS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        return server

    def _bind(self, server: grpc.aio.Server, address: str) -> str:
        """Bind a server to an address; return the address with the port that was chosen."""
        tls = self._settings.tls
        try:
            if is_unix(address):
                server.add_insecure_port(address)
                open_to_group(Path(address.removeprefix(UNIX)), self._settings.server.socket_group)
                return address
            if tls.is_on:
                credentials = server_credentials(tls, self._rpcs.tls)
                port = server.add_secure_port(address, credentials)
            else:
                port = server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise ListenError(
                f"cannot listen on {address}", "choose a free address with --listen"
            ) from error
        return f"{address.rpartition(':')[0]}:{port}"
