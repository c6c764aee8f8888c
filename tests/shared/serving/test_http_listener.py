"""Limits of connections, with real ones: plain and TLS, on both event loops."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from shared.access.credentials import ssl_context
from shared.process.log import configure_logging
from tests.shared.serving.listening_server import (
    ANSWER_S,
    BIG,
    GET,
    LONG_S,
    on_each_loop,
    read_to_end,
    serving,
)
from tests.tls_files import Authority

SOON_S = 0.05  # one that it does
MANY = 30
pytestmark = pytest.mark.usefixtures("logging_restored")


@on_each_loop
async def test_silent_connections_do_not_block_others(tls):
    """However many send nothing, TLS or not, requests are answered at once."""
    async with serving(tls, max_connections=8) as served, AsyncExitStack() as stack:
        silent = [await served.connect(shakes_hands=False) for _ in range(MANY)]
        for _, writer in silent:
            stack.callback(writer.close)
        await served.until_open(8)
        for _ in range(3):
            assert b"alive" in await served.get()
        assert served.cut["places"] >= MANY - 8
        assert served.metrics.open["test"] <= 8
        assert await read_to_end(silent[0][0]) == b""


@on_each_loop
async def test_active_requests_are_not_cut_for_others(tls):
    """They continue while silent connections come and go; health is answered meanwhile."""
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
async def test_with_all_places_active_new_connections_are_closed(tls):
    """They are counted."""
    async with serving(tls, max_connections=1) as served:
        reader, writer = await served.connect()
        writer.write(GET % b"/slow")
        await served.begun.acquire()
        refused, other = await served.connect(shakes_hands=False)
        assert await read_to_end(refused) == b""
        other.close()
        assert served.cut == {"places": 1}
        served.may_answer.set()
        async with asyncio.timeout(ANSWER_S):
            await reader.readuntil(b"slow")
        writer.close()


@on_each_loop
async def test_headers_have_their_own_deadline(tls):
    """Neither silence nor a slow header is accepted; an idle connection is."""
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
            assert await read_to_end(reader) == b""
            writer.close()
        assert served.cut == {"headers": 3}
        idle[1].write(GET % b"/healthz")
        async with asyncio.timeout(ANSWER_S):
            await idle[0].readuntil(b"alive")
        idle[1].write(b"GET")  # the next request has the same deadline, not that of idleness
        assert await read_to_end(idle[0]) == b""
        assert served.cut == {"headers": 4}
        idle[1].close()


@on_each_loop
async def test_a_handshake_has_a_deadline(tmp_path):
    """A silent client of a TLS port is not kept, and is counted from its first moment on."""
    context = ssl_context(Authority(tmp_path).server(wants_certificates=False))
    async with serving((context, None), header_s=SOON_S) as served:
        silent = [await served.connect() for _ in range(5)]
        for reader, writer in silent:
            assert await read_to_end(reader) == b""
            writer.close()
        await served.until_open(0)
        assert served.cut == {"handshake": 5}


@on_each_loop
async def test_failed_handshakes(tmp_path, capsys):
    """They are counted, and logged once a second without received bytes; disconnects are not."""
    configure_logging("info", json=True)
    context = ssl_context(Authority(tmp_path).server(wants_certificates=False))
    async with serving((context, None)) as served:
        for _ in range(5):
            reader, writer = await served.connect()
            writer.write(b"GET /?api_key=sesame-1 HTTP/1.1\r\n\r\n")
            await read_to_end(reader)
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
async def test_an_unread_answer(tls):
    """Its connection is closed after a while, also in the middle of an answer."""
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
async def test_a_slowly_read_answer_is_complete(tls):
    """However large it is."""
    async with serving(tls) as served:
        assert len(await served.get(b"/big")) > BIG
        assert not served.cut


@on_each_loop
async def test_an_address_with_too_many_connections(tls):
    """Its own are closed; addresses of proxies have no such limit."""
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
