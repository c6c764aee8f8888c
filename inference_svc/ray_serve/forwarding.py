"""Headers and metadata: which are forwarded to the service, and which back to the client. Pure.

All are forwarded except those that concern one connection. `Host` is forwarded, too: a service
that serves local callers without an account refuses requests that were sent to another host name.
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
# Ray's proxies set these themselves; the service's request id is in Request-Id, too.
_OF_PROXY = frozenset({"date", "server", "x-request-id"})
_OF_RAY = frozenset({"application", "multiplexed_model_id", "request_id"})


def forwarded_headers(headers: Headers) -> list[tuple[str, str]]:
    """Return the headers to forward, in their order, repeated ones included."""
    found = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    named = {
        name_listed.strip().lower()
        for name, value in found
        if name.lower() == "connection"
        for name_listed in value.split(",")
    }
    left_out = _OF_CONNECTION | named
    return [(name, value) for name, value in found if name.lower() not in left_out]


def response_headers(headers: Headers) -> list[tuple[str, str]]:
    """Return the headers of an answer to send back to the client."""
    passed = forwarded_headers(headers)
    return [(name, value) for name, value in passed if name.lower() not in _OF_PROXY]


def forwarded_metadata(
    metadata: Iterable[tuple[str, str | bytes]],
) -> tuple[tuple[str, str | bytes], ...]:
    """Return a call's metadata to forward, without gRPC's own and without Ray's."""
    return tuple(
        (key, value)
        for key, value in metadata
        if key not in _OF_RAY and key != "user-agent" and not key.startswith("grpc-")
    )


def session_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the session in a call's metadata, by which it was routed; "" if there is none."""
    return next((str(value) for key, value in metadata if key == SESSION_METADATA), "")


def header_of(headers: Mapping[str, str], key: str) -> str:
    """Return the session in a request's headers, by which it was routed; "" if there is none.

    Args:
        headers: the request's headers.
        key: name of the header; as in Ray, "-" and "_" are the same.
    """
    name_wanted = key.lower().replace("_", "-")
    return next(
        (value for name, value in headers.items() if name.lower().replace("_", "-") == name_wanted),
        "",
    )
