"""Failing connections: other protocols, internal errors, vanished clients, no descriptors left."""

import asyncio
import json
import os
import resource
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from shared.process.log import configure_logging
from tests.shared.serving.listening_server import ANSWER_S, GET, on_each_loop, read_to_end, serving

pytestmark = pytest.mark.usefixtures("logging_restored")
CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


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
async def test_other_protocols_are_logged_in_a_line(sent, capsys):
    """One line a second, however many come; neither it nor the answer has the received bytes."""
    configure_logging("info", json=True)
    async with serving() as served:
        for _ in range(20):
            reader, writer = await served.connect()
            writer.write(sent)
            writer.write_eof()
            assert b"sesame" not in await read_to_end(reader)
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
async def test_an_internal_error_is_logged_completely(capsys):
    """A bug in a handler has its traceback in the log, and none in the answer."""
    configure_logging("info", json=True)
    async with serving() as served:
        answer = await served.get(b"/fail")
    assert b" 500 " in answer.partition(b"\r\n")[0]
    assert b"ours" not in answer
    assert "ValueError: ours" in capsys.readouterr().err


@on_each_loop
async def test_a_vanished_client_is_no_error(capsys):
    """Its handler ends without a log line; its connection is forgotten."""
    configure_logging("info", json=True)
    async with serving() as served:
        assert b"some" in await served.get(b"/left")
        await served.until_open(0)
    assert not capsys.readouterr().err


@on_each_loop
async def test_without_descriptors_an_idle_connection_is_closed():
    """Then the new connection is accepted."""
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
    """Limit the number of files that this process may open."""
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
