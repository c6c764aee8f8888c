"""The caller's end of a byte stream (kvd/session_files/byte_streams.py), for data beside an RPC."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvd.host.memory_pipe import MemoryPipe, make_memory, map_memory
from shared.access.addresses import UNIX, is_unix
from shared.process.runtime_dir import FILES_SOCKET, STREAM_TOKEN_BYTES

SILENCE_S = 90.0  # longer than kvd itself waits for anything during a transfer


class ByteStream:
    """The data connection of one RPC, in one direction. Calls block.

    Attributes:
        token: the name by which the RPC refers to it.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connection, and announce it to kvd.

        Raises:
            OSError: kvd does not accept it.
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
            OSError: kvd has closed the connection, or reads nothing for SILENCE_S.
        """
        self._pipe.write(data)

    def receive(self, num_bytes: int) -> bytearray:
        """Receive exactly `num_bytes` bytes.

        Raises:
            OSError: kvd has closed the connection, or sends nothing for SILENCE_S.
        """
        data = bytearray(num_bytes)
        self._pipe.read_into(memoryview(data))
        return data


@contextmanager
def open_stream(address: str) -> Iterator[ByteStream | None]:
    """Open a stream to a kvd, for the block inside.

    None if the kvd is on another machine, is of an older release, or denies access.
    """
    stream = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        if is_unix(address):
            try:
                sock.connect(str(Path(address.removeprefix(UNIX)).with_name(FILES_SOCKET)))
                stream = ByteStream(sock)
            except OSError:
                stream = None  # the data then goes in the RPC's messages
        yield stream
