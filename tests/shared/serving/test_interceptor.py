"""The caller of an RPC: real servers and channels, tokens, certificates and sockets."""

import asyncio
from datetime import UTC, datetime, timedelta

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.access.channels import ClientCredentials, channel_of
from shared.access.clients import Clients
from shared.access.identity import socket_identity
from shared.access.settings import ClientSettings
from shared.access.tokens import token_digest
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.serving.grpc_status import error_from_rpc
from shared.types.errors import ReportedError
from tests.shared.access.guarded_server import guarded_server
from tests.tls_files import Authority

TOKEN = ClientCredentials("kvt_right")
WRONG = ClientCredentials("kvt_wrong")


def client(token="kvt_right", role="reader", **values):  # noqa: S107
    """Return a client's settings."""
    digests = (token_digest(token),) if token else ()
    return ClientSettings(token_sha256=digests, tenants=("*",), roles=(role,), **values)


CLIENTS = {"web": client(), "probe": client(token="", certificate_names=("probe.example",))}


async def refusal(call) -> ReportedError:
    """Return the error of a refused call."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_from_rpc(raised.value)


async def test_a_token_identifies_the_caller():
    """The right one is accepted; a missing, wrong or removed one is not."""
    async with guarded_server(CLIENTS) as server:
        assert await server.who(TOKEN) == "web"
        for credentials in (None, WRONG):
            error = await refusal(server.who(credentials))
            assert (error.grpc_code, error.reason) == ("UNAUTHENTICATED", "unauthenticated")
            assert error.remedy
        server.book.use(Clients({"web": client("kvt_other")}))
        assert (await refusal(server.who(TOKEN))).reason == "unauthenticated"


async def test_a_role_is_required():
    """A known client with another role gets its own refusal."""
    async with guarded_server({"web": client(role="client")}) as server:
        error = await refusal(server.who(TOKEN))
    assert (error.grpc_code, error.reason) == ("PERMISSION_DENIED", "role_denied")


async def test_a_socket_identifies_its_users(short_dir):
    """Unless a token does; a wrong one is refused there, too."""
    own = socket_identity("reader.sock", ("*",), ("reader",))
    async with guarded_server(CLIENTS, socket=(short_dir / "s", own)) as server:
        assert await server.who() == "reader.sock"
        assert await server.who(TOKEN) == "web"
        assert (await refusal(server.who(WRONG))).reason == "unauthenticated"


@pytest.mark.parametrize("leaves_reading", [False, True])
async def test_streams_and_single_calls_have_a_caller(leaves_reading):
    """Whether grpc or the guard reads the request."""
    async with guarded_server(CLIENTS, leaves_reading=leaves_reading) as server:
        assert await server.who(TOKEN) == "web"
        watching = server.stub(TOKEN).WatchEvents(kvd_pb2.WatchEventsRequest())
        assert (await watching.read()).name == "web"
        watching.cancel()
        error = await refusal(server.stub(WRONG).WatchEvents(kvd_pb2.WatchEventsRequest()).read())
        assert error.reason == "unauthenticated"
        assert server.reader.held == ["web"]


async def test_only_health_is_open():
    """Every client may ask for it; watching it needs authentication."""
    async with guarded_server(CLIENTS) as server:
        asked = health_pb2.HealthCheckRequest()
        stub = health_pb2_grpc.HealthStub(server.channel())
        assert (await stub.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        assert (await refusal(stub.Watch(asked).read())).reason == "unauthenticated"
        known = health_pb2_grpc.HealthStub(server.channel(TOKEN))
        assert (await known.Watch(asked).read()).status


async def test_the_number_of_a_clients_streams_is_limited():
    """One too many is refused, others are not affected, and an ended one makes room."""
    clients = {"web": client(max_streams=2), "other": client("kvt_other")}
    async with guarded_server(clients) as server:
        stub, request = server.stub(TOKEN), kvd_pb2.WatchEventsRequest()
        watching = [stub.WatchEvents(request) for _ in range(2)]
        for one in watching:
            await one.read()
        error = await refusal(stub.WatchEvents(request).read())
        assert (error.reason, error.retryable) == ("too_many_streams", True)
        assert await server.who(TOKEN) == "web"  # no stream
        others = server.stub(ClientCredentials("kvt_other")).WatchEvents(request)
        assert (await others.read()).name == "other"
        watching[0].cancel()
        async with asyncio.timeout(30):
            while not await _has_room(stub):  # noqa: ASYNC110  # a server's count has no event
                await asyncio.sleep(0.01)


async def _has_room(stub) -> bool:
    """Return whether one more stream is accepted; end it again."""
    one = stub.WatchEvents(kvd_pb2.WatchEventsRequest())
    try:
        await one.read()
    except grpc.aio.AioRpcError:
        return False
    one.cancel()
    return True


async def test_a_missing_request_is_not_waited_for():
    """An open call without a message is refused; a stranger's at once."""
    async with guarded_server(CLIENTS, read_s=0.2) as server:

        def silent(credentials):
            call = server.channel(credentials).stream_unary(
                "/kvd.v1.Reader/GetStats",
                kvd_pb2.GetStatsRequest.SerializeToString,
                kvd_pb2.GetStatsResponse.FromString,
            )
            return call(_never(), timeout=30)

        assert (await refusal(silent(TOKEN))).reason == "request_late"
        assert (await refusal(silent(None))).reason == "unauthenticated"


async def _never():
    await asyncio.get_running_loop().create_future()
    yield b""


async def test_messages_of_strangers_are_not_read():
    """However large: the call ends before its first message has arrived."""
    async with guarded_server(CLIENTS) as server:
        sent = []

        def large():
            for _ in range(1000):
                sent.append(1)
                yield bytes(1 << 20)

        # Not with grpc.aio: its failing write at the end of the call replaces the server's status
        # with INTERNAL (grpc/grpc#36066).
        with channel_of(server.address, None, ()) as channel:
            call = channel.stream_unary("/kvd.v1.Reader/GetStats", None, None)
            with pytest.raises(grpc.RpcError) as raised:
                await asyncio.to_thread(call, large(), timeout=60)
        assert error_from_rpc(raised.value).reason == "unauthenticated"
        assert len(sent) < 100


async def test_valid_certificates_are_accepted(tmp_path):
    """With a known name, signed by the right authority, not expired: all of it."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    tls = authority.server(wants_certificates=True)
    trusting_us = authority.path.read_bytes()
    async with guarded_server(CLIENTS, tls=tls) as server:
        assert await server.who(authority.client("probe.example")) == "probe"
        unknown = await refusal(server.who(authority.client("stranger.example")))
        assert unknown.reason == "unauthenticated"
        yesterday = datetime.now(UTC) - timedelta(days=1)
        expired = authority.client("probe.example", until=yesterday)
        forged = other.client("probe.example")
        forged = ClientCredentials("", trusting_us, forged.certificate, forged.key)
        nothing = authority.client()
        for credentials in (expired, forged, nothing):
            assert (await refusal(server.who(credentials))).grpc_code == "UNAVAILABLE"
        stranger = other.client()  # does not trust the server's authority
        assert "CERTIFICATE_VERIFY_FAILED" in str(await refusal(server.who(stranger)))


async def test_a_token_over_tls(tmp_path):
    """A client without a certificate sends a token, over a verified connection."""
    authority = Authority(tmp_path)
    (tmp_path / "token").write_text("kvt_right")
    tls = authority.server(wants_certificates=False)
    async with guarded_server(CLIENTS, tls=tls) as server:
        assert await server.who(authority.client(token_file=tmp_path / "token")) == "web"
        assert (await refusal(server.who(authority.client()))).reason == "unauthenticated"
        async with grpc.aio.insecure_channel(server.address) as plain:
            stats = kvd_pb2_grpc.ReaderStub(plain).GetStats(kvd_pb2.GetStatsRequest(), timeout=10)
            assert (await refusal(stats)).grpc_code == "UNAVAILABLE"


async def test_refusals_do_not_flood_the_log():
    """However many strangers come, one line a second is logged, with the number of others."""
    with structlog.testing.capture_logs() as lines:
        async with guarded_server(CLIENTS) as server:
            stub = server.stub(WRONG)
            for _ in range(50):
                await refusal(stub.GetStats(kvd_pb2.GetStatsRequest(), timeout=30))
    assert 0 < sum(line["event"] == "access_refused" for line in lines) < 50
    assert "kvt_" not in str(lines)
