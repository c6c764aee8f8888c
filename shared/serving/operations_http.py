"""Metrics and probes of a process over HTTP, for monitors.

    /metrics   every metric of its table, in Prometheus' format
    /healthz   200 while its event loop answers: restart it if not (liveness)
    /readyz    200 while it accepts work, else 503 and one word why: send it none (readiness)

The two probes answer with one word, and are open to every client that reaches the address. So are
the metrics on a Unix socket or the loopback. Elsewhere they require a client with the role `reader`
and all tenants. Requests are neither counted nor traced, because scrapes and probes come every few
seconds.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from shared.access.clients import ClientBook
from shared.access.credentials import ssl_context
from shared.access.settings import TlsSettings
from shared.process.log import get_logger
from shared.serving.http_connections import Bounds, ConnectionMetrics
from shared.serving.http_server import HttpServer, accepted_at, identity_of
from shared.serving.metric_export import MetricExporter
from shared.serving.observing_settings import MetricsSettings, is_open
from shared.types.errors import ReportedError

MAX_BODY_BYTES = 4096  # these routes take no bodies
BOUNDS = Bounds(max_connections=64, max_per_address=32)
PROBES = frozenset({"/healthz", "/readyz"})  # answered however many scrapes are under way
READER = "reader"
STOP_GRACE_S = 1.0

log = get_logger(__name__)


@dataclass(frozen=True)
class Operations:
    """The parts that the routes use.

    Attributes:
        exporter: renders the metrics.
        not_ready: returns in one word why no work is accepted; "" if it is.
        book: the clients that may connect, for addresses that require one.
        connections: counts of the connections.
    """

    exporter: MetricExporter
    not_ready: Callable[[], str]
    book: ClientBook
    connections: ConnectionMetrics = field(default_factory=ConnectionMetrics)


@asynccontextmanager
async def serve_operations(
    settings: MetricsSettings, tls: TlsSettings, operations: Operations
) -> AsyncIterator[None]:
    """Serve the routes inside the block, if there is an address for them.

    Raises:
        ConfigError: an address, or a file of TLS, cannot be used.
    """
    if not settings.listen:
        yield
        return
    is_guarded = not all(map(is_open, settings.listen))
    context = ssl_context(tls) if tls.is_on and is_guarded else None
    server = HttpServer(
        operations_app(operations),
        {address: None if is_open(address) else context for address in settings.listen},
        name="metrics",
        bounds=BOUNDS,
        metrics=operations.connections,
        reserved=PROBES,
    )
    await server.start()
    log.info("metrics_ready", listen=server.addresses)
    try:
        yield
    finally:
        await server.stop(STOP_GRACE_S)


def operations_app(operations: Operations) -> web.Application:
    """Return the application with the routes."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)

    async def metrics(request: web.Request) -> web.Response:
        try:
            if not is_open(accepted_at(request)):
                identity = identity_of(request, operations.book.current)
                identity.check_role(READER)
                identity.check_all_tenants("the metrics")
        except ReportedError as error:
            log.info("metrics_refused", reason=error.reason, peer=str(request.remote))
            status = 401 if error.grpc_code == "UNAUTHENTICATED" else 403
            return web.Response(status=status, text=f"{error}\n")
        body, content_type = operations.exporter.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def readyz(_request: web.Request) -> web.Response:
        why_not = operations.not_ready()
        return web.Response(status=503 if why_not else 200, text=f"{why_not or 'ready'}\n")

    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return app
