"""Listening on the Unix sockets that kvd serves without gRPC."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from kvd.errors import UnusableSocketError
from shared.access.sockets import SocketGroupError, open_to_group
from shared.process.log import get_logger

BACKLOG = 64
ACCEPT_RETRY_S = 0.1

log = get_logger(__name__)


def listen_at(path: Path, kind: socket.SocketKind, group: str = "") -> socket.socket:
    """Bind a Unix socket and listen; the caller owns the socket.

    Args:
        path: path in the runtime directory, which this kvd has locked.
        kind: SOCK_STREAM or SOCK_SEQPACKET.
        group: group that may connect; "": kvd's own group.

    Raises:
        ConfigError: the path cannot be bound, or not be given to the group.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.setblocking(False)
    try:
        # Left by a dead kvd: no other one can be running, as the runtime directory is locked.
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        open_to_group(path, group)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UnusableSocketError(
            f"cannot listen on {path} ({error.strerror or error})",
            "give another directory with --runtime-dir",
        ) from error
    except SocketGroupError:
        listener.close()
        raise
    return listener


async def accept_connections(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Yield accepted connections, which are non-blocking; the caller owns them."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
        except OSError as error:  # most likely out of descriptors: retry when some are closed
            log.warning("accept_failed", socket=listener.getsockname(), error=str(error))
            await asyncio.sleep(ACCEPT_RETRY_S)
            continue
        sock.setblocking(False)
        yield sock
