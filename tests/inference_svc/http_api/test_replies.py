"""Events to a real client over a real socket."""

import asyncio
import json

from aiohttp import web

from inference_svc.http_api.replies import EventStream
from shared.serving.http_server import HttpServer

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LONG = {"type": "long", "text": "x" * 100_000}


async def serve(directory, handler):
    """Run a server with one route, at a Unix socket."""
    app = web.Application()
    app.router.add_get("/", handler)
    path = directory / "http.sock"
    server = HttpServer(app, {f"unix:{path}": None})
    await server.start()
    return server, path


async def test_events_are_lines_with_one_json_each(short_dir):
    """With or without a name; line breaks in a text do not break the stream."""

    async def handler(request):
        stream = EventStream(request, 10.0)
        await stream.open({"X-Session-Id": "s-1"})
        await stream.send({"text": "a\nb\u2028é"})
        await stream.send({"type": "thing.done"})
        await stream.end(DONE)
        return stream.response

    server, path = await serve(short_dir, handler)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(REQUEST)
    received = b""
    while DONE not in received:
        received += await reader.read(65536)
    writer.close()
    await server.stop(1.0)
    head, _, _ = received.partition(b"\r\n\r\n")
    assert b"text/event-stream" in head
    assert b"X-Session-Id: s-1" in head
    events = [line for line in received.splitlines() if line.startswith((b"data", b"event"))]
    assert json.loads(events[0].removeprefix(b"data: ")) == {"text": "a\nb\u2028é"}
    assert events[1:] == [b"event: thing.done", b'data: {"type":"thing.done"}', DONE.strip()]


async def test_a_silent_stream_gets_comments(short_dir):
    """While it is silent; no event is cut by one, and a client that disconnects ends them."""
    go_on = asyncio.Event()

    async def handler(request):
        stream = EventStream(request, 10.0)
        await stream.open({})
        async with stream.pinging(0.01):
            await go_on.wait()
            for _ in range(20):
                await stream.send(LONG)
        await stream.end(DONE)
        return stream.response

    server, path = await serve(short_dir, handler)
    for is_patient in (False, True):
        go_on.clear()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(REQUEST)
        received = b""
        while received.count(b": ping\n\n") < 3:
            received += await reader.read(65536)
        if is_patient:
            go_on.set()
        while is_patient and DONE not in received:
            received += await reader.read(65536)
        writer.close()
    events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert [json.loads(event.removeprefix(b"data: ")) for event in events] == [LONG] * 20
    await server.stop(1.0)


async def test_a_client_that_does_not_read_is_given_up(short_dir):
    """Its connection is cut, and the writer learns of it."""
    ended = asyncio.get_running_loop().create_future()

    async def handler(request):
        stream = EventStream(request, 0.2)
        await stream.open({})
        try:
            while True:  # until the socket's buffers are full
                await stream.send(LONG)
        except ConnectionResetError as error:
            ended.set_result(str(error))
            raise

    server, path = await serve(short_dir, handler)
    _, writer = await asyncio.open_unix_connection(path)
    writer.write(REQUEST)
    async with asyncio.timeout(60):
        assert await ended == "the client does not read the response"
    writer.close()
    await server.stop(1.0)
