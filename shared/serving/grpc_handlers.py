"""Parts of every gRPC server: options that bound connections, and wrapped handlers.

An interceptor around every RPC takes the method of a handler (grpc calls it the behaviour) and
makes a handler of the same kind around it.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

HANDSHAKE_MS = 10_000  # from connecting to the end of the handshake; closes half-open connections
KEEPALIVE_MS = 60_000  # between pings to a TCP client
KEEPALIVE_ANSWER_MS = 20_000  # a client that does not answer a ping in this time is disconnected
IDLE_MS = 120_000  # a TCP connection without a call is closed; clients reconnect by themselves
MAX_METADATA_BYTES = 16 << 10


def server_options(
    max_message_bytes: int, max_connections: int, *, is_tcp: bool
) -> list[tuple[str, Any]]:
    """Return options for grpc.aio.server.

    Args:
        max_message_bytes: most bytes of a message, in either direction.
        max_connections: most connections at one address; more are closed at once.
        is_tcp: whether the address is a TCP port.
    """
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second, half-served server
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ]
    if is_tcp:
        options += [
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_connection_idle_ms", IDLE_MS),
        ]
    return options


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Single: TypeAlias = Callable[[Any, Any], Awaitable[Any]]  # request (or requests), context
Streaming: TypeAlias = Callable[[Any, Any], AsyncIterator[Any]]


def behaviour_of(handler: Handler) -> Any:
    """Return the servicer's method of a handler, of whichever of the four kinds."""
    return (
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )


def with_behaviour(handler: Handler, behaviour: Single | Streaming) -> Handler:
    """Return a handler of the same kind with another method."""
    return make_handler(
        behaviour,
        handler.request_deserializer,
        handler.response_serializer,
        takes_stream=handler.request_streaming,
        gives_stream=handler.response_streaming,
    )


def make_handler(
    behaviour: Single | Streaming,
    deserializer: Callable[[bytes], Any] | None,
    serializer: Callable[[Any], bytes] | None,
    *,
    takes_stream: bool,
    gives_stream: bool,
) -> Handler:
    """Return a handler of one of the four kinds: single or streaming, either way."""
    maker: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[takes_stream, gives_stream]
    handler: Handler = maker(behaviour, deserializer, serializer)
    return handler


class CallInterceptor(grpc.aio.ServerInterceptor, ABC):  # type: ignore[type-arg]
    """Wraps every call of a method that the server has. grpc itself refuses any other method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's handler. Called by grpc for each RPC."""
        handler: Any = await continuation(handler_call_details)  # may be None despite its type
        return None if handler is None else self.wrap(handler, handler_call_details.method)  # type: ignore[return-value]

    @abstractmethod
    def wrap(self, handler: Any, method: str) -> Handler:
        """Return the handler that is called in place of `handler`.

        Args:
            handler: the handler of the servicer's method, or of the next interceptor.
            method: the method's full name. All else about a call comes with its context, so that a
                wrapped handler may answer any number of calls.
        """
