"""One gRPC server per address, each with health and reflection, behind its guard (D16)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvd.config import Settings
from kvd.errors import UnusableSocketError
from kvd.rpc.access import Access
from shared.access.addresses import UNIX, is_unix
from shared.access.credentials import server_credentials
from shared.access.settings import TlsSettings
from shared.access.sockets import open_to_group
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.pb.kvd.v1 import kvd_pb2_grpc
from shared.process.runtime_dir import (
    ENGINE_SOCKET,
    MAX_MESSAGE_BYTES,
    OPERATOR_SOCKET,
    READER_SOCKET,
)
from shared.serving.grpc_handlers import server_options
from shared.serving.grpc_status import ReportedErrorInterceptor
from shared.serving.interceptor import AccessInterceptor
from shared.serving.rpc_observer import RpcMetrics, RpcObserver

DOMAIN = "kvd"  # of google.rpc.ErrorInfo
MAX_CONNECTIONS = 512  # of one address: engines, operators and monitors are few
NO_TLS = TlsSettings()
LONG_LIVED = ("Engine/Attach", "Engine/PushQueue", "Reader/WatchEvents")  # as long as the caller

_ADD: Mapping[str, Callable[[Any, Any], None]] = {
    "Engine": kvd_pb2_grpc.add_EngineServicer_to_server,
    "Operator": kvd_pb2_grpc.add_OperatorServicer_to_server,
    "Reader": kvd_pb2_grpc.add_ReaderServicer_to_server,
}


@dataclass(frozen=True)
class Place:
    """Where a server listens, and for whom.

    Attributes:
        address: "unix:/path" or "host:port".
        guard: finds out who calls.
        group: group of a Unix socket; "": kvd's own.
        tls: the certificates of a TCP port.
    """

    address: str
    guard: AccessInterceptor
    group: str = ""
    tls: TlsSettings = NO_TLS


class GrpcServer:
    """A server for some of kvd's services at one place.

    Args:
        place: where.
        services: name in kvd.v1 -> servicer.
        max_rpcs: most calls at once.
        rpcs: counts of calls.
    """

    def __init__(
        self, place: Place, services: Mapping[str, object], max_rpcs: int, rpcs: RpcMetrics
    ) -> None:
        self._place = place
        self._rpcs = rpcs
        self._services = services
        self._max_rpcs = max_rpcs
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def start(self) -> None:
        """Listen and serve; health says SERVING.

        Raises:
            ConfigError: the address cannot be bound, its group or its TLS files cannot be used.
        """
        server = grpc.aio.server(
            interceptors=[
                RpcObserver(self._rpcs, LONG_LIVED),
                ReportedErrorInterceptor(DOMAIN),
                self._place.guard,
            ],
            options=server_options(
                MAX_MESSAGE_BYTES, MAX_CONNECTIONS, is_tcp=not is_unix(self._place.address)
            ),
            maximum_concurrent_rpcs=self._max_rpcs,
        )
        names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for name, servicer in self._services.items():
            _ADD[name](servicer, server)
            names.append(pb.DESCRIPTOR.services_by_name[name].full_name)
        reflection.enable_server_reflection(names, server)
        self._bind(server)
        self._server = server
        await server.start()
        for name in ["", *names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _bind(self, server: grpc.aio.Server) -> None:
        place = self._place
        try:
            if not is_unix(place.address) and place.tls.is_on:
                server.add_secure_port(place.address, server_credentials(place.tls, self._rpcs.tls))
            else:
                server.add_insecure_port(place.address)
            if is_unix(place.address):
                open_to_group(Path(place.address.removeprefix(UNIX)), place.group)
        except (RuntimeError, OSError) as error:
            raise UnusableSocketError(
                f"cannot listen on {place.address}", "free the address, or name another one"
            ) from error

    async def stop_serving(self) -> None:
        """Tell health checks that the end is near."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """End; calls still running after grace_s are cancelled."""
        if self._server is not None:
            await self._server.stop(grace_s)


def make_servers(
    settings: Settings,
    access: Access,
    engine: object,
    operator: object,
    reader: object,
    rpcs: RpcMetrics,
) -> list[GrpcServer]:
    """Return kvd's servers: a Unix socket of each role, and the ports for clients that are set.

    Args:
        settings: kvd's settings, as of its start.
        access: makes the guard of each address.
        engine: servicer of engines.
        operator: servicer of operators.
        reader: servicer of monitors, who are served on the operators' addresses, too.
        rpcs: counts of calls.
    """
    run, given = settings.runtime_dir, settings.access
    of_all = {"Operator": operator, "Reader": reader}
    served: list[tuple[Place, Mapping[str, object]]] = [
        (_socket(run / ENGINE_SOCKET, access, "engine", given.engine_group), {"Engine": engine}),
        (_socket(run / OPERATOR_SOCKET, access, "operator", given.operator_group), of_all),
        (_socket(run / READER_SOCKET, access, "reader", given.reader_group), {"Reader": reader}),
    ]
    ports = [Place(address, access.guard(""), tls=settings.tls) for address in given.tcp]
    served += [(port, of_all) for port in ports]
    most = settings.limits.max_rpcs
    return [GrpcServer(place, services, most, rpcs) for place, services in served]


def _socket(path: Path, access: Access, role: str, group: str) -> Place:
    return Place(f"{UNIX}{path}", access.guard(role), group)
