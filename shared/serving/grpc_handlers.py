"""Wraps a gRPC method's handler, for interceptors that stand around every RPC."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Single: TypeAlias = Callable[[Any, Any], Awaitable[Any]]  # request (or requests), context
Streaming: TypeAlias = Callable[[Any, Any], AsyncIterator[Any]]


def behaviour_of(handler: Handler) -> Any:
    """The servicer's method: of whichever of the four kinds it is."""
    return (
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )


def with_behaviour(handler: Handler, behaviour: Single | Streaming) -> Handler:
    """The same handler with another method of the same kind."""
    return made_handler(
        behaviour,
        handler.request_deserializer,
        handler.response_serializer,
        takes_stream=handler.request_streaming,
        gives_stream=handler.response_streaming,
    )


def made_handler(
    behaviour: Single | Streaming,
    deserializer: Callable[[bytes], Any] | None,
    serializer: Callable[[Any], bytes] | None,
    *,
    takes_stream: bool,
    gives_stream: bool,
) -> Handler:
    """A handler of one of the four kinds."""
    maker: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[takes_stream, gives_stream]
    made: Handler = maker(behaviour, deserializer, serializer)
    return made
