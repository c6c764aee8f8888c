"""A gRPC server with a guard, in this process: kvd's Reader, with two of its methods."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared.access.channels import ClientCredentials, aio_channel_of
from shared.access.clients import ClientBook, Clients, StreamCounts
from shared.access.credentials import server_credentials
from shared.access.identity import Identity, current_identity
from shared.access.settings import ClientSettings, TlsSettings
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.serving.grpc_status import ReportedErrorInterceptor
from shared.serving.interceptor import AccessInterceptor
from shared.serving.rpc_observer import RpcMetrics

READER = "kvd.v1.Reader"


class EchoReader(kvd_pb2_grpc.ReaderServicer):
    """Answers with the caller's name."""

    def __init__(self) -> None:
        self.held: list[str] = []

    async def GetStats(self, request, context):  # noqa: N802
        """Return the caller."""
        return kvd_pb2.GetStatsResponse(version=current_identity().name)

    async def WatchEvents(self, request, context):  # noqa: N802
        """Stream the caller, endlessly."""
        self.held.append(current_identity().name)
        yield kvd_pb2.Event(name=current_identity().name)
        await asyncio.get_running_loop().create_future()


@dataclass
class GuardedServer:
    """The server's address, and what can be changed while it serves."""

    address: str
    book: ClientBook
    reader: EchoReader
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    def channel(self, credentials: ClientCredentials | None = None) -> grpc.aio.Channel:
        """Open a new connection."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        channel = aio_channel_of(self.address, credentials, options)
        self.channels.append(channel)
        return channel

    def stub(self, credentials: ClientCredentials | None = None) -> Any:
        """Return a Reader stub over a new connection."""
        return kvd_pb2_grpc.ReaderStub(self.channel(credentials))

    async def who(self, credentials: ClientCredentials | None = None) -> str:
        """Return the caller as the server sees it."""
        answer = await self.stub(credentials).GetStats(kvd_pb2.GetStatsRequest(), timeout=30)
        return str(answer.version)


@asynccontextmanager
async def guarded_server(
    clients: Mapping[str, ClientSettings],
    *,
    tls: TlsSettings | None = None,
    socket: tuple[Path, Identity] | None = None,
    most_streams: int = 4,
    metrics: RpcMetrics | None = None,
    **guard: Any,
) -> AsyncIterator[GuardedServer]:
    """Serve on a port of the loopback, or on a socket whose users have an identity."""
    book, reader = ClientBook(Clients(clients)), EchoReader()
    own = None if socket is None else socket[1]
    metrics = metrics or RpcMetrics()
    streams = StreamCounts(most_streams)
    access = AccessInterceptor(
        book, {READER: "reader"}, own, streams=streams, metrics=metrics, **guard
    )
    server = grpc.aio.server(interceptors=[ReportedErrorInterceptor("kvd"), access])
    kvd_pb2_grpc.add_ReaderServicer_to_server(reader, server)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    if socket is not None:
        address = f"unix:{socket[0]}"
        server.add_insecure_port(address)
    elif tls is not None:
        credentials = server_credentials(tls, metrics.tls)
        address = f"localhost:{server.add_secure_port('127.0.0.1:0', credentials)}"
    else:
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    served = GuardedServer(address, book, reader)
    try:
        yield served
    finally:
        for channel in served.channels:
            await channel.close()
        await server.stop(None)
