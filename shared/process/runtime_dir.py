"""Paths of kvd's sockets and state, for the daemon and its clients.

<runtime_dir>/engine.sock     gRPC kvd.v1.Engine
<runtime_dir>/operator.sock   gRPC kvd.v1.Operator and kvd.v1.Reader
<runtime_dir>/reader.sock     gRPC kvd.v1.Reader
<runtime_dir>/data.sock       descriptors, attach tokens: kvd_client/data_socket_protocol.py
<runtime_dir>/files.sock      byte streams of session files: kvd/session_files/byte_streams.py
"""

import os
from collections.abc import Mapping
from pathlib import Path

ENGINE_SOCKET = "engine.sock"
OPERATOR_SOCKET = "operator.sock"
READER_SOCKET = "reader.sock"
DATA_SOCKET = "data.sock"
FILES_SOCKET = "files.sock"
STREAM_TOKEN_BYTES = 16  # a connection to files.sock begins with a token of so many bytes
MAX_SOCKET_PATH = 107  # bytes in sockaddr_un, without the final NUL
MAX_MESSAGE_BYTES = 16 << 20  # of a gRPC message: the token ids of a four-million-token session
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + (1 << 16)  # of a local call: a message and what is beside it

SYSTEM_RUNTIME_DIR = Path("/run/kvd")  # RuntimeDirectory= of systemd/kvd.service
SYSTEM_STATE_DIR = Path("/var/lib/kvd")  # StateDirectory= of systemd/kvd.service


def default_runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the system service's directory for users who may enter it, else the user's own."""
    if os.geteuid() == 0 or os.access(SYSTEM_RUNTIME_DIR, os.X_OK):
        return SYSTEM_RUNTIME_DIR
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "kvd"
    # World-writable parent: kvd refuses the directory unless it is its own, mode 0700.
    return Path(f"/tmp/kvd-{os.geteuid()}")  # noqa: S108


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the supervisor's directory, else the system's for root, else the user's own."""
    if environ.get("STATE_DIRECTORY"):
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    if os.geteuid() == 0:
        return SYSTEM_STATE_DIR
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "kvd"
    return Path.home() / ".local" / "state" / "kvd"


def channel_options() -> tuple[tuple[str, int], ...]:
    """Return the options of every gRPC channel to kvd.

    By default the channels of one process share their connections, and with them the back-off after
    a failed one: an engine would notice a restarted kvd only after that has passed.
    """
    return (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    )
