"""Mooncake's own client of one master: settings, connection, and its error codes as errors.

It lends the store no memory of this process, because that memory would go with the process. All
settings except the master's address come from the environment, under Mooncake's usual names.

Mooncake's client cannot list keys; the master's admin port can, all of them at once. And a client
that finds no master retries for 90 seconds, so both ports are probed first.
"""

import http.client
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from shared.blobs.blob_store import StoreFailedError, StoreMissingError, StoreSettingsError
from shared.types.units import parse_bytes

OK, SHORT, NOT_FOUND, NOT_READY = 0, -600, -704, -703
NO_ROOM, BUSY, COPIED, EXPIRED = -200, -714, -708, -707
WORDS = {
    -1: "Mooncake gives no reason",
    NO_ROOM: "its memory is full, or no process provides any",
    SHORT: "the buffer of this process is full, or the read took longer than its lease",
    NOT_FOUND: "the object was removed immediately",
    NOT_READY: "another process is storing it",
    EXPIRED: "the read took longer than its lease",
    -800: "the process that holds its memory does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}
CONNECT_S = 3.0
LIST_S = 30.0  # a listing has all keys of all users
_TIMEOUTS_MS = {"MC_RPC_TIMEOUT_MS": 10_000, "MC_RPC_CONNECT_TIMEOUT_MS": 3_000}


@dataclass(frozen=True)
class MooncakeSettings:
    """The settings of a client of a Mooncake Store.

    Attributes:
        host, port: the master's RPC address.
        admin_port: the master's HTTP port.
        metadata: the service by which its transfer engines find each other.
        protocol: tcp or rdma.
        device: the device for rdma; "": Mooncake chooses.
        local_hostname: name of this machine for its peers.
        buffer_bytes: size of this process's buffer, through which all objects go.
    """

    host: str
    port: int
    admin_port: int
    metadata: str
    protocol: str
    device: str
    local_hostname: str
    buffer_bytes: int


def settings_of(host: str, port: int, environ: Mapping[str, str]) -> MooncakeSettings:
    """Return the settings for the store of a master, from the environment.

    Raises:
        StoreSettingsError: a variable of the environment is invalid.
    """

    def number(name: str, default: str) -> int:
        try:
            return parse_bytes(environ.get(name) or default)
        except ValueError as error:
            raise StoreSettingsError(
                f"the environment variable {name} is not a number", f"write it as {name}={default}"
            ) from error

    return MooncakeSettings(
        host=host,
        port=port,
        admin_port=number("MOONCAKE_MASTER_METRICS_PORT", "9003"),
        metadata=environ.get("MOONCAKE_TE_META_DATA_SERVER") or "P2PHANDSHAKE",
        protocol=environ.get("MOONCAKE_PROTOCOL") or "tcp",
        device=environ.get("MOONCAKE_DEVICE", ""),
        local_hostname=environ.get("MOONCAKE_LOCAL_HOSTNAME") or "localhost",
        buffer_bytes=number("MOONCAKE_LOCAL_BUFFER_SIZE", "256MB"),
    )


class Client(Protocol):
    """The used part of mooncake.store.MooncakeDistributedStore; codes below 0 are errors."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        """Connect."""

    def put(self, key: str, value: bytes) -> int:
        """Store an object; an existing one stays, without an error."""

    def get(self, key: str) -> bytes:
        """Return an object; b"" if it does not exist, or on any failure."""

    def put_parts(self, key: str, *parts: bytes | bytearray, config: Any) -> int:
        """Store an object of several parts; see `put`."""

    def upsert_parts(self, key: str, *parts: bytes | bytearray, config: Any) -> int:
        """Store an object of several parts, and replace an existing one."""

    def get_buffer(self, key: str) -> Any:
        """Return an object as a buffer; None if it does not exist, or on any failure."""

    def get_size(self, key: str) -> int:
        """Return an object's size."""

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        """Remove objects; by force also those that were read a moment ago."""

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Read ranges of objects into registered memory; returns sizes or codes."""


class Pool(Protocol):
    """The used part of mooncake.buffer_pool.BufferPool."""

    def buffer(self, size: int) -> AbstractContextManager[Any]:
        """Lend registered memory, with its `ptr` and its bytes as `buffer`."""


@dataclass(frozen=True)
class ConnectedClient:
    """A connected client; it disconnects when it is garbage-collected.

    Attributes:
        client: Mooncake's client.
        pool: buffers of its registered memory.
        pinned: configuration of objects that are never evicted.
        usual: configuration of other objects.
    """

    client: Client
    pool: Pool
    pinned: Any
    usual: Any


class Connection:
    """One client of one master, connected at the first call. Thread-safe.

    Args:
        settings: the master's address, and the client's settings.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._connected: ConnectedClient | None = None

    def connect(self) -> ConnectedClient:
        """Return the client, connecting it if needed.

        Raises:
            StoreFailedError: the master does not answer.
        """
        with self._lock:
            if self._connected is None:
                self._connected = self._open()
            return self._connected

    def keys(self) -> bytes:
        """Return the keys of all complete objects, of any prefix, one per line.

        Raises:
            StoreFailedError: the master's admin port does not answer.
        """
        return self._request("/get_all_keys", LIST_S)

    def _open(self) -> ConnectedClient:
        """Probe both ports of the master, then connect a client."""
        from mooncake.buffer_pool import BufferPool
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        found = self._settings
        try:
            socket.create_connection((found.host, found.port), CONNECT_S).close()
        except OSError as error:
            raise self._no_answer(found.port, error) from error
        self._request("/health", CONNECT_S)
        client: Client = MooncakeDistributedStore()
        code = client.setup(
            found.local_hostname,
            found.metadata,
            0,
            found.buffer_bytes,
            found.protocol,
            found.device,
            f"{found.host}:{found.port}",
        )
        if code != OK:
            raise failed(f"{found.host}:{found.port}", code)
        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        return ConnectedClient(client, BufferPool(client), pinned, ReplicateConfig())

    def _request(self, path: str, timeout_s: float) -> bytes:
        """Send a GET request to the master's admin port, and return the answer's body."""
        host, port = self._settings.host, self._settings.admin_port
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(port, error) from error
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise StoreFailedError(
                f"the Mooncake master at {host} port {port} answers with HTTP status "
                f"{answer.status}",
                "check that MOONCAKE_MASTER_METRICS_PORT is its admin port, and read its log",
            )
        return body

    def _no_answer(self, port: int, error: Exception) -> StoreFailedError:
        return StoreFailedError(
            f"no Mooncake master answers at {self._settings.host} port {port} "
            f"({type(error).__name__})",
            "check that it runs: its RPC port is the one in the URL, its admin port "
            "MOONCAKE_MASTER_METRICS_PORT",
        )


def failed(name: str, code: int) -> StoreFailedError:
    """Return the error for a code that Mooncake has returned."""
    return StoreFailedError(
        f"the object store failed at {name} ({WORDS.get(code, 'Mooncake says')}, {code})",
        "check that the object store works, and try again",
    )


def check_installed() -> None:
    """Check that Mooncake's package is installed, and set its environment's defaults.

    Raises:
        StoreMissingError: it is not installed, or lacks libraries of the system.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # below that it fills stderr
    for name, value in _TIMEOUTS_MS.items():
        os.environ.setdefault(name, str(value))
    try:
        import mooncake.store  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise StoreMissingError(
            f"Mooncake's package is not installed ({error.msg})",
            "run: pip install 'cachedattention[mooncake]'; and install the system package "
            "libibverbs1",
        ) from error
