"""What of a call goes on to the service, and what of its answer to the client. Pure.

All but what concerns the one connection. `Host` goes on: a service that takes callers of its own
machine without an account refuses those that were sent to another name.
"""

from collections.abc import Iterable, Mapping

from inference_svc.client import SESSION_METADATA

Headers = Iterable[tuple[bytes, bytes]]

_OF_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"),
        *("proxy-connection", "proxy-authenticate", "proxy-authorization"),
    }
)
# Ray's proxies say these of an answer themselves; the service's id is in Request-Id, too.
_OF_PROXY = frozenset({"date", "server", "x-request-id"})
_OF_RAY = frozenset({"application", "multiplexed_model_id", "request_id"})


def passed_headers(headers: Headers) -> list[tuple[str, str]]:
    """Return the headers that go on, in their order, each as often as it is there."""
    found = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    named = {
        one.strip().lower()
        for name, value in found
        if name.lower() == "connection"
        for one in value.split(",")
    }
    left_out = _OF_CONNECTION | named
    return [(name, value) for name, value in found if name.lower() not in left_out]


def answered_headers(headers: Headers) -> list[tuple[str, str]]:
    """Return the headers of an answer that go back."""
    passed = passed_headers(headers)
    return [(name, value) for name, value in passed if name.lower() not in _OF_PROXY]


def passed_metadata(
    metadata: Iterable[tuple[str, str | bytes]],
) -> tuple[tuple[str, str | bytes], ...]:
    """Return a call's metadata that goes on: neither what gRPC itself sends, nor what Ray reads."""
    return tuple(
        (key, value)
        for key, value in metadata
        if key not in _OF_RAY and key != "user-agent" and not key.startswith("grpc-")
    )


def session_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the session that routers have read in a call's metadata; "" if there is none."""
    return next((str(value) for key, value in metadata if key == SESSION_METADATA), "")


def header_of(headers: Mapping[str, str], key: str) -> str:
    """Return the session that routers have read in a request's headers; "" if there is none.

    Args:
        headers: of the request.
        key: name of the header, of which Ray takes "-" and "_" for the same.
    """
    wanted = key.lower().replace("_", "-")
    return next(
        (value for name, value in headers.items() if name.lower().replace("_", "-") == wanted), ""
    )
