"""kvd's gRPC servers: one per address, each with health, reflection and its guard (D16)."""

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
from kvd.rpc.local_calls import LocalCalls
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
from shared.serving.grpc_handlers import CallInterceptor, server_options
from shared.serving.grpc_status import ReportedErrorInterceptor
from shared.serving.interceptor import AccessInterceptor
from shared.serving.rpc_observer import RpcMetrics, RpcObserver

DOMAIN = "kvd"  # domain of google.rpc.ErrorInfo
MAX_CONNECTIONS = 512  # per address: engines, operators and monitors are few
NO_TLS = TlsSettings()
# Streams that last as long as their caller: no tracing span is opened for them.
LONG_LIVED = ("Engine/Attach", "Engine/PushQueue", "Reader/WatchEvents")

_ADD: Mapping[str, Callable[[Any, Any], None]] = {
    "Engine": kvd_pb2_grpc.add_EngineServicer_to_server,
    "Operator": kvd_pb2_grpc.add_OperatorServicer_to_server,
    "Reader": kvd_pb2_grpc.add_ReaderServicer_to_server,
}


@dataclass(frozen=True)
class Endpoint:
    """An address to listen on, and its access rules.

    Attributes:
        address: "unix:/path" or "host:port".
        guard: interceptor that identifies and checks callers.
        group: group of a Unix socket; "": kvd's own group.
        tls: certificates of a TCP port.
    """

    address: str
    guard: AccessInterceptor
    group: str = ""
    tls: TlsSettings = NO_TLS


class GrpcServer:
    """The server of some of kvd's services at one endpoint.

    Args:
        endpoint: address to listen on.
        services: service's name in kvd.v1 → servicer.
        max_rpcs: most concurrent calls.
        rpcs: metrics of calls.
    """

    def __init__(
        self, endpoint: Endpoint, services: Mapping[str, object], max_rpcs: int, rpcs: RpcMetrics
    ) -> None:
        self._endpoint = endpoint
        self._rpcs = rpcs
        self._services = services
        self._max_rpcs = max_rpcs
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def start(self) -> None:
        """Listen and serve, and report SERVING to health checks.

        Raises:
            ConfigError: the address cannot be bound, or its group or TLS files cannot be used.
        """
        server = grpc.aio.server(
            interceptors=_interceptors(self._endpoint.guard, self._rpcs),
            options=server_options(
                MAX_MESSAGE_BYTES, MAX_CONNECTIONS, is_tcp=not is_unix(self._endpoint.address)
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
        endpoint = self._endpoint
        try:
            if not is_unix(endpoint.address) and endpoint.tls.is_on:
                server.add_secure_port(
                    endpoint.address, server_credentials(endpoint.tls, self._rpcs.tls)
                )
            else:
                server.add_insecure_port(endpoint.address)
            if is_unix(endpoint.address):
                open_to_group(Path(endpoint.address.removeprefix(UNIX)), endpoint.group)
        except (RuntimeError, OSError) as error:
            raise UnusableSocketError(
                f"cannot listen on {endpoint.address}", "free the address, or choose another one"
            ) from error

    async def stop_serving(self) -> None:
        """Report NOT_SERVING to health checks, before the server stops."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop the server; calls that still run after `grace_s` seconds are cancelled."""
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
    """Return kvd's servers: a Unix socket per role, and the configured TCP ports.

    Args:
        settings: kvd's settings at its start.
        access: creates the guard of each address.
        engine: servicer for engines.
        operator: servicer for operators.
        reader: servicer for monitors; the operators' addresses serve it, too.
        rpcs: metrics of calls.
    """
    run, config = settings.runtime_dir, settings.access
    both = {"Operator": operator, "Reader": reader}
    served: list[tuple[Endpoint, Mapping[str, object]]] = [
        (_socket(run / ENGINE_SOCKET, access, "engine", config.engine_group), {"Engine": engine}),
        (_socket(run / OPERATOR_SOCKET, access, "operator", config.operator_group), both),
        (_socket(run / READER_SOCKET, access, "reader", config.reader_group), {"Reader": reader}),
    ]
    ports = [Endpoint(address, access.guard(""), tls=settings.tls) for address in config.tcp]
    served += [(port, both) for port in ports]
    max_rpcs = settings.limits.max_rpcs
    return [GrpcServer(endpoint, services, max_rpcs, rpcs) for endpoint, services in served]


def make_local_calls(
    settings: Settings, access: Access, engine: object, rpcs: RpcMetrics
) -> LocalCalls:
    """Return what answers engines' calls without gRPC, under the rules of the engines' socket."""
    interceptors = _interceptors(access.guard("engine"), rpcs)
    return LocalCalls(_ADD["Engine"], engine, interceptors, settings.limits.max_rpcs)


def _interceptors(guard: AccessInterceptor, rpcs: RpcMetrics) -> list[CallInterceptor]:
    """Return the interceptors of every call, the outermost first."""
    return [RpcObserver(rpcs, LONG_LIVED), ReportedErrorInterceptor(DOMAIN), guard]


def _socket(path: Path, access: Access, role: str, group: str) -> Endpoint:
    return Endpoint(f"{UNIX}{path}", access.guard(role), group)
