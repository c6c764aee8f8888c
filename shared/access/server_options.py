"""Options of every gRPC server of ours: what a connection may cost."""

from typing import Any

HANDSHAKE_MS = 10_000  # from connecting to the end of the handshake: half-open connections go
KEEPALIVE_MS = 60_000  # a TCP client that does not answer a ping goes
KEEPALIVE_ANSWER_MS = 20_000
IDLE_MS = 120_000  # a TCP connection without a call; clients connect again by themselves
MAX_METADATA_BYTES = 16 << 10


def server_options(
    max_message_bytes: int, max_connections: int, *, is_tcp: bool
) -> list[tuple[str, Any]]:
    """Options for grpc.aio.server.

    Args:
        max_message_bytes: either way.
        max_connections: of one address; more are closed at once.
        is_tcp: the address is a port.
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
