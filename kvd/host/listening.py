"""Unix sockets of kvd's own that are no gRPC server's: bound, and accepted from."""

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
    """Bind a socket and listen; the caller owns it.

    Args:
        path: in the runtime directory, which is this kvd's alone.
        kind: SOCK_STREAM or SOCK_SEQPACKET.
        group: that may connect; "": kvd's own.

    Raises:
        ConfigError: the path cannot be bound, or not given to the group.
    """
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.setblocking(False)
    try:
        path.unlink(missing_ok=True)  # of a dead kvd: the runtime directory is locked
        listener.bind(str(path))
        open_to_group(path, group)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UnusableSocketError(
            f"cannot listen on {path} ({error.strerror or error})",
            "name another directory with --runtime-dir",
        ) from error
    except SocketGroupError:
        listener.close()
        raise
    return listener


async def accepted(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Yield connections as they come, non-blocking; the caller owns them."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
        except OSError as error:  # out of descriptors, most likely: others will be closed
            log.warning("accept_failed", socket=listener.getsockname(), error=str(error))
            await asyncio.sleep(ACCEPT_RETRY_S)
            continue
        sock.setblocking(False)
        yield sock
