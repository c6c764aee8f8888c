"""The caller's end of a byte stream (kvd/session_files/byte_streams.py): data beside an RPC."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvd.host.memory_pipe import MemoryPipe, make_memory, map_memory
from shared.access.addresses import UNIX, is_unix
from shared.process.runtime_dir import FILES_SOCKET, STREAM_TOKEN_BYTES

SILENCE_S = 90.0  # more than kvd waits for anything in the course of a transfer


class ByteStream:
    """A connection that an RPC is to use, in one direction. Calls block.

    Attributes:
        token: by which the RPC names it.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connection, which is announced to kvd.

        Raises:
            OSError: it cannot be.
        """
        self.token = secrets.token_bytes(STREAM_TOKEN_BYTES)
        sock.settimeout(SILENCE_S)
        memory = make_memory()
        try:
            socket.send_fds(sock, [self.token], [memory])
            self._pipe = MemoryPipe(sock, map_memory(memory))
        finally:
            os.close(memory)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes.

        Raises:
            OSError: kvd takes no more.
        """
        self._pipe.write(data)

    def receive(self, num_bytes: int) -> bytearray:
        """Receive so many bytes.

        Raises:
            OSError: they do not come.
        """
        data = bytearray(num_bytes)
        self._pipe.read_into(memoryview(data))
        return data


@contextmanager
def open_stream(address: str) -> Iterator[ByteStream | None]:
    """Open a stream to a kvd; None if it is elsewhere, of an older release, or lets us not."""
    stream = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        if is_unix(address):
            try:
                sock.connect(str(Path(address.removeprefix(UNIX)).with_name(FILES_SOCKET)))
                stream = ByteStream(sock)
            except OSError:
                stream = None  # then all comes in messages
        yield stream
