"""A server at a real socket, its client, and its counts."""

import asyncio
import functools
import inspect
import ssl
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvloop
from aiohttp import web

from shared.serving.http_connections import Bounds, ConnectionMetrics
from shared.serving.http_server import HttpServer

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LONG_S = 30.0  # a deadline that no test here reaches
ANSWER_S = 60.0
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
PART = 1 << 16
BIG = 16 << 20  # bytes: more than the kernel buffers


def on_each_loop(test):
    """Run a test on each event loop: the processes use uvloop, whose sockets differ."""
    own = inspect.signature(test)
    loop = inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY)

    @pytest.mark.parametrize("new_loop", LOOPS.values(), ids=LOOPS)
    @functools.wraps(test)
    def run(*, new_loop, **given):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**given))

    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.parameters.values()]
    run.__signature__ = own.replace(parameters=[*keywords, loop])
    return run


@dataclass
class Served:
    """A server, its client and its counts."""

    server: HttpServer
    context: ssl.SSLContext | None
    metrics: ConnectionMetrics
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cut(self):
        """Return reason → number of connections that were cut."""
        return {reason: count for (_, reason), count in self.metrics.cut.counts.items()}

    async def connect(self, *, shakes_hands=True):
        host, _, port = self.server.addresses[0].rpartition(":")
        return await asyncio.open_connection(
            host, int(port), ssl=self.context if shakes_hands else None
        )

    async def get(self, path=b"/healthz"):
        """Return the whole answer to a request over a separate connection."""
        reader, writer = await self.connect()
        writer.write((GET % path).replace(b"Host", b"Connection: close\r\nHost"))
        answer = await read_to_end(reader)
        writer.close()
        return answer

    async def until(self, is_so):
        """Wait until the condition holds."""
        async with asyncio.timeout(ANSWER_S):
            while not is_so():  # noqa: ASYNC110  # it counts, without an event
                await asyncio.sleep(0)

    async def until_open(self, count):
        """Return when the server has so many connections."""
        await self.until(lambda: self.metrics.open["test"] == count)


async def read_to_end(reader):
    """Return the bytes that come until the other side closes or aborts the connection."""
    data = b""
    async with asyncio.timeout(ANSWER_S):
        try:
            while chunk := await reader.read(1 << 16):
                data += chunk
        except (ConnectionError, ssl.SSLError):
            pass
    return data


@asynccontextmanager
async def serving(tls=(None, None), **bounds):
    """Serve routes: one answers at once, one on request, one at length, and one never."""
    bounds = {"header_s": LONG_S, "write_s": LONG_S, **bounds}
    metrics, reserved = ConnectionMetrics(), frozenset({"/healthz"})
    app = web.Application()
    server = HttpServer(
        app,
        {"127.0.0.1:0": tls[0]},
        name="test",
        bounds=Bounds(**bounds),
        metrics=metrics,
        reserved=reserved,
    )
    served = Served(server, tls[1], metrics)

    async def healthz(_request):
        return web.Response(text="alive")

    async def slow(_request):
        served.begun.release()
        await served.may_answer.wait()
        return web.Response(text="slow")

    async def big(request):
        served.begun.release()
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(BIG // PART):
            await response.write(bytes(PART))
        await response.write_eof()
        return response

    async def body(request):
        return web.Response(text=str(len(await request.read())))

    async def fail(_request):
        raise ValueError("ours")

    async def left(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"some")
        raise ConnectionResetError

    handlers = {
        "/healthz": healthz,
        "/slow": slow,
        "/big": big,
        "/fail": fail,
        "/left": left,
    }
    for path, handler in handlers.items():
        app.router.add_get(path, handler)
    app.router.add_post("/body", body)
    await server.start()
    try:
        yield served
    finally:
        served.may_answer.set()
        await server.stop(ANSWER_S)
