"""A replica in front of a real service, called as Ray calls it."""

import hashlib

import grpc
import pytest

from inference_svc.ray_serve.local_service import SERVICE, ServiceError
from inference_svc.ray_serve.reports import report_from
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.routing.hash_ring import name_hash
from shared.serving.grpc_status import DETAILS_KEY
from tests.examples.balanced_pairs import free_ports
from tests.inference_processes import InferenceProcess

pytest.importorskip("starlette", reason="needs the extra `ray`: make test-ray")

from starlette.requests import Request

from inference_svc.ray_serve.session_server import NoMessage, SessionServer

TOKEN = "token-of-acme-0123456789abcdef"  # noqa: S105  # test data


class Context:
    """Ray's context of a gRPC call."""

    def __init__(self, *metadata):
        self._metadata = metadata
        self.code = self.details = self.trailing = None

    def invocation_metadata(self):
        return list(self._metadata)

    def set_code(self, code):
        self.code = code

    def set_details(self, details):
        self.details = details

    def set_trailing_metadata(self, metadata):
        self.trailing = metadata


@pytest.fixture
async def process(tiny_model, tmp_path):
    flags = ["--openai", f"unix:{tmp_path}/openai.sock"]
    async with InferenceProcess(tiny_model, tmp_path, flags=flags) as process:
        yield process


@pytest.fixture
async def replica(process, tmp_path):
    made = SessionServer([{"socket": process.address, "http": f"unix:{tmp_path}/openai.sock"}])
    yield made
    await made.close()


def request_of(method, path, query=b"", headers=(), body=b"", root_path=""):
    """Make a request as Ray's replica does."""

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": root_path,
        "query_string": query,
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
    }
    return Request(scope, receive)


async def body_of(response):
    """Return a response's body, streamed or not."""
    if hasattr(response, "body_iterator"):
        return b"".join([part async for part in response.body_iterator])
    return response.body


def test_every_rpc_is_forwarded():
    """A stream where the service has one; both get Ray's context."""
    for method in SERVICE.methods:
        found = getattr(SessionServer, method.name)
        assert "grpc_context" in found.__code__.co_varnames
        assert bool(found.__code__.co_flags & 0x200) == method.server_streaming


async def test_a_turn_and_its_report(replica):
    request = pb.SubmitTurnRequest(session_id="ann", text="Once upon a time")
    request.sampling.max_tokens = 4
    request.sampling.ignore_eos = True
    context = Context(("session_id", "ann"))
    events = [event async for event in replica.SubmitTurn(request, context)]
    assert events[-1].WhichOneof("event") == "finished"
    assert context.code is None
    session = await replica.GetSession(pb.GetSessionRequest(session_id="ann"), Context())
    assert session.turns == 1
    report = report_from(await replica.record_routing_stats())
    assert report.sessions == {name_hash("ann"): session.context_tokens}
    assert report.takes_turns
    assert replica.record_replica_metadata()["server"].endswith("inference.sock")


async def test_errors_have_their_metadata(replica):
    """Of a single answer, and of a stream; only the status reaches the client otherwise."""
    context = Context()
    found = await replica.GetSession(pb.GetSessionRequest(session_id="nobody"), context)
    assert isinstance(found, NoMessage)
    assert found.SerializeToString() == b""
    assert context.code is grpc.StatusCode.NOT_FOUND
    assert DETAILS_KEY in dict(context.trailing)
    context = Context()
    (only,) = [event async for event in replica.SubmitTurn(pb.SubmitTurnRequest(), context)]
    assert isinstance(only, NoMessage)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert DETAILS_KEY in dict(context.trailing)


async def test_a_request_and_its_answer(replica):
    """The path is unchanged, except for the application's prefix."""
    response = await replica(request_of("GET", "/ca/v1/models/no%2Fbody", root_path="/ca"))
    assert response.status_code == 404
    assert b"no/body" in await body_of(response)
    asked = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}'
    headers = [(b"x-session-id", b"bob"), (b"content-type", b"application/json")]
    response = await replica(
        request_of("POST", "/v1/chat/completions", headers=headers, body=asked)
    )
    assert response.status_code == 200
    names = [name for name, _ in response.raw_headers]
    assert b"x-session-id" in names
    assert not {b"date", b"server", b"connection", b"transfer-encoding"} & set(names)
    assert b"chat.completion" in await body_of(response)
    while replica._noting:
        await next(iter(replica._noting))
    report = report_from(await replica.record_routing_stats())
    assert report.sessions[name_hash("bob")] > 0


async def test_a_service_that_ends(replica, process):
    """Later requests are to be retried; Ray is told."""
    await replica.check_health()
    await process.stop()
    with pytest.raises(RuntimeError, match="no inference service is running at"):
        await replica.check_health()
    assert not report_from(await replica.record_routing_stats()).takes_turns
    response = await replica(request_of("GET", "/v1/models"))
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    context = Context()
    await replica.GetModel(pb.GetModelRequest(), context)
    assert context.code is grpc.StatusCode.UNAVAILABLE


async def test_a_replica_without_a_service_leaves_it_to_the_next(tmp_path):
    services = [{"socket": f"unix:{tmp_path}/none.sock"}]
    replicas = [SessionServer(services, wait_s=0.0)]
    try:
        with pytest.raises(ServiceError, match="all 1 services"):
            SessionServer(services)
        with pytest.raises(ServiceError, match="no inference service is running at"):
            await replicas[0].check_health()
        replicas.append(SessionServer(services))
    finally:
        for replica in replicas:
            await replica.close()


async def test_clients_with_tokens(tiny_model, tmp_path):
    """At ports, the service needs each caller's account; its socket needs none."""
    grpc_port, http_port = free_ports(2)
    settings = tmp_path / "inference-svc.toml"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    settings.write_text(
        f"""
        [openai]
        listen = "127.0.0.1:{http_port}"
        [clients.acme]
        token_sha256 = ["{digest}"]
        tenants = ["acme"]
        """
    )
    flags = ["--config", str(settings), "--listen", f"127.0.0.1:{grpc_port}"]
    async with InferenceProcess(tiny_model, tmp_path, flags=flags) as process:
        replica = SessionServer(
            [
                {
                    "socket": process.address,
                    "grpc": f"127.0.0.1:{grpc_port}",
                    "http": f"127.0.0.1:{http_port}",
                }
            ]
        )
        try:
            await replica.check_health()
            assert report_from(await replica.record_routing_stats()).takes_turns
            for metadata, code in (
                ((), grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", f"Bearer {TOKEN}"),), None),
            ):
                context = Context(*metadata)
                await replica.GetModel(pb.GetModelRequest(), context)
                assert context.code is code
            token = (b"authorization", f"Bearer {TOKEN}".encode())
            for headers, status in (([], 401), ([token], 200)):
                response = await replica(request_of("GET", "/v1/models", headers=headers))
                assert response.status_code == status
                await body_of(response)
        finally:
            await replica.close()


async def test_a_service_without_http(process):
    replica = SessionServer([{"socket": process.address}])
    try:
        response = await replica(request_of("GET", "/v1/models"))
        assert response.status_code == 501
        assert b"`http` is not set" in response.body
    finally:
        await replica.close()
