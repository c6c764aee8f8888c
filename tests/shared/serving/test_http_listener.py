"""What connections may cost, over real ones: plain and TLS, on the event loop of both processes."""

import asyncio
import functools
import inspect
import json
import os
import resource
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from aiohttp import web

from shared.access.credentials import ssl_context
from shared.process.log import configure_logging
from shared.serving.http_connections import Bounds, ConnectionMetrics
from shared.serving.http_server import HttpServer
from tests.tls_files import Authority

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
LONG_S = 30.0  # a deadline that no test here reaches
SOON_S = 0.05  # one that it does
ANSWER_S = 60.0
GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MANY = 30
PART = 1 << 16
BIG = 16 << 20  # bytes: more than the kernel's buffers hold


def on_each_loop(test):
    """Run a test on each event loop: the processes have uvloop, and the two treat sockets apart."""
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


@pytest.fixture(autouse=True)
def _restore_logging():
    yield
    configure_logging("info", json=False)


@pytest.fixture(params=["plain", "tls"])
def tls(request, tmp_path):
    """The server's settings, the client's context; None for a plain server."""
    if request.param == "plain":
        return None, None
    authority = Authority(tmp_path)
    settings = authority.server(wants_certificates=False)
    return ssl_context(settings), ssl.create_default_context(cafile=authority.path)


@dataclass
class Served:
    """A server, its client and what it counted."""

    server: HttpServer
    context: ssl.SSLContext | None
    metrics: ConnectionMetrics
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cut(self):
        """Reason -> how many."""
        return {reason: count for (_, reason), count in self.metrics.cut.counts.items()}

    async def connect(self, *, shakes_hands=True):
        host, _, port = self.server.addresses[0].rpartition(":")
        return await asyncio.open_connection(
            host, int(port), ssl=self.context if shakes_hands else None
        )

    async def get(self, path=b"/healthz"):
        """The whole answer of a connection of its own."""
        reader, writer = await self.connect()
        writer.write((GET % path).replace(b"Host", b"Connection: close\r\nHost"))
        answer = await ended(reader)
        writer.close()
        return answer

    async def until(self, is_so):
        """Return when it is."""
        async with asyncio.timeout(ANSWER_S):
            while not is_so():  # noqa: ASYNC110  # it counts, without an event
                await asyncio.sleep(0)

    async def until_open(self, count):
        """Return when the server has so many connections."""
        await self.until(lambda: self.metrics.open["test"] == count)


async def ended(reader):
    """What comes until the other side closes the connection, or aborts it."""
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
    """Serve routes: answered at once, when they may be, with more than is read, and never."""
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


@on_each_loop
async def test_silent_connections_lock_nobody_out(tls):
    """However many say nothing, TLS or not, whoever has a request is answered at once."""
    async with serving(tls, max_connections=8) as served, AsyncExitStack() as stack:
        silent = [await served.connect(shakes_hands=False) for _ in range(MANY)]
        for _, writer in silent:
            stack.callback(writer.close)
        await served.until_open(8)
        for _ in range(3):
            assert b"alive" in await served.get()
        assert served.cut["places"] >= MANY - 8
        assert served.metrics.open["test"] <= 8
        assert await ended(silent[0][0]) == b""


@on_each_loop
async def test_what_is_answered_is_not_cut_for_others(tls):
    """Requests under way stay while silent ones come and go; health is answered meanwhile."""
    async with serving(tls, max_connections=8) as served, AsyncExitStack() as stack:
        asked = [await served.connect() for _ in range(7)]
        for _, writer in asked:
            writer.write(GET % b"/slow")
            await served.begun.acquire()
        for _ in range(MANY):
            _, writer = await served.connect(shakes_hands=False)
            stack.callback(writer.close)
        busy = await served.get(b"/slow")
        assert b" 503 " in busy.partition(b"\r\n")[0]
        assert b"Retry-After" in busy
        assert b"alive" in await served.get()
        served.may_answer.set()
        for reader, writer in asked:
            async with asyncio.timeout(ANSWER_S):
                await reader.readuntil(b"slow")
            writer.close()


@on_each_loop
async def test_all_places_answer(tls):
    """Where no connection can be cut a new one is closed, and counted."""
    async with serving(tls, max_connections=1) as served:
        reader, writer = await served.connect()
        writer.write(GET % b"/slow")
        await served.begun.acquire()
        refused, other = await served.connect(shakes_hands=False)
        assert await ended(refused) == b""
        other.close()
        assert served.cut == {"places": 1}
        served.may_answer.set()
        async with asyncio.timeout(ANSWER_S):
            await reader.readuntil(b"slow")
        writer.close()


@on_each_loop
async def test_headers_have_a_deadline_of_their_own(tls):
    """Neither silence nor a header byte by byte is kept; an idle connection is."""
    async with serving(tls, header_s=0.5, idle_s=LONG_S) as served:
        idle = await served.connect()
        idle[1].write(GET % b"/healthz")
        await idle[0].readuntil(b"alive")
        late = [await served.connect() for _ in range(3)]
        for (_, writer), sent in zip(
            late, (b"", b"GET / HT", b"GET / HTTP/1.1\r\nX:"), strict=True
        ):
            writer.write(sent)
        for reader, writer in late:
            assert await ended(reader) == b""
            writer.close()
        assert served.cut == {"headers": 3}
        idle[1].write(GET % b"/healthz")
        async with asyncio.timeout(ANSWER_S):
            await idle[0].readuntil(b"alive")
        idle[1].write(b"GET")  # the next request has the same deadline, not that of idleness
        assert await ended(idle[0]) == b""
        assert served.cut == {"headers": 4}
        idle[1].close()


@on_each_loop
async def test_a_handshake_has_a_deadline(tmp_path):
    """Who says nothing to a TLS port is not kept, and counted from its first moment on."""
    context = ssl_context(Authority(tmp_path).server(wants_certificates=False))
    async with serving((context, None), header_s=SOON_S) as served:
        silent = [await served.connect() for _ in range(5)]
        for reader, writer in silent:
            assert await ended(reader) == b""
            writer.close()
        await served.until_open(0)
        assert served.cut == {"handshake": 5}


@on_each_loop
async def test_handshakes_that_fail(tmp_path, capsys):
    """They are counted, and logged once a second without a word of what came; who leaves is not."""
    configure_logging("info", json=True)
    context = ssl_context(Authority(tmp_path).server(wants_certificates=False))
    async with serving((context, None)) as served:
        for _ in range(5):
            reader, writer = await served.connect()
            writer.write(b"GET /?api_key=sesame-1 HTTP/1.1\r\n\r\n")
            await ended(reader)
            writer.close()
        reader, writer = await served.connect()
        writer.close()
        await served.until_open(0)
        assert served.cut == {"tls": 5}
    written = capsys.readouterr().err
    assert "sesame" not in written
    assert "Traceback" not in written
    assert 1 <= written.count('"tls"') < 5


@on_each_loop
async def test_an_answer_that_is_not_read(tls):
    """Its connection is closed after a while, in the middle of an answer, too."""
    async with serving(tls, write_s=SOON_S) as served:
        _, writer = await served.connect()
        writer.transport.pause_reading()
        writer.write(GET % b"/big")
        await served.begun.acquire()
        await served.until(lambda: served.cut)
        await served.until_open(0)
        assert served.cut == {"unread": 1}
        writer.transport.abort()


@on_each_loop
async def test_an_answer_that_is_read(tls):
    """However large: it is whole."""
    async with serving(tls) as served:
        assert len(await served.get(b"/big")) > BIG
        assert not served.cut


@on_each_loop
async def test_an_address_with_too_many(tls):
    """Its own go; where many come by a proxy's address they have no such bound."""
    async with serving(tls, max_per_address=2, proxies=()) as served:
        silent = [await served.connect(shakes_hands=False) for _ in range(4)]
        await served.until_open(2)
        assert served.cut == {"address": 2}
        assert b"alive" in await served.get()
        for _, writer in silent:
            writer.close()
    async with serving(tls, max_per_address=2) as served:
        silent = [await served.connect(shakes_hands=False) for _ in range(4)]
        await served.until_open(4)
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization Bearer sesame-0123456789\r\n\r\n",
        b"GET /?api_key=sesame HTTP/1.1\r\nHost: x\r\nX: \x00sesame\r\n\r\n",
        b"sesame / HTTP/1.1\r\n\r\n",
        b"GET /sesame HTTP/9.9\r\n\r\n",
        b"GET /" + b"sesame" * 3000 + b" HTTP/1.1\r\n\r\n",
        CHUNKED % b"/body" + b"sesame\r\nsesame\r\n",
        CHUNKED % b"/healthz" + b"3\r\nabcsesame\r\nsesame\r\n",
        b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: sesame\r\n\r\n",
    ],
    ids=["header", "null", "method", "version", "long", "chunk", "unread chunk", "length"],
)
@on_each_loop
async def test_what_is_no_http_is_told_in_a_line(sent, capsys):
    """One line a second, however many come; what was sent is neither there nor in the answer."""
    configure_logging("info", json=True)
    async with serving() as served:
        for _ in range(20):
            reader, writer = await served.connect()
            writer.write(sent)
            writer.write_eof()
            assert b"sesame" not in await ended(reader)
            writer.close()
        await served.until_open(0)
        assert served.cut.get("malformed", 0) >= 20
    written = capsys.readouterr().err
    lines = [json.loads(line) for line in written.splitlines()]
    assert "sesame" not in written
    assert 1 <= len(lines) < 10
    assert all("exception" not in line for line in lines)
    assert {line["reason"] for line in lines} == {"malformed"}


@on_each_loop
async def test_an_error_of_ours_is_told_whole(capsys):
    """A bug in a handler has its traceback in the log, and none in the answer."""
    configure_logging("info", json=True)
    async with serving() as served:
        answer = await served.get(b"/fail")
    assert b" 500 " in answer.partition(b"\r\n")[0]
    assert b"ours" not in answer
    assert "ValueError: ours" in capsys.readouterr().err


@on_each_loop
async def test_a_client_that_left_is_no_error(capsys):
    """A handler that finds nobody to answer ends without a line; its connection is forgotten."""
    configure_logging("info", json=True)
    async with serving() as served:
        assert b"some" in await served.get(b"/left")
        await served.until_open(0)
    assert not capsys.readouterr().err


@on_each_loop
async def test_without_files_one_that_waits_gives_up_its_own():
    """Where no file is left a new connection is accepted for one that waits."""
    async with serving() as served, AsyncExitStack() as stack:
        silent = []
        for _ in range(3):
            silent.append(await served.connect())
            stack.callback(silent[-1][1].close)
        await served.until_open(3)
        with no_file_but(1):  # which is the client's
            reader, writer = await served.connect()
            writer.write(GET % b"/healthz")
            async with asyncio.timeout(ANSWER_S):
                await reader.readuntil(b"alive")
        writer.close()
        assert served.cut["files"] >= 1


@contextmanager
def no_file_but(spare):
    """Leave this process so many files that it may open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, before[1]))
    filled = []
    with suppress(OSError):
        while True:
            filled.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(spare):
        os.close(filled.pop())
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in filled:
            os.close(fd)
