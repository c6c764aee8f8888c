"""Who sent an HTTP request."""

import ssl
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from shared.access.clients import Clients, authenticate
from shared.access.identity import Identity

_OF_SUBJECT = "commonName"


def identity_of(request: web.Request, clients: Clients, own: Identity | None = None) -> Identity:
    """Find out who sent a request, before its body is read.

    Args:
        request: of an aiohttp server.
        clients: in force (ClientBook.current).
        own: of whoever may open the Unix socket that it came by; None for TCP.

    Raises:
        UnauthenticatedError: nobody knows.
    """
    authorization = request.headers.get("Authorization", "")
    return authenticate(clients, authorization, list(_certificate_names(request)), own)


def _certificate_names(request: web.Request) -> Iterator[str]:
    """Names of the client's certificate, which TLS has checked."""
    found = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    if not isinstance(found, ssl.SSLObject | ssl.SSLSocket):
        return
    certificate: Any = found.getpeercert() or {}
    for _kind, name in certificate.get("subjectAltName", ()):
        yield str(name)
    for part in certificate.get("subject", ()):
        yield from (str(name) for kind, name in part if kind == _OF_SUBJECT)
