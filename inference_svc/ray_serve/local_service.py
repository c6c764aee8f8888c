"""The local service of a replica: an inference service on this machine, its state, calls to it."""

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Self

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from yarl import URL

from inference_svc.client import InferenceClient, NotRunningError
from inference_svc.ray_serve.reports import PlaceTimes, RecentSessions, ended_turns, report_of
from shared.access.addresses import UNIX, is_tcp, is_unix
from shared.access.channels import aio_channel_of
from shared.pb.inference.v1 import inference_pb2, inference_pb2_grpc
from shared.process.runtime_dir import MAX_MESSAGE_BYTES
from shared.routing.session_router import ServerReport
from shared.types.errors import ReportedError

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
CONNECT_S = 5.0  # timeout of an HTTP connection
CHECK_S = 5.0  # timeout of a health check
POLL_S = 0.5  # between two checks while a service starts
log = logging.getLogger("ray.serve")  # Ray's logger: operators look into its files
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else gRPC backs off from a service that restarts
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


@dataclass(frozen=True)
class Asked:
    """An HTTP request to OpenAI's or Anthropic's API.

    Attributes:
        method: HTTP method.
        path: path and query, as the client wrote them.
        headers: headers that are forwarded.
        body: the whole body.
        session: the session by which it was routed; "" if it names none.
    """

    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    session: str


class ServiceError(RuntimeError):
    """A replica has no service, or cannot reach it; the message is one line with the remedy."""


@dataclass(frozen=True)
class ServiceAddress:
    """The addresses of a service on this machine, as "unix:/path" or "host:port".

    Attributes:
        socket: its Unix socket, for health checks and reports.
        grpc: address for clients' gRPC calls. "": the socket, where all callers are its
            `socket_tenants`; at a loopback port they need their tokens.
        http: address for requests to OpenAI's and Anthropic's API. "": there is none.
    """

    socket: str
    grpc: str = ""
    http: str = ""

    @classmethod
    def from_dict(cls, raw: Mapping[str, str]) -> Self:
        """Read the addresses from a config.

        Raises:
            ServiceError: a key is unknown, or an address is invalid or missing.
        """
        keys = {field.name for field in fields(cls)}
        unknown = sorted(raw.keys() - keys)
        if unknown or not raw.get("socket"):
            problem = (
                f"{unknown[0]!r} is not a key of a service"
                if unknown
                else "a service has no socket"
            )
            raise ServiceError(f"{problem}: write {', '.join(sorted(keys))}; socket is required")
        for key, address in raw.items():
            if address and not is_unix(address) and (key == "socket" or not is_tcp(address)):
                also = "" if key == "socket" else " or host:port"
                raise ServiceError(f"{key} = {address!r} is not an address: write unix:/path{also}")
        return cls(**raw)


def claim_one(services: Sequence[ServiceAddress]) -> tuple[ServiceAddress, socket.socket]:
    """Claim the first service that no other replica of this machine has.

    Returns:
        The service's addresses, and the claim: a socket that excludes other replicas until it is
        closed or this process ends.

    Raises:
        ServiceError: each service has its replica, or none is named.
    """
    if not services:
        raise ServiceError(
            "no service is configured: list one in `services` for each replica of a machine"
        )
    for address in services:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        digest = hashlib.sha256(address.socket.encode()).hexdigest()
        try:
            # An abstract name: no file is left behind, and the kernel frees it with the process.
            claim.bind(f"\0inference-svc/ray/{digest}")
        except OSError:
            claim.close()
        else:
            return address, claim
    raise ServiceError(
        f"all {len(services)} services of this machine already have a replica: list more "
        "services, or run fewer replicas here; a replica that is being replaced finishes "
        "its turns first"
    )


class LocalService:
    """One service on this machine, with its recent sessions.

    Args:
        address: its addresses.
        most_sessions: most recent sessions that are reported.

    Attributes:
        name: unique name of the server, the same after every restart.
        calls: gRPC stub for clients' calls.
        sessions: the sessions that were used recently.
    """

    def __init__(self, address: ServiceAddress, most_sessions: int) -> None:
        self.address = address
        self.name = f"{socket.gethostname()}:{address.socket.removeprefix(UNIX)}"
        self.sessions = RecentSessions(most_sessions)
        self._client = InferenceClient(address.socket)
        self._service_channel = aio_channel_of(address.socket, None, _OPTIONS)
        self._health = health_pb2_grpc.HealthStub(self._service_channel)
        self._clients_channel = aio_channel_of(address.grpc or address.socket, None, _OPTIONS)
        self.calls: Any = inference_pb2_grpc.InferenceStub(self._clients_channel)
        self._http: aiohttp.ClientSession | None = None
        self._times = PlaceTimes()

    async def close(self) -> None:
        """End all connections."""
        if self._http is not None:
            await self._http.close()
        await asyncio.gather(
            self._service_channel.close(None),
            self._clients_channel.close(None),
            self._client.__aexit__(None, None, None),
        )

    async def check(self) -> None:
        """Check that the service answers; one that drains does.

        Raises:
            ServiceError: it does not answer.
        """
        try:
            await self._client.get_model()
        except NotRunningError as error:
            remedy = "start it, or correct `socket` in the config of Ray Serve"
            raise ServiceError(f"{error.message}: {remedy}") from None
        except ReportedError as error:
            raise ServiceError(str(error)) from None

    async def wait(self, wait_s: float) -> None:
        """Wait until the service answers, at most `wait_s` seconds.

        Raises:
            ServiceError: it did not answer in time.
        """
        end_s, logged = time.monotonic() + wait_s, ""
        while True:
            try:
                return await self.check()
            except ServiceError as error:
                if time.monotonic() >= end_s:
                    raise
                if str(error) != logged:
                    logged = str(error)
                    log.warning("Waiting %g s for the service: %s.", wait_s, logged)
            await asyncio.sleep(POLL_S)

    async def takes_turns(self) -> bool:
        """Return whether the service takes turns; False if it drains, or does not answer."""
        request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
        try:
            answer = await self._health.Check(request, timeout=CHECK_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def report(self) -> ServerReport:
        """Return the service's report for routers; one that does not answer takes no turns."""
        takes_turns = await self.takes_turns()
        try:
            model = await self._client.get_model()
        except ReportedError:
            return ServerReport(takes_turns=False, sessions=self.sessions.as_dict())
        self._times.record(time.monotonic(), model.running_turns, ended_turns(model))
        return report_of(model, self._times, self.sessions.as_dict(), takes_turns=takes_turns)

    async def record_session(self, name: str, own_name: str) -> None:
        """Record the use of a session, with its current number of tokens.

        Args:
            name: the session's name for routers.
            own_name: the session's name in the service.
        """
        try:
            session = await self._client.get_session(own_name)
        except ReportedError:  # another tenant's, or deleted: report it with unknown size
            self.sessions.record_use(name, 0)
            return
        self.sessions.record_use(name, session.context_tokens)

    @asynccontextmanager
    async def request(self, asked: Asked) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to the HTTP API; yield the response when its headers have arrived.

        Raises:
            aiohttp.ClientError: the service did not answer, or the connection broke.
        """
        if self._http is None:
            self._http = _session_of(self.address.http)
        is_local = is_unix(self.address.http)
        base = "http://localhost" if is_local else f"http://{self.address.http}"
        async with self._http.request(
            asked.method,
            URL(base + asked.path, encoded=True),
            headers=asked.headers,
            data=asked.body or None,
            allow_redirects=False,
        ) as response:
            yield response


def _session_of(address: str) -> aiohttp.ClientSession:
    # One connection per request: the service may just be closing an idle one, and a request that
    # was sent on it could not be sent again safely.
    connector: aiohttp.BaseConnector
    if is_unix(address):
        path = address.removeprefix(UNIX)
        connector = aiohttp.UnixConnector(path, force_close=True, limit=0)
    else:
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
    )
