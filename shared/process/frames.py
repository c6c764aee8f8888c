"""Frames: messages of any size over a stream socket between two processes of one machine.

A frame is its length in four bytes, little-endian, and then so many bytes.
"""

import asyncio
import struct
from collections.abc import Callable
from socket import socket
from typing import cast

_LENGTH = struct.Struct("<I")


class FrameStream(asyncio.Protocol):
    """Sends and receives frames on the event loop.

    Attributes:
        ended: done once no frame can be sent or received any more.
        fault: how the other side has broken the protocol, so that we have closed; "": it has not.

    Args:
        on_frame: called with each frame.
        most_bytes: most bytes of a frame; a longer one ends the stream before it is read.
        is_patient: whether to read nothing while the other side does not read what it was sent
            (back pressure). At most one side may be patient, or both could wait for ever.
    """

    def __init__(
        self, on_frame: Callable[[bytes], None], most_bytes: int, *, is_patient: bool = False
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fault = ""
        self._on_frame = on_frame
        self._most_bytes = most_bytes
        self._is_patient = is_patient
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    async def open(self, sock: socket) -> None:
        """Begin to receive from a connected socket, which is ours from now on.

        Raises:
            ValueError: it is no stream socket of this machine; it is closed.
        """
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        except ValueError:
            sock.close()
            raise

    def send(self, frame: bytes) -> None:
        """Send a frame; never waits. A frame after the end is lost."""
        if self._transport is not None and not self._is_ending:
            self._transport.write(_LENGTH.pack(len(frame)) + frame)

    def close(self, fault: str = "") -> None:
        """End the stream, because of a fault of the other side if one is named.

        Frames that are not sent yet are lost.
        """
        self.fault = self.fault or fault
        if self._transport is not None:
            self._transport.abort()

    @property
    def _is_ending(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    # ---------------------------------------------------------------- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > self._most_bytes:
                self.close(f"a frame of {length} bytes, more than {self._most_bytes}")
                break
            begin, end = start + _LENGTH.size, start + _LENGTH.size + length
            if len(received) < end:
                break
            self._on_frame(bytes(memoryview(received)[begin:end]))
            start = end
            if self._is_ending:  # because of that frame
                break
        del received[:start]

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._is_patient and self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        if self._is_patient and self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, _error: Exception | None) -> None:
        """See asyncio.Protocol."""
        if not self.ended.done():
            self.ended.set_result(None)
