"""The address the service listens on: a Unix socket guarded by its mode, or a loopback port."""

import errno
import os
import socket
from pathlib import Path

import grpc

from inference_svc.core.errors import ListenError

SOCKET_MODE = 0o660  # user and group: the guard of a Unix socket (D16)
UNIX = "unix:"


def prepare_socket(listen: str) -> None:
    """Make way for a Unix socket: its directory exists, nobody serves there, no stale file is left.

    Raises:
        ListenError: another service answers there, or the directory cannot be used.
    """
    if not listen.startswith(UNIX):
        return
    path = Path(listen.removeprefix(UNIX))
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the directory is not writable")
        if not path.exists():
            return
        if not path.is_socket():
            raise FileExistsError(errno.EEXIST, "it is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # left behind by a service that was killed
    except OSError as error:
        raise ListenError(
            f"the socket {path} cannot be used ({error.strerror})",
            "give --listen a path in a directory this user may write",
        ) from error
    else:
        raise ListenError(
            f"the socket {path} is in use by another service",
            "stop that one, or give --listen another path",
        )


def bind(server: grpc.aio.Server, listen: str) -> int:
    """Bind the server and set the socket's mode; return the port, which is chosen for port 0.

    Raises:
        ListenError: the address cannot be bound.
    """
    try:
        port: int = server.add_insecure_port(listen)
        if listen.startswith(UNIX):
            Path(listen.removeprefix(UNIX)).chmod(SOCKET_MODE)
    except (RuntimeError, OSError) as error:
        raise ListenError(
            f"cannot listen on {listen}", "choose an address that is free, with --listen"
        ) from error
    return port
