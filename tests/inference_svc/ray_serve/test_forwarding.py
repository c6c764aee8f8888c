"""What goes on to the service, and what comes back."""

import pytest

from inference_svc.ray_serve.forwarding import (
    forwarded_headers,
    forwarded_metadata,
    header_of,
    response_headers,
    session_of,
)


def test_headers_go_on_each_as_often_as_it_is_there():
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


def test_headers_of_the_connection_stay():
    headers = [
        (b"Connection", b"keep-alive, X-Own"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Own", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Expect", b"100-continue"),
        (b"X-Other", b"2"),
    ]
    assert forwarded_headers(headers) == [("X-Other", "2")]


def test_what_proxies_say_themselves_is_not_said_twice():
    headers = [(b"Server", b"inference-svc"), (b"Date", b"now"), (b"X-Session-Id", b"s-1")]
    assert response_headers(headers) == [("X-Session-Id", "s-1")]


def test_metadata_go_on_but_for_grpcs_and_rays():
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
def test_a_session_is_read_as_ray_reads_it(name, key):
    assert header_of({"x-other": "a", name: "ann"}, key) == "ann"
    assert header_of({"x-other": "a"}, key) == ""
