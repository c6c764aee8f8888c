"""Cross-origin requests: which web pages may call the API from a browser (CORS).

A browser first sends a preflight, without credentials, to ask whether a page may send its request.
It shows the page an answer only if the answer names the page's origin. The service does both for
the origins in `openai.cors_origins`; requests of other origins are answered as if they had none.
Credentials that a browser adds by itself (cookies, certificates) are never allowed: a page sends
its own token.

Without an account, only callers from this machine are served, and no pages of other sites
(`check_local`). Every process of this machine reaches a loopback address, a browser among them,
and a page of any site may have written a browser's request. Two headers reveal such a page:

    Host     names the page's own site, if that site had its name resolve to this machine (DNS
             rebinding): the page could read the answers
    Origin   names the page's site in requests across sites: the page could not read the answers,
             but its turns would be computed

*Source:* the Fetch standard, "CORS protocol"; RFC 9110 (Host), RFC 6454 (Origin), as browsers send
them.
"""

import re
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.requests import REQUEST_IDS, SESSION
from inference_svc.openai_settings import ANY_ORIGIN
from shared.access.addresses import is_loopback_host
from shared.types.errors import DeniedError

MAX_AGE_S = 7200  # seconds that a browser may cache a preflight's answer: Chromium's maximum
MAX_REQUESTED = 2048  # characters of the header names that a preflight asks for
EXPOSED = ", ".join((*REQUEST_IDS, SESSION, "Retry-After", "retry-after-ms", "x-should-retry"))
_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}"
_NAMES = re.compile(rf"{_NAME}(?:[ \t]{{0,8}},[ \t]{{0,8}}{_NAME})*")
MOST_SHOWN = 80  # characters of a header that an error message repeats
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d{1,5})?", re.IGNORECASE)
_REMEDY = (
    "call 127.0.0.1 or localhost on this machine; to let others call, configure "
    "clients in [clients.NAME]"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotLocalError(DeniedError):
    """A caller without an account is not on this machine, or is a page of another site."""

    reason = "not_local"


def is_allowed(origin: str, origins: Sequence[str]) -> bool:
    """Return whether the settings allow an origin, by its name or by "*"."""
    return origin in origins or ANY_ORIGIN in origins


def preflight_middleware(origins: Sequence[str]) -> Middleware:
    """Return a middleware that answers preflights of pages of these origins.

    It comes before authentication: browsers send preflights without credentials.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        found = request.match_info.http_exception
        is_asked = (
            request.method == hdrs.METH_OPTIONS
            and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
            and isinstance(found, web.HTTPMethodNotAllowed)
        )
        if not is_asked or not _shown_origin(request, origins):
            return await handler(request)
        assert isinstance(found, web.HTTPMethodNotAllowed), found  # noqa: S101
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: ", ".join(sorted(found.allowed_methods)),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S),
        }
        names = requested_header_names(
            request.headers.getall(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ())
        )
        if names:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
        return web.Response(status=204, headers=headers)

    return answer


def origin_headers(
    origins: Sequence[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Return a signal handler that names, in every response, the origin that may read it.

    A signal and not a middleware, so that errors and streams have the headers, too.
    """

    async def name_origin(request: web.Request, response: web.StreamResponse) -> None:
        if origins:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        shown = _shown_origin(request, origins)
        if shown:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = shown
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED

    return name_origin


def requested_header_names(sent: Sequence[str]) -> str:
    """Return the header names that a preflight asks for, as they were written; "" for none.

    Raises:
        RequestError: they are no header names, or too many.
    """
    names = ", ".join(sent).strip()
    if names and (len(names) > MAX_REQUESTED or not _NAMES.fullmatch(names)):
        raise RequestError(
            f"the header {hdrs.ACCESS_CONTROL_REQUEST_HEADERS} is not valid",
            f"send header names, separated by commas, of up to {MAX_REQUESTED} characters in all",
        )
    return names


def _shown_origin(request: web.Request, origins: Sequence[str]) -> str:
    """Return the origin that a response names: the page's, or "*"; "" for none."""
    sent = request.headers.getall(hdrs.ORIGIN, ())
    if len(sent) != 1 or not is_allowed(sent[0], origins):
        return ""
    return ANY_ORIGIN if ANY_ORIGIN in origins else str(sent[0])


def check_local(peer: str, hosts: Sequence[str], origins: Sequence[str]) -> None:
    """Check that a request without an account comes from this machine, and from no other site.

    Args:
        peer: the address of the connection's peer; "" if it is unknown.
        hosts: the values of its header Host; there has to be exactly one.
        origins: the values of its header Origin; only browsers send it.

    Raises:
        NotLocalError: naming what is not local.
    """
    if not is_loopback_host(peer):
        raise NotLocalError(f"the connection comes from {peer[:MOST_SHOWN] or 'nowhere'}", _REMEDY)
    if len(hosts) != 1 or not _is_local_authority(hosts[0]):
        shown = ", ".join(hosts)[:MOST_SHOWN]
        raise NotLocalError(f"the host {shown!r} is not a name of this machine", _REMEDY)
    for origin in origins:
        scheme, _, authority = origin.partition("://")
        if scheme not in ("http", "https") or not _is_local_authority(authority):
            raise NotLocalError(
                f"the page {origin[:MOST_SHOWN]!r} does not come from this machine", _REMEDY
            )


def _is_local_authority(text: str) -> bool:
    """Return whether a host, with or without a port, is a loopback host."""
    found = _AUTHORITY.fullmatch(text)
    return found is not None and is_loopback_host(found[1])
