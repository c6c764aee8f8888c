"""Server-sent events to one client, which is given up if it does not read.

*Source:* WHATWG HTML, "Server-sent events".
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that would collect events are asked not to
}
DONE = b"data: [DONE]\n\n"


class EventStream:
    """See the module docstring.

    Args:
        request: that is answered.
        write_s: how long the client may take to read what was sent.
    """

    def __init__(self, request: web.Request, write_s: float) -> None:
        self._request = request
        self._write_s = write_s
        self.response = web.StreamResponse(headers=HEADERS)

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.response.headers.update(headers)
        await self.response.prepare(self._request)

    async def send(self, data: Mapping[str, Any]) -> None:
        """Send an event without a name."""
        await self._write(b"data: %s\n\n" % json_bytes(data))

    async def send_named(self, data: Mapping[str, Any]) -> None:
        """Send an event under the name of its type."""
        name = str(data["type"]).encode()
        await self._write(b"event: %s\ndata: %s\n\n" % (name, json_bytes(data)))

    async def end(self, last: bytes = b"") -> None:
        """Send what is last, and close the stream."""
        if last:
            await self._write(last)
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_s):
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client does not read") from error


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """Compact JSON; it has no line break. Bytes of a path that are no text are told as "?"."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
