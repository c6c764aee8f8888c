"""Pages of other sites that may call the API from a browser: those of `openai.cors_origins`.

A browser asks first (a preflight, which has no account) whether a page may send what it wants to,
and shows the page an answer only if that names the page's origin. Both are done for the origins
that the settings name; to others everything is answered as if nobody had asked. Credentials that a
browser would add by itself (cookies, certificates) are never allowed: a page sends its own token.

Without an account come only callers from this machine, and no pages from elsewhere (`check_local`).
A loopback address is reached by every process of this machine, a browser among them; and what a
browser sends, a page of any site may have written. Two things give such a page away:

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

MAX_AGE_S = 7200  # for which a browser keeps a preflight's answer; Chromium takes no more
MAX_ASKED = 2048  # characters of the names of headers that a page wants to send
EXPOSED = ", ".join((*REQUEST_IDS, SESSION, "Retry-After", "retry-after-ms", "x-should-retry"))
_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}"
_NAMES = re.compile(rf"{_NAME}(?:[ \t]{{0,8}},[ \t]{{0,8}}{_NAME})*")
MOST_SHOWN = 80  # characters of what a stranger sent
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d{1,5})?", re.IGNORECASE)
_REMEDY = (
    "call 127.0.0.1 or localhost from this machine; for others, name clients in [clients.NAME]"
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotLocalError(DeniedError):
    """Without an account come only callers from this machine, and no pages from elsewhere."""

    reason = "not_local"


def is_allowed(origin: str, origins: Sequence[str]) -> bool:
    """Whether the settings name an origin, or any."""
    return origin in origins or ANY_ORIGIN in origins


def answering_preflights(origins: Sequence[str]) -> Middleware:
    """Answer a browser that asks for a page of these origins, before it has to have an account."""

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
        names = asked_names(request.headers.getall(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ()))
        if names:
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = names
        return web.Response(status=204, headers=headers)

    return answer


def naming_origins(
    origins: Sequence[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Make what names, in every response, errors and streams too, the page that may read it."""

    async def name_origin(request: web.Request, response: web.StreamResponse) -> None:
        if origins:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        shown = _shown_origin(request, origins)
        if shown:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = shown
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED

    return name_origin


def asked_names(sent: Sequence[str]) -> str:
    """Return the names of the headers that a page wants to send, as it wrote them; "" for none.

    Raises:
        RequestError: they are no names, or too many.
    """
    names = ", ".join(sent).strip()
    if names and (len(names) > MAX_ASKED or not _NAMES.fullmatch(names)):
        raise RequestError(
            f"the header {hdrs.ACCESS_CONTROL_REQUEST_HEADERS} cannot be so",
            f"send up to {MAX_ASKED} characters of names, with commas",
        )
    return names


def _shown_origin(request: web.Request, origins: Sequence[str]) -> str:
    """Return the origin that a response names: the page's, or any; "" for none."""
    sent = request.headers.getall(hdrs.ORIGIN, ())
    if len(sent) != 1 or not is_allowed(sent[0], origins):
        return ""
    return ANY_ORIGIN if ANY_ORIGIN in origins else str(sent[0])


def check_local(peer: str, hosts: Sequence[str], origins: Sequence[str]) -> None:
    """Refuse an HTTP request that may come without an account, but from this machine only.

    Args:
        peer: the address that the connection comes from, "" if nobody knows.
        hosts: the values of its header Host, of which there has to be one.
        origins: the values of its header Origin; only browsers send one.

    Raises:
        NotLocalError: naming what is not local.
    """
    if not is_loopback_host(peer):
        raise NotLocalError(f"the connection comes from {peer[:MOST_SHOWN] or 'nowhere'}", _REMEDY)
    if len(hosts) != 1 or not _is_local_authority(hosts[0]):
        said = ", ".join(hosts)[:MOST_SHOWN]
        raise NotLocalError(f"the host {said!r} is no name of this machine", _REMEDY)
    for origin in origins:
        scheme, _, authority = origin.partition("://")
        if scheme not in ("http", "https") or not _is_local_authority(authority):
            raise NotLocalError(
                f"the page of {origin[:MOST_SHOWN]!r} is not of this machine", _REMEDY
            )


def _is_local_authority(text: str) -> bool:
    """Whether it is a loopback host, with or without a port."""
    found = _AUTHORITY.fullmatch(text)
    return found is not None and is_loopback_host(found[1])
