"""The service of this machine that a replica stands before: how it is, and calls to it."""

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
CONNECT_S = 5.0
CHECK_S = 5.0
POLL_S = 0.5
log = logging.getLogger("ray.serve")  # Ray's own, in whose files a replica's lines are looked for
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a restarted service is not backed off from
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


@dataclass(frozen=True)
class Asked:
    """A request of OpenAI's or Anthropic's API.

    Attributes:
        method: of the request.
        path: with the query, as the client wrote it.
        headers: that go on.
        body: all of it.
        session: that routers have read; "": none.
    """

    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    session: str


class ServiceError(RuntimeError):
    """A replica cannot stand before its service; one line that names the remedy."""


@dataclass(frozen=True)
class ServiceAddress:
    """Where a service of this machine listens, as "unix:/path" or "host:port".

    Attributes:
        socket: its Unix socket: by it the service is asked how it is.
        grpc: where clients' calls go. "": to the socket, where all are its `socket_tenants`; a port
            of the loopback asks them for their tokens.
        http: where OpenAI's and Anthropic's requests go. "": none are taken.
    """

    socket: str
    grpc: str = ""
    http: str = ""

    @classmethod
    def from_dict(cls, given: Mapping[str, str]) -> Self:
        """Read what stands in a config.

        Raises:
            ServiceError: a key is none of these, or an address is none.
        """
        keys = {one.name for one in fields(cls)}
        unknown = sorted(given.keys() - keys)
        if unknown or not given.get("socket"):
            what = (
                f"{unknown[0]!r} is no key of a service" if unknown else "a service has no socket"
            )
            raise ServiceError(f"{what}: write {', '.join(sorted(keys))}; socket is needed")
        for key, address in given.items():
            if address and not is_unix(address) and (key == "socket" or not is_tcp(address)):
                also = "" if key == "socket" else " or host:port"
                raise ServiceError(f"{key} = {address!r} is no address: write unix:/path{also}")
        return cls(**given)


def claim_one(services: Sequence[ServiceAddress]) -> tuple[ServiceAddress, socket.socket]:
    """Choose the first service that no other replica of this machine stands before.

    Returns:
        It, and what is held of it: until that is closed, or this process is gone, it is nobody
        else's.

    Raises:
        ServiceError: each has its replica, or there are none.
    """
    if not services:
        raise ServiceError(
            "no service is named: write `services`, one for each replica of a machine"
        )
    for address in services:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        digest = hashlib.sha256(address.socket.encode()).hexdigest()
        try:
            claim.bind(f"\0inference-svc/ray/{digest}")  # a name without a file: the kernel's alone
        except OSError:
            claim.close()
        else:
            return address, claim
    raise ServiceError(
        f"each of the {len(services)} services of this machine has its replica: name more of them, "
        "or have fewer replicas here; one that is being replaced ends its turns first"
    )


class LocalService:
    """One service, and what is known of it.

    Args:
        address: where it listens.
        most_sessions: used lately, that are told of.

    Attributes:
        name: the same after every restart, and no other server's.
        calls: gRPC's stub for clients' calls.
        sessions: used lately.
    """

    def __init__(self, address: ServiceAddress, most_sessions: int) -> None:
        self.address = address
        self.name = f"{socket.gethostname()}:{address.socket.removeprefix(UNIX)}"
        self.sessions = RecentSessions(most_sessions)
        self._client = InferenceClient(address.socket)
        self._own = aio_channel_of(address.socket, None, _OPTIONS)
        self._health = health_pb2_grpc.HealthStub(self._own)
        self._theirs = aio_channel_of(address.grpc or address.socket, None, _OPTIONS)
        self.calls: Any = inference_pb2_grpc.InferenceStub(self._theirs)
        self._http: aiohttp.ClientSession | None = None
        self._times = PlaceTimes()

    async def close(self) -> None:
        """End all connections."""
        if self._http is not None:
            await self._http.close()
        await asyncio.gather(
            self._own.close(None),
            self._theirs.close(None),
            self._client.__aexit__(None, None, None),
        )

    async def check(self) -> None:
        """Return if it is there, whether it takes turns or drains.

        Raises:
            ServiceError: it is not.
        """
        try:
            await self._client.get_model()
        except NotRunningError as error:
            remedy = "start it, or correct `socket` in the config of Ray Serve"
            raise ServiceError(f"{error.message}: {remedy}") from None
        except ReportedError as error:
            raise ServiceError(str(error)) from None

    async def wait(self, wait_s: float) -> None:
        """Return when it is there.

        Raises:
            ServiceError: it is not, so long.
        """
        end_s, told = time.monotonic() + wait_s, ""
        while True:
            try:
                return await self.check()
            except ServiceError as error:
                if time.monotonic() >= end_s:
                    raise
                if str(error) != told:
                    told = str(error)
                    log.warning("Waiting %g s for the service: %s.", wait_s, told)
            await asyncio.sleep(POLL_S)

    async def takes_turns(self) -> bool:
        """Whether it does; False if it drains, or is not there."""
        request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
        try:
            answer = await self._health.Check(request, timeout=CHECK_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def report(self) -> ServerReport:
        """Say how it is; one that is not there takes no turns."""
        takes_turns = await self.takes_turns()
        try:
            model = await self._client.get_model()
        except ReportedError:
            return ServerReport(takes_turns=False, sessions=self.sessions.as_dict())
        self._times.note(time.monotonic(), model.running_turns, ended_turns(model))
        return report_of(model, self._times, self.sessions.as_dict(), takes_turns=takes_turns)

    async def note_session(self, name: str, own_name: str) -> None:
        """Note a session that a request has used.

        Args:
            name: as routers know it.
            own_name: as the service does.
        """
        try:
            session = await self._client.get_session(own_name)
        except ReportedError:  # another tenant's, or gone: that it was here is known all the same
            self.sessions.used(name, 0)
            return
        self.sessions.used(name, session.context_tokens)

    @asynccontextmanager
    async def request(self, asked: Asked) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to the HTTP APIs; the answer is there when its headers are.

        Raises:
            aiohttp.ClientError: the service did not answer, or broke off.
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
    # A connection that waits for its next request may just be being closed, and what was sent on it
    # could not be sent again: each request has its own.
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
