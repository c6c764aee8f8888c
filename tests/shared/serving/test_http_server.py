"""The HTTP server: its sockets, its limits, and its end, with real connections."""

import asyncio
import grp
import os
import socket
import stat

import pytest
from aiohttp import ClientConnectionError, ClientSession, UnixConnector, web

from shared.access.sockets import SocketInUseError
from shared.serving.http_connections import Bounds
from shared.serving.http_server import HttpServer, split_address
from shared.types.errors import ConfigError

ANSWER_S = 30.0


class World:
    """An application whose handlers wait until tests release them."""

    def __init__(self):
        self.may_answer = asyncio.Event()
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    def app(self):
        app = web.Application(client_max_size=1000)
        app.router.add_get("/", self.hello)
        app.router.add_get("/slow", self.slow)
        app.router.add_post("/body", self.body)
        return app

    async def hello(self, _request):
        return web.Response(text="hello")

    async def slow(self, _request):
        self.begun.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return web.Response(text="slow")

    async def body(self, request):
        return web.Response(text=str(len(await request.read())))


@pytest.fixture
def world():
    """Make a new one."""
    return World()


@pytest.fixture(params=["unix", "tcp"])
def listen(request, short_dir):
    """Yield each kind of address."""
    return f"unix:{short_dir}/http.sock" if request.param == "unix" else "127.0.0.1:0"


class Client:
    """Sends requests to a server, at one of its addresses."""

    def __init__(self, server, index=0):
        self.address = server.addresses[index]
        self.is_unix = self.address.startswith("unix:")
        self.path = self.address.removeprefix("unix:")
        self.base = "http://localhost" if self.is_unix else f"http://{self.address}"

    def session(self):
        return ClientSession(connector=UnixConnector(self.path) if self.is_unix else None)

    async def get(self, path):
        async with self.session() as session, session.get(self.base + path) as response:
            return await response.text()

    async def connect(self):
        if self.is_unix:
            return await asyncio.open_unix_connection(self.path)
        host, port = split_address(self.address)
        return await asyncio.open_connection(host, port)


async def read_until_closed(reader):
    """Read to the end, when a server closes or aborts."""
    async with asyncio.timeout(ANSWER_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_a_server_answers_until_it_is_stopped(world, listen):
    """A stop leaves nothing, and may be repeated."""
    server = HttpServer(world.app(), {listen: None})
    await server.start()
    client = Client(server)
    assert await client.get("/") == "hello"
    await server.stop(ANSWER_S)
    await server.stop(ANSWER_S)
    gone = FileNotFoundError if client.is_unix else ConnectionRefusedError
    with pytest.raises(gone):
        await client.connect()


async def test_a_stop_waits_for_active_requests(world, listen):
    """They are answered within the grace period."""
    server = HttpServer(world.app(), {listen: None})
    await server.start()
    answer = asyncio.create_task(Client(server).get("/slow"))
    await world.begun.wait()
    stopping = asyncio.create_task(server.stop(ANSWER_S))
    await asyncio.sleep(0)
    world.may_answer.set()
    assert await answer == "slow"
    await stopping


async def test_after_the_grace_requests_are_cancelled(world, listen):
    """Their clients see the connection end."""
    server = HttpServer(world.app(), {listen: None})
    await server.start()
    answer = asyncio.create_task(Client(server).get("/slow"))
    await world.begun.wait()
    await server.stop(0.01)
    assert world.cancelled.is_set()
    with pytest.raises(ClientConnectionError):
        await answer


async def test_a_disconnected_clients_handler_is_cancelled(world, listen):
    """A handler is cancelled when its client closes the connection."""
    server = HttpServer(world.app(), {listen: None})
    await server.start()
    _, writer = await Client(server).connect()
    writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    await world.begun.wait()
    writer.close()
    async with asyncio.timeout(ANSWER_S):
        await world.cancelled.wait()
    await server.stop(ANSWER_S)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTT",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["nothing", "part of a line", "part of a header", "an idle connection"],
)
async def test_a_silent_connection_is_closed(world, listen, sent):
    """One without a request, or with a part of one; so is an idle one."""
    server = HttpServer(world.app(), {listen: None}, bounds=Bounds(header_s=0.05, idle_s=0.05))
    await server.start()
    reader, writer = await Client(server).connect()
    writer.write(sent)
    answer = await read_until_closed(reader)
    assert (b"hello" in answer) == sent.endswith(b"\r\n\r\n")
    writer.close()
    await server.stop(ANSWER_S)


async def test_a_new_connection_replaces_the_one_idle_for_longest(world, listen):
    """Beyond the bound the connection that has been idle for longest makes room for the new one."""
    server = HttpServer(world.app(), {listen: None}, bounds=Bounds(max_connections=2))
    await server.start()
    client = Client(server)
    held = [await client.connect() for _ in range(2)]
    for reader, writer in held:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"hello")
    assert await client.get("/") == "hello"
    assert await read_until_closed(held[0][0]) == b""
    held[1][1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await held[1][0].readuntil(b"hello")
    for _, opened in held:
        opened.close()
    await server.stop(ANSWER_S)


async def test_invalid_requests_are_refused(world, listen):
    """Other protocols get 400, overlong requests 413, and the server continues."""
    server = HttpServer(world.app(), {listen: None})
    await server.start()
    client = Client(server)
    reader, writer = await client.connect()
    writer.write(b"\x16\x03\x01 not http\r\n\r\n")
    assert b" 400 " in (await read_until_closed(reader)).split(b"\r\n")[0]
    writer.close()
    async with client.session() as session:
        async with session.post(client.base + "/body", data=b"x" * 2000) as response:
            assert response.status == 413
        async with session.post(client.base + "/body", data=b"x" * 1000) as response:
            assert await response.text() == "1000"
    await server.stop(ANSWER_S)


async def test_a_socket_has_its_mode_and_group(world, short_dir):
    """As configured."""
    path = short_dir / "http.sock"
    for group in (grp.getgrgid(os.getgid()).gr_name, str(os.getgid())):
        server = HttpServer(
            world.app(), {f"unix:{path}": None}, socket_mode=0o640, socket_group=group
        )
        await server.start()
        status = path.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o640, os.getgid())
        await server.stop(ANSWER_S)


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(world, short_dir):
    """A killed process's socket is no obstacle; a serving process is not affected."""
    path = short_dir / "http.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = HttpServer(world.app(), {f"unix:{path}": None})
    await server.start()
    with pytest.raises(SocketInUseError, match="in use by another process"):
        await HttpServer(world.app(), {f"unix:{path}": None}).start()
    assert await Client(server).get("/") == "hello"
    await server.stop(ANSWER_S)


async def test_several_addresses_have_one_server(world, short_dir):
    """Each is answered, they share all places, and no socket is left."""
    path = short_dir / "http.sock"
    listen = {f"unix:{path}": None, "127.0.0.1:0": None}
    server = HttpServer(world.app(), listen, bounds=Bounds(max_connections=2))
    await server.start()
    by_path, by_port = Client(server, 0), Client(server, 1)
    held = [await client.connect() for client in (by_path, by_port)]
    for reader, writer in held:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"hello")
    assert await by_port.get("/") == "hello"
    assert (
        await read_until_closed(held[0][0]) == b""
    )  # that of the other address has been idle for longest
    for _, opened in held:
        opened.close()
    await server.stop(ANSWER_S)
    assert not path.exists()


async def test_all_addresses_or_none_are_bound(world, short_dir):
    """If one cannot be bound, those before it are freed."""
    path = short_dir / "http.sock"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = HttpServer(world.app(), {f"unix:{path}": None, f"127.0.0.1:{port}": None})
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await server.start()
    assert not path.exists()


async def test_unusable_addresses(world, short_dir):
    """A bad address, a port in use, a file in its place, an unknown group are named."""
    (short_dir / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for listen, group, error in (
            ("nonsense", "", "is not an address"),
            (f"127.0.0.1:{port}", "", "cannot listen"),
            (f"unix:{short_dir}/file", "", "a file that is not a socket is in its place"),
            (f"unix:{short_dir}/a", "no-such-group", "groupadd"),
        ):
            server = HttpServer(world.app(), {listen: None}, socket_group=group)
            with pytest.raises(ConfigError, match=error) as raised:
                await server.start()
            assert raised.value.remedy
