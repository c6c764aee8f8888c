"""Sockets are bound, or the error names the remedy; connections are accepted one by one."""

import asyncio
import socket
from contextlib import aclosing

import pytest

from kvd.errors import UnusableSocketError
from kvd.host.listening import accept_connections, listen_at
from shared.access.sockets import SocketGroupError


def test_a_path_that_cannot_be_bound(tmp_path):
    """The error names the option."""
    with pytest.raises(UnusableSocketError, match="--runtime-dir"):
        listen_at(tmp_path / "no" / "data.sock", socket.SOCK_STREAM)


def test_a_missing_group(tmp_path):
    """The error names it, and no socket listens."""
    path = tmp_path / "files.sock"
    with pytest.raises(SocketGroupError, match="groupadd"):
        listen_at(path, socket.SOCK_STREAM, "no-such-group")
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(path))


async def test_the_socket_of_a_killed_kvd_is_replaced(tmp_path):
    """What a killed kvd has left there is in nobody's way."""
    path = tmp_path / "files.sock"
    socket.socket(socket.AF_UNIX).bind(str(path))
    with listen_at(path, socket.SOCK_STREAM) as listener:
        async with aclosing(accept_connections(listener)) as connections:
            for _ in range(2):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(str(path))
                    client.sendall(b"x")
                    with await anext(connections) as sock:
                        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b"x"
