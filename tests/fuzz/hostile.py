"""What hostile clients do to any address: raw sockets and calls that are never finished."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
ANSWER_S = 30.0
CALL_S = 60.0
Frame = tuple[int, int, int, bytes]  # type, flags, stream, payload


def connect(address: str) -> socket.socket:
    """Connect to "unix:/path" or "host:port", and send nothing."""
    if address.startswith("unix:"):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(address.removeprefix("unix:"))
        return raw
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


@contextmanager
def silent_connections(
    address: str, count: int, said: bytes = b""
) -> Iterator[list[socket.socket]]:
    """Open connections that send little or nothing, and keep them."""
    held = []
    try:
        for _ in range(count):
            raw = connect(address)
            held.append(raw)
            raw.setblocking(False)  # a peer that does not read must not stop the test
            if said:
                raw.send(said)
        yield
    finally:
        for raw in held:
            raw.close()


def garbage(seed: int) -> list[bytes]:
    """Return byte strings that are no HTTP/2, or begin like it and continue wrongly."""
    chance = random.Random(seed)  # noqa: S311  # test data
    opened = PREFACE + SETTINGS
    return [
        chance.randbytes(500),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),  # TLS, nearly
        opened + chance.randbytes(2000),
        opened + frame((0, 0, 99, b"data of no stream")),
        opened + frame((1, 4, 1, chance.randbytes(300))),  # headers that are no HPACK
        opened + frame((8, 0, 0, b"\x7f\xff\xff\xff")) * 50,  # windows beyond their bound
        opened + b"".join(frame((3, 0, 2 * n + 1, bytes(4))) for n in range(500)),  # resets
        opened + frame((6, 0, 0, bytes(8))) * 2000,  # pings, whose answers are not read
        opened + (1 << 23).to_bytes(3, "big") + b"\x00\x00" + bytes(4),  # a frame of 8 MiB
    ]


def frame(parts: Frame) -> bytes:
    """Return a frame of HTTP/2."""
    kind, flags, stream, payload = parts
    return (
        len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload
    )


async def throw_garbage(address: str, seed: int) -> None:
    """Send all of it, each over its own connection, and disconnect without reading."""
    for data in garbage(seed):
        await asyncio.to_thread(_throw, address, data)


def _throw(address: str, data: bytes) -> None:
    with connect(address) as raw:
        raw.settimeout(ANSWER_S)
        try:
            raw.sendall(data)
        except OSError:
            return  # disconnected by the server


@contextmanager
def open_unfinished_calls(
    channel: grpc.aio.Channel, method: str, count: int, **call: Any
) -> Iterator[list]:
    """Open calls whose message never comes."""
    opened = [channel.stream_unary(method)(_silence(), **call) for _ in range(count)]
    try:
        yield opened
    finally:
        for one in opened:
            one.cancel()


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.get_running_loop().create_future()
    yield b""


@asynccontextmanager
async def others_are_served(work: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Repeat an honest client's call while the block runs, and once more at its end.

    Its exceptions are raised here.
    """
    over = asyncio.Event()

    async def repeat() -> None:
        while not over.is_set():
            await work()

    working = asyncio.create_task(repeat())
    try:
        yield
        await work()
    finally:
        over.set()
        await working
