"""One gRPC server per socket, each with health and reflection (D16)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvd.errors import UnusableSocketError
from shared.grpc_status import ReportedErrorInterceptor
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.runtime_dir import MAX_MESSAGE_BYTES

DOMAIN = "kvd"  # of google.rpc.ErrorInfo

_ADD: Mapping[str, Callable[[Any, Any], None]] = {
    "Engine": kvd_pb2_grpc.add_EngineServicer_to_server,
    "Operator": kvd_pb2_grpc.add_OperatorServicer_to_server,
    "Reader": kvd_pb2_grpc.add_ReaderServicer_to_server,
}


class GrpcServer:
    """A server for some of kvd's services at one address."""

    def __init__(
        self,
        address: str,
        services: Mapping[str, object],
        max_rpcs: int,
    ) -> None:
        self._address = address  # "unix:/path" or "host:port"
        self._services = services  # name in kvd.v1 → servicer
        self._max_rpcs = max_rpcs
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]

    async def start(self, socket_mode: int) -> None:
        """Listen and serve; health says SERVING.

        Raises:
            UnusableSocketError: the address cannot be bound.
        """
        server = grpc.aio.server(
            interceptors=[ReportedErrorInterceptor(DOMAIN)],
            options=[
                (
                    "grpc.so_reuseport",
                    0,
                ),  # a second kvd on our TCP port is refused, not half served
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ],
            maximum_concurrent_rpcs=self._max_rpcs,
        )
        names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for name, servicer in self._services.items():
            _ADD[name](servicer, server)
            names.append(kvd_pb2.DESCRIPTOR.services_by_name[name].full_name)
        reflection.enable_server_reflection(names, server)
        self._bind(server, socket_mode)
        self._server = server
        await server.start()
        for name in ["", *names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def _bind(self, server: grpc.aio.Server, socket_mode: int) -> None:
        try:
            server.add_insecure_port(self._address)
            if self._address.startswith("unix:"):
                Path(self._address.removeprefix("unix:")).chmod(socket_mode)
        except (RuntimeError, OSError) as error:
            raise UnusableSocketError(
                f"cannot listen on {self._address}", "free the address, or name another one"
            ) from error

    async def stop_serving(self) -> None:
        """Tell health checks that the end is near."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """End; calls still running after grace_s are cancelled."""
        if self._server is not None:
            await self._server.stop(grace_s)
