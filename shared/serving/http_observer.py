"""Watches every HTTP request: counts it, times it, gives it a trace id, and writes its log line.

A middleware, the outermost one. The one canonical line of a request, `http_request`, says what was
asked of which route and how it ended; never headers or bodies, which may be secret. Of the requests
that are refused only so many a second have one for each client: `more` says how many had none.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from shared.process.log import LineAllowance, get_logger
from shared.serving.tracing import carried, enter_request, fail_span
from shared.types.histogram import Histogram, Tally

CLIENT_LEFT = 499  # as proxies write it: the client went away before its answer
REFUSED = 400  # and above
NO_ROUTE = "none"  # whatever path was asked for: a stranger must not make labels
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

log = get_logger(__name__)


@dataclass(frozen=True)
class HttpMetrics:
    """Counts of the requests of all HTTP servers of a process.

    Attributes:
        ended: number of requests by method, route and status.
        seconds: seconds of requests by route; of streams: to their last byte.
    """

    ended: Tally = field(default_factory=Tally)
    seconds: Histogram = field(default_factory=Histogram)


def observing(metrics: HttpMetrics) -> Middleware:
    """Make the middleware that watches requests; put it first.

    What handlers bind with `structlog.contextvars.bind_contextvars` (session, client, …) is in the
    request's line.
    """
    refused = LineAllowance()

    @web.middleware
    async def observe(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        structlog.contextvars.clear_contextvars()  # of the request before on this connection
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
            carried([(name.lower(), value) for name, value in request.headers.items()]),
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
