"""Handlers wrapped by interceptors, and the limits of every server's connections."""

import grpc
import pytest

from shared.serving.grpc_handlers import (
    IDLE_MS,
    MAX_METADATA_BYTES,
    CallInterceptor,
    behaviour_of,
    make_handler,
    server_options,
    with_behaviour,
)

KINDS = [
    (grpc.unary_unary_rpc_method_handler, False, False),
    (grpc.unary_stream_rpc_method_handler, False, True),
    (grpc.stream_unary_rpc_method_handler, True, False),
    (grpc.stream_stream_rpc_method_handler, True, True),
]


class Details:
    """Details of a call; attributes that the interceptor under test does not use are missing."""

    method = "/kvd.v1.Engine/PrepareLoad"


class Noting(CallInterceptor):
    """Replaces the method, and records for which calls."""

    def __init__(self, answer):
        self.answer, self.methods = answer, []

    def wrap(self, handler, method):
        self.methods.append(method)
        return with_behaviour(handler, self.answer)


def first(request, _context):
    return request


def second(_request, _context):
    return b"second"


@pytest.mark.parametrize(("make", "takes_stream", "gives_stream"), KINDS)
def test_a_handler_with_another_method_keeps_its_kind(make, takes_stream, gives_stream):
    """Its serializers stay, so that the wire format does."""
    handler = make(first, str, bytes)
    assert behaviour_of(handler) is first
    other = with_behaviour(handler, second)
    assert behaviour_of(other) is second
    assert (other.request_streaming, other.response_streaming) == (takes_stream, gives_stream)
    assert (other.request_deserializer, other.response_serializer) == (str, bytes)
    made = make_handler(first, None, None, takes_stream=takes_stream, gives_stream=gives_stream)
    assert (made.request_streaming, made.response_streaming) == (takes_stream, gives_stream)


async def test_an_interceptor_wraps_existing_methods_only():
    """An unknown method is refused by grpc, whatever the interceptor does."""
    interceptor = Noting(second)
    handler = grpc.unary_unary_rpc_method_handler(first)

    async def known(_details):
        return handler

    async def unknown(_details):
        return None

    wrapped = await interceptor.intercept_service(known, Details())
    assert behaviour_of(wrapped) is second
    assert await interceptor.intercept_service(unknown, Details()) is None
    assert interceptor.methods == [Details.method]


def test_connections_are_limited_everywhere_and_watched_over_tcp():
    """Clients of Unix sockets are not asked whether they live."""
    local = dict(server_options(1 << 20, 7, is_tcp=False))
    remote = dict(server_options(1 << 20, 7, is_tcp=True))
    assert local["grpc.max_allowed_incoming_connections"] == 7
    assert local["grpc.absolute_max_metadata_size"] == MAX_METADATA_BYTES
    assert local["grpc.so_reuseport"] == 0
    assert local["grpc.max_send_message_length"] == local["grpc.max_receive_message_length"]
    assert local.items() < remote.items()
    assert remote["grpc.max_connection_idle_ms"] == IDLE_MS
    assert "grpc.max_connection_idle_ms" not in local
