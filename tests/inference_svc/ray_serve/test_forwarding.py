"""Headers and metadata between client and service."""

import pytest

from inference_svc.ray_serve.forwarding import (
    forwarded_headers,
    forwarded_metadata,
    header_of,
    response_headers,
    session_of,
)


def test_headers_are_forwarded_with_repetitions():
    headers = [
        (b"Host", b"balancer.example"),
        (b"Authorization", b"Bearer t"),
        (b"X-A", b"1"),
        (b"x-a", b"\xe9"),
        (b"Content-Length", b"12"),
    ]
    assert forwarded_headers(headers) == [
        ("Host", "balancer.example"),
        ("Authorization", "Bearer t"),
        ("X-A", "1"),
        ("x-a", "é"),
        ("Content-Length", "12"),
    ]


def test_headers_of_the_connection_are_not_forwarded():
    headers = [
        (b"Connection", b"keep-alive, X-Own"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Own", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Expect", b"100-continue"),
        (b"X-Other", b"2"),
    ]
    assert forwarded_headers(headers) == [("X-Other", "2")]


def test_headers_of_proxies_are_not_repeated():
    headers = [(b"Server", b"inference-svc"), (b"Date", b"now"), (b"X-Session-Id", b"s-1")]
    assert response_headers(headers) == [("X-Session-Id", "s-1")]


def test_metadata_are_forwarded_except_grpcs_and_rays():
    metadata = [
        ("user-agent", "grpc-python"),
        ("grpc-accept-encoding", "gzip"),
        ("application", "ca"),
        ("authorization", "Bearer t"),
        ("trace-bin", b"\x00"),
        ("session_id", "ann"),
    ]
    assert forwarded_metadata(metadata) == tuple(metadata[3:])
    assert session_of(metadata) == "ann"
    assert session_of([]) == ""


@pytest.mark.parametrize("name", ["x-session-id", "X-Session-Id", "X_SESSION_ID"])
@pytest.mark.parametrize("key", ["x-session-id", "x_session_id"])
def test_a_session_is_read_in_rays_way(name, key):
    assert header_of({"x-other": "a", name: "ann"}, key) == "ann"
    assert header_of({"x-other": "a"}, key) == ""
