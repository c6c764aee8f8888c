"""Mooncake's own client of one master: what its environment says, connecting, its codes as errors.

It lends the store no memory of this process, which would go with it. All its settings but the
master's address come from the environment, by the names that Mooncake and those who use it know.

Mooncake has no call that lists keys: the master's admin port does, all of them at once. And a
client that finds no master tries for 90 seconds: so both ports are tried first.
"""

import http.client
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from shared.blobs.errors import StoreFailedError, StoreMissingError, StoreSettingsError
from shared.types.units import parse_bytes

OK, SHORT, NOT_FOUND, NOT_READY = 0, -600, -704, -703
NO_ROOM, BUSY, COPIED = -200, -714, -708
WORDS = {
    -1: "Mooncake does not say why",
    NO_ROOM: "its memory is full, or nobody lends it any",
    SHORT: "the buffer of this process is full",
    NOT_FOUND: "it was removed at once",
    NOT_READY: "somebody else is storing it",
    -800: "who has its memory does not answer",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}
CONNECT_S = 3.0
LIST_S = 30.0  # a listing is of all keys of all users
_TIMEOUTS_MS = {"MC_RPC_TIMEOUT_MS": 10_000, "MC_RPC_CONNECT_TIMEOUT_MS": 3_000}


@dataclass(frozen=True)
class MooncakeSettings:
    """How to reach a Mooncake Store.

    Attributes:
        host, port: of the master.
        admin_port: of the master, HTTP.
        metadata: where its transfer engines find each other.
        protocol: tcp or rdma.
        device: for rdma; "": Mooncake chooses.
        local_hostname: of this machine, for its peers.
        buffer_bytes: of this process, through which all objects go.
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
    """Return how to reach the store of a master.

    Raises:
        StoreSettingsError: the environment says what cannot be.
    """

    def number(name: str, default: str) -> int:
        try:
            return parse_bytes(environ.get(name) or default)
        except ValueError as error:
            raise StoreSettingsError(f"{name} is no number", f"as in {name}={default}") from error

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
    """What is used of mooncake.store.MooncakeDistributedStore; codes below 0 are errors."""

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
        """Store an object; one that is there stays, and that is no error."""

    def get(self, key: str) -> bytes:
        """Return an object; nothing if it is not there, or anything is wrong."""

    def put_parts(self, key: str, *parts: bytes | bytearray, config: Any) -> int:
        """Store an object of several parts; see `put`."""

    def upsert_parts(self, key: str, *parts: bytes | bytearray, config: Any) -> int:
        """Store an object of several parts in any case."""

    def get_buffer(self, key: str) -> Any:
        """Return an object as a buffer; None if it is not there, or anything else is wrong."""

    def get_size(self, key: str) -> int:
        """Return an object's size."""

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        """Remove objects; by force, those that somebody has read just now, too."""

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
    """What is used of mooncake.buffer_pool.BufferPool."""

    def buffer(self, size: int) -> AbstractContextManager[Any]:
        """Lend registered memory, with its `ptr` and its bytes as `buffer`."""


@dataclass(frozen=True)
class Connected:
    """A client that is connected; it disconnects itself when nobody has it any more.

    Attributes:
        client: it.
        pool: of its registered memory.
        pinned: how objects are stored that are never evicted.
        usual: how others are.
    """

    client: Client
    pool: Pool
    pinned: Any
    usual: Any


class Connection:
    """One client of one master, made at the first call. Any thread.

    Args:
        settings: how to reach it.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._connected: Connected | None = None

    def connected(self) -> Connected:
        """Return the client.

        Raises:
            StoreFailedError: there is no master.
        """
        with self._lock:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    def keys(self) -> bytes:
        """Return the keys of all objects that are there whole, of whatever prefix, a line each.

        Raises:
            StoreFailedError: the master's admin port does not answer.
        """
        return self._asked("/get_all_keys", LIST_S)

    def _connect(self) -> Connected:
        from mooncake.buffer_pool import BufferPool
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        found = self._settings
        try:
            socket.create_connection((found.host, found.port), CONNECT_S).close()
        except OSError as error:
            raise self._no_answer(found.port, error) from error
        self._asked("/health", CONNECT_S)
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
        return Connected(client, BufferPool(client), pinned, ReplicateConfig())

    def _asked(self, path: str, timeout_s: float) -> bytes:
        """Ask the master's admin port."""
        host, port = self._settings.host, self._settings.admin_port
        asking = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            asking.request("GET", path)
            answer = asking.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(port, error) from error
        finally:
            asking.close()
        if answer.status != http.client.OK:
            raise StoreFailedError(
                f"the Mooncake master at {host} port {port} answers with {answer.status}",
                "see that MOONCAKE_MASTER_METRICS_PORT is its admin port, and its log",
            )
        return said

    def _no_answer(self, port: int, error: Exception) -> StoreFailedError:
        return StoreFailedError(
            f"no Mooncake master answers at {self._settings.host} port {port} "
            f"({type(error).__name__})",
            "see that it runs: its RPC port is of the URL, its admin port "
            "MOONCAKE_MASTER_METRICS_PORT",
        )


def failed(name: str, code: int) -> StoreFailedError:
    """Return the error of a call that Mooncake has answered with a code."""
    return StoreFailedError(
        f"the store failed at {name} ({WORDS.get(code, 'Mooncake says')}, {code})",
        "see that it answers, and try again",
    )


def check_installed() -> None:
    """Make sure that Mooncake's package is there, and ready for the first client.

    Raises:
        StoreMissingError: it is not, or lacks libraries of the system.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it writes to stderr whatever it thinks of
    for name, value in _TIMEOUTS_MS.items():
        os.environ.setdefault(name, str(value))
    try:
        import mooncake.store  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise StoreMissingError(
            f"Mooncake's package is not installed ({error.msg})",
            "pip install 'cachedattention[mooncake]', and libibverbs1 of the system",
        ) from error
