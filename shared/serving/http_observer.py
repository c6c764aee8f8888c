"""The HTTP middleware that counts and times every request, gives it a trace id and logs it.

It has to be the outermost middleware. Each request has one log line, `http_request`, with its
route and how it ended, but never with headers or bodies, which may be secret. Of the refused
requests of a client only a few per second have a line; its field `more` says how many had none.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from shared.process.log import LineAllowance, get_logger
from shared.serving.tracing import enter_request, extract_trace_context, fail_span
from shared.types.histogram import Histogram, Tally

CLIENT_LEFT = 499  # the client went away before its answer; the status that proxies use for it
REFUSED = 400  # and above
NO_ROUTE = "none"  # for every unknown path: clients must not be able to make labels
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

log = get_logger(__name__)


@dataclass(frozen=True)
class HttpMetrics:
    """Counts of the requests of all HTTP servers of a process.

    Attributes:
        ended: number of requests by method, route and status.
        seconds: seconds of requests by route; for streams, to their last byte.
    """

    ended: Tally = field(default_factory=Tally)
    seconds: Histogram = field(default_factory=Histogram)


def request_observer(metrics: HttpMetrics) -> Middleware:
    """Return the middleware that observes requests. It has to be the first one.

    Values that handlers bind with `structlog.contextvars.bind_contextvars` (session, client, …) are
    in the request's line.
    """
    refused = LineAllowance()

    @web.middleware
    async def observe(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        structlog.contextvars.clear_contextvars()  # those of the connection's previous request
        call = _Call(request)
        status = CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
        except web.HTTPException as error:
            status = error.status
            raise
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            status = 500
            raise
        finally:
            call.end(metrics, status, refused)
        return response

    return observe


class _Call:
    def __init__(self, request: web.Request) -> None:
        resource = request.match_info.route.resource
        self.route = resource.canonical if resource is not None else NO_ROUTE
        self.method = request.method if request.method in METHODS else "other"
        self.began_s = time.monotonic()
        self.span = enter_request(
            f"{self.method} {self.route}",
            extract_trace_context(
                [(name.lower(), value) for name, value in request.headers.items()]
            ),
            {"http.request.method": self.method, "http.route": self.route},
        )

    def end(self, metrics: HttpMetrics, status: int, refused: LineAllowance) -> None:
        seconds = time.monotonic() - self.began_s
        metrics.ended.add(self.method, self.route, str(status))
        metrics.seconds.observe(seconds, self.route)
        client = structlog.contextvars.get_contextvars().get("client", "")
        left_out = refused.take(client) if status >= REFUSED else 0
        if left_out is not None:
            log.info(
                "http_request",
                method=self.method,
                route=self.route,
                status=status,
                total_s=round(seconds, 6),
                **({"more": left_out} if left_out else {}),
            )
        self.span.set_attribute("http.response.status_code", status)
        if status >= 500:
            fail_span(self.span, str(status))
        self.span.end()
