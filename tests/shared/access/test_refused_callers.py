"""Refused callers are named if known, and counted; so are failed TLS handshakes."""

import asyncio

import grpc
import pytest
from structlog.testing import capture_logs

from shared.access.channels import ClientCredentials
from shared.access.credentials import CALL_S, TlsConnections
from shared.access.settings import ClientSettings
from shared.access.tokens import token_digest
from shared.serving.rpc_observer import RpcMetrics
from tests.kvd_polling import eventually
from tests.shared.access.guarded_server import guarded_server
from tests.tls_files import Authority

CLIENTS = {
    "web": ClientSettings(token_sha256=(token_digest("kvt_web"),), tenants=("*",)),
    "probe": ClientSettings(
        certificate_names=("probe.example",), tenants=("*",), roles=("reader",)
    ),
}


class Clock:
    """A clock that tests set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_known_client_is_named():
    """One without the role, by its name in the settings; a stranger's token is never logged."""
    metrics = RpcMetrics()
    async with guarded_server(CLIENTS, metrics=metrics) as server:
        with capture_logs() as lines:
            for token in ("kvt_web", "kvt_nobody"):
                with pytest.raises(grpc.aio.AioRpcError):
                    await server.who(ClientCredentials(token))
    assert metrics.refused.counts == {("role_denied", "web"): 1, ("unauthenticated", ""): 1}
    refused = next(line for line in lines if line["event"] == "access_refused")
    assert (refused["reason"], refused["client"]) == ("role_denied", "web")
    assert "kvt_" not in str(lines)


async def test_an_unknown_certificate_is_named(tmp_path):
    """Its names are in the log; labels have none of them, as an authority may sign many."""
    authority, metrics = Authority(tmp_path), RpcMetrics()
    tls = authority.server(wants_certificates=True)
    async with guarded_server(CLIENTS, tls=tls, metrics=metrics) as server:
        with capture_logs() as lines, pytest.raises(grpc.aio.AioRpcError):
            await server.who(authority.client("stranger.example"))
        assert await server.who(authority.client("probe.example")) == "probe"
    (refused,) = [line for line in lines if line["event"] == "access_refused"]
    assert "stranger.example" in refused["certificate"]
    assert metrics.refused.counts == {("unauthenticated", ""): 1}


async def test_failed_handshakes_are_counted(tmp_path):
    """Without a certificate, and without TLS; connections with calls do not count."""
    authority, clock = Authority(tmp_path), Clock()
    connections = TlsConnections(clock)
    tls = authority.server(wants_certificates=True)
    metrics = RpcMetrics(tls=connections)

    async def num_begun() -> int:
        return len(connections._begun)

    async with guarded_server(CLIENTS, tls=tls, metrics=metrics) as server:
        assert await server.who(authority.client("probe.example")) == "probe"
        assert await num_begun() == 0
        _, port = server.address.split(":")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await eventually(num_begun, 1)
        with pytest.raises(grpc.aio.AioRpcError):  # it has no certificate
            await server.who(authority.client())
        assert await num_begun() >= 2
        num_failed = await num_begun()
        assert connections.count_unused() == 0
        clock.now_s += CALL_S
        with capture_logs() as lines:
            assert connections.count_unused() == num_failed
        assert [line["event"] for line in lines] == ["tls_connection_unused"]
        writer.close()
        del reader


def test_a_connection_is_used_after_its_first_call():
    """More calls change nothing."""
    clock = Clock()
    connections = TlsConnections(clock)
    for _ in range(3):
        connections.on_begin()
    for peer in ("ipv4:1.2.3.4:5", "ipv4:1.2.3.4:5", "ipv4:1.2.3.4:6"):
        connections.on_call(peer)
    clock.now_s += CALL_S
    assert connections.count_unused() == 1
    assert connections.count_unused() == 1
