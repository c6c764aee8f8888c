"""HTTP for monitors, and log lines of clients' requests, with real connections."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import structlog
from aiohttp import ClientSession, UnixConnector, web

from shared.access.clients import ClientBook, Clients
from shared.access.settings import ClientSettings, TlsSettings, UnguardedError
from shared.access.tokens import new_token, token_digest
from shared.process.log import configure_logging
from shared.serving.http_observer import HttpMetrics, request_observer
from shared.serving.http_server import HttpServer
from shared.serving.metric_export import Metric, MetricExporter, MetricTable
from shared.serving.observing_settings import MetricsSettings, is_open
from shared.serving.operations_http import Operations, operations_app, serve_operations

TABLE = MetricTable((Metric("a_rows", "gauge", "Rows"),))
EXPORTER = MetricExporter(TABLE, lambda scrape: scrape.put("a_rows", 7))
TRACE = "0af7651916cd43dd8448eb211c80319c"
GRACE_S = 10.0


@pytest.fixture(autouse=True)
def _restore_logging():
    yield
    configure_logging("info", json=False)


@asynccontextmanager
async def serve(app, listen="127.0.0.1:0"):
    """Serve an application; return a session and its base."""
    server = HttpServer(app, {listen: None})
    await server.start()
    try:
        async with ClientSession() as session:
            yield session, f"http://{server.addresses[0]}"
    finally:
        await server.stop(GRACE_S)


def operations(why_not="", clients=None):
    """Return what the routes report."""
    state = SimpleNamespace(why_not=why_not)
    book = ClientBook(Clients(clients or {}))
    return state, Operations(EXPORTER, lambda: state.why_not, book)


async def test_probes_and_metrics():
    """The process is alive while it answers, and ready unless it gives a reason."""
    state, asked = operations()
    async with serve(operations_app(asked)) as (session, base):
        async with session.get(f"{base}/metrics") as response:
            assert "a_rows 7.0" in await response.text()
            assert response.headers["Content-Type"].startswith("text/plain")
        for why_not, status, word in (("", 200, "ready"), ("draining", 503, "draining")):
            state.why_not = why_not
            async with session.get(f"{base}/readyz") as response:
                assert (response.status, await response.text()) == (status, f"{word}\n")
            async with session.get(f"{base}/healthz") as response:
                assert (response.status, await response.text()) == (200, "alive\n")


async def test_who_may_read_the_metrics():
    """On public addresses metrics need a reader of all tenants; probes are open."""
    tokens = {name: new_token() for name in ("monitor", "other", "some")}
    digests = {name: (token_digest(token),) for name, token in tokens.items()}
    clients = {
        "monitor": ClientSettings(token_sha256=digests["monitor"], tenants=["*"], roles=["reader"]),
        "other": ClientSettings(token_sha256=digests["other"], tenants=["*"], roles=["client"]),
        "some": ClientSettings(token_sha256=digests["some"], tenants=["a"], roles=["reader"]),
    }
    _, asked = operations(clients=clients)
    async with serve(operations_app(asked), "0.0.0.0:0") as (session, base):
        for token, status in (
            (tokens["monitor"], 200),
            (tokens["other"], 403),
            (tokens["some"], 403),
            ("wrong", 401),
            ("", 401),
        ):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get(f"{base}/metrics", headers=headers) as response:
                assert response.status == status
                assert ("a_rows" in await response.text()) == (status == 200)
        async with session.get(f"{base}/healthz") as response:
            assert response.status == 200


async def test_an_optional_address(short_dir):
    """Without one nothing is served; with one it is, until the end."""
    _, asked = operations()
    async with serve_operations(MetricsSettings(), TlsSettings(), asked):
        pass
    path = short_dir / "metrics.sock"
    async with serve_operations(MetricsSettings(listen=f"unix:{path}"), TlsSettings(), asked):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"ready\n")
        writer.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("address", "is_for_all"),
    [("unix:/run/x.sock", True), ("127.0.0.1:1", True), ("[::1]:1", True), ("0.0.0.0:1", False)],
)
def test_addresses_without_authentication(address, is_for_all):
    """A Unix socket and the loopback need none, all others do."""
    assert is_open(address) is is_for_all


def test_a_public_address_needs_authentication():
    """Also beside private ones."""
    settings = MetricsSettings(listen=["127.0.0.1:1", "0.0.0.0:2"])
    with pytest.raises(UnguardedError, match=r"0\.0\.0\.0:2"):
        settings.check_guarded(TlsSettings(), {})
    MetricsSettings(listen=["127.0.0.1:1", "unix:/run/m"]).check_guarded(TlsSettings(), {})


async def test_each_address_has_its_own_authentication(short_dir):
    """Of one server: the socket's users need none for metrics, the port's clients do."""
    path = short_dir / "metrics.sock"
    _, asked = operations()
    server = HttpServer(operations_app(asked), {f"unix:{path}": None, "0.0.0.0:0": None})
    await server.start()
    try:
        socket, port = server.addresses
        assert socket == f"unix:{path}"
        async with ClientSession() as session, session.get(f"http://{port}/metrics") as response:
            assert response.status == 401
        local = ClientSession(connector=UnixConnector(str(path)))
        async with local as session, session.get("http://localhost/metrics") as response:
            assert response.status == 200
    finally:
        await server.stop(GRACE_S)


async def test_requests_are_counted_and_logged(capsys):
    """Each has one line, with route, status and trace id, and without its contents."""
    configure_logging("info", json=True)
    metrics = HttpMetrics()

    async def item(request):
        structlog.contextvars.bind_contextvars(client="someone")
        what = request.match_info["id"]
        if what == "refuse":
            raise web.HTTPConflict
        if what == "break":
            raise ValueError
        return web.Response(text="fine")

    app = web.Application(middlewares=[request_observer(metrics)])
    app.router.add_get("/items/{id}", item)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "Authorization": "Bearer sesame1"}
    async with serve(app) as (session, base):
        for path in ("/items/1", "/items/2", "/items/refuse", "/items/break", "/secret-path"):
            async with session.get(base + path, headers=headers) as response:
                await response.read()
    route = "/items/{id}"
    assert metrics.ended.counts == {
        ("GET", route, "200"): 2,
        ("GET", route, "409"): 1,
        ("GET", route, "500"): 1,
        ("GET", "none", "404"): 1,
    }
    written = capsys.readouterr().err
    assert "sesame1" not in written
    assert "secret-path" not in written
    lines = [json.loads(line) for line in written.splitlines() if '"http_request"' in line]
    assert [line["status"] for line in lines] == [200, 200, 409, 500, 404]
    assert {line["trace_id"] for line in lines} == {TRACE}
    assert [line.get("client") for line in lines] == ["someone"] * 4 + [None]


async def test_a_disconnected_client_is_logged(capsys):
    """Its request counts as 499."""
    configure_logging("info", json=True)
    metrics, begun, left = HttpMetrics(), asyncio.Event(), asyncio.Event()

    async def wait(_request):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    app = web.Application(middlewares=[request_observer(metrics)])
    app.router.add_get("/wait", wait)
    async with serve(app) as (session, base):
        asking = asyncio.create_task(session.get(f"{base}/wait"))
        await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(GRACE_S):
            await left.wait()
    assert metrics.ended.counts == {("GET", "/wait", "499"): 1}
    assert '"status": 499' in capsys.readouterr().err
