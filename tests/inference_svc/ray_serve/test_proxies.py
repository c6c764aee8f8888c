"""Our code in Ray's proxies: with Ray's own gRPC server, without a cluster."""

import grpc
import pytest

from shared.pb.inference.v1 import inference_pb2 as pb
from shared.pb.inference.v1 import inference_pb2_grpc

pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray")

from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.http_util import validate_http_proxy_callback_return
from ray.serve._private.proxy_request_response import gRPCStreamingType

from inference_svc.ray_serve.proxies import SessionHeaderMiddleware, add_inference, http_middlewares

DETAILS = "details of the service"
TOKEN = pb.TurnEvent(accepted=pb.Accepted(turn=3))


def answering(num_events):
    """Return a handler factory as a proxy has one: a stream of some events, which then fails."""

    def make(service_method, streaming_type):
        async def stream(_request, context):
            for _ in range(num_events):
                yield TOKEN.SerializeToString()
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(DETAILS)
            context.set_trailing_metadata([("reason-bin", b"\x01")])
            yield b""

        async def single(_request, context):
            if service_method.endswith("GetModel"):
                return pb.Model(name="tiny").SerializeToString()
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return b""

        return stream if streaming_type is gRPCStreamingType.UNARY_STREAM else single

    return make


async def answers_of(num_events):
    """Return what a client gets from a proxy: events and the error, a model, another error."""
    server = gRPCGenericServer(answering(num_events))
    add_inference(inference_pb2_grpc.InferenceServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            turn = stub.SubmitTurn(pb.SubmitTurnRequest())
            events = [await turn.read() for _ in range(num_events)]
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await turn.read()
            model = await stub.GetModel(pb.GetModelRequest())
            with pytest.raises(grpc.aio.AioRpcError) as missed:
                await stub.GetSession(pb.GetSessionRequest())
            return events, failed.value, model, missed.value
    finally:
        await server.stop(None)


@pytest.mark.parametrize("num_events", [0, 2])
async def test_errors_have_the_services_words(num_events):
    """Before the first event and later: code, text and metadata, and no invented event."""
    events, failed, model, missed = await answers_of(num_events)
    assert events == [TOKEN] * num_events
    assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.details() == DETAILS
    assert ("reason-bin", b"\x01") in tuple(failed.trailing_metadata())
    assert model.name == "tiny"
    assert missed.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ([(b"x-claude-code-session-id", b"c")], "c"),
        ([(b"session-id", b"codex"), (b"x-dynamo-session-id", b"d")], "d"),
        ([(b"x-session-id", b"own"), (b"x-claude-code-session-id", b"c")], "own"),
        ([(b"accept", b"*/*")], None),
    ],
)
async def test_sessions_that_agents_name(headers, named):
    """Ray finds one name, in the header that it reads; no header is removed."""
    (middleware,) = validate_http_proxy_callback_return(http_middlewares())
    assert middleware.cls is SessionHeaderMiddleware
    seen = []

    async def app(scope, _receive, _send):
        seen.append(scope["headers"])

    await SessionHeaderMiddleware(app)({"type": "http", "headers": headers}, None, None)
    (found,) = seen
    assert found[: len(headers)] == headers
    names = [value.decode() for name, value in found if name == b"x-session-id"]
    assert names == ([named] if named else [])


async def test_other_messages_pass():
    seen = []

    async def app(scope, _receive, _send):
        seen.append(scope)

    await SessionHeaderMiddleware(app)({"type": "lifespan"}, None, None)
    assert seen == [{"type": "lifespan"}]
