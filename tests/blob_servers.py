"""Servers of object stores for tests: an S3 server, and Mooncake's master with its memory.

Tests of a server whose package is not installed are skipped. `environ` holds the variables that
reach a server: they are set in this process while the block lasts, and can be given to other
processes.

Mooncake's master listens on 127.0.0.1 only; the process that lends it memory cannot choose its
address.
"""

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from shared.blobs.blob_store import StoreMissingError
from shared.blobs.mooncake_client import check_installed

SECRET = "a-secret-key"  # noqa: S105
STARTED_S = 30.0
LEASE_MS = 5000  # Mooncake's own
MIB = 1 << 20


class S3Server:
    """An S3 server in this process, with one bucket.

    Attributes:
        environ: variables that reach it.
        url: of a prefix in the bucket. No other process uses the bucket.
    """

    def __init__(self) -> None:
        self.url = f"s3://sessions/{secrets.token_hex(4)}"
        (port,) = free_ports(1)
        self._port = port
        self.environ = {
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
        }

    def start(self) -> None:
        """Start the server."""
        from moto.moto_server.threaded_moto_server import MotoRequestHandler
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        moto, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

        def one_at_a_time(environ: dict[str, Any], start_response: Any) -> Any:
            with turn:  # between moto's check of If-None-Match and its put, another may put
                return moto(environ, start_response)

        self._server = make_server(
            *("127.0.0.1", self._port, one_at_a_time),
            threaded=True,
            request_handler=MotoRequestHandler,
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def make_bucket(self) -> None:
        """Create the bucket."""
        connection = HTTPConnection("127.0.0.1", self._port)
        with closing(connection):
            connection.request("PUT", "/sessions")
            assert connection.getresponse().status == 200

    def resume(self) -> None:
        """Start the server again, with the objects it held."""
        self.start()

    def interrupt(self) -> None:
        """Stop the server; its objects stay in this process."""
        self._server.shutdown()
        self._thread.join()


class MooncakeServer:
    """A Mooncake master and a process that lends it memory.

    Args:
        lease_ms: time for which an object stays in its place for a reader, in milliseconds.

    Attributes:
        environ: variables that reach it.
        url: of a prefix in it.
    """

    def __init__(self, lease_ms: int) -> None:
        self._lease_ms = lease_ms
        self._rpc, self._admin, self._lender = free_ports(3)
        self._processes = ExitStack()
        self._master: subprocess.Popen[bytes] | None = None
        self.url = f"mooncake://127.0.0.1:{self._rpc}/prod"
        self.environ = {
            "MOONCAKE_MASTER_METRICS_PORT": str(self._admin),
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_LOCAL_BUFFER_SIZE": "128MB",
        }

    def start(self, memory_bytes: int = 64 * MIB) -> None:
        """Start both processes."""
        self.start_master()
        self._run(
            "mooncake_client",
            *("--host=127.0.0.1", f"--port={self._lender}", "--metadata_server=P2PHANDSHAKE"),
            f"--master_server_address=127.0.0.1:{self._rpc}",
            f"--global_segment_size={memory_bytes}",
        )
        self._wait_until("/get_all_segments", wants_text=True)

    def start_master(self) -> None:
        """Start the master, which knows no objects yet."""
        self._master = self._run(
            "mooncake_master",
            *("--rpc_address=127.0.0.1", f"--rpc_port={self._rpc}", "--metrics_host=127.0.0.1"),
            *(f"--metrics_port={self._admin}", f"--default_kv_lease_ttl={self._lease_ms}"),
        )
        self._wait_until("/health")

    def resume(self) -> None:
        """Start the master again, and return when it has memory again."""
        self.start_master()
        self._wait_until("/get_all_segments", wants_text=True)

    def interrupt(self) -> None:
        """Kill the master; all objects are lost."""
        self._master.kill()
        self._master.wait()

    def freeze_master(self, *, frozen: bool) -> None:
        """Suspend the master, or resume it; return when it is suspended."""
        self._master.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)
        if frozen:  # until the signal is delivered, its threads may answer
            os.waitid(os.P_PID, self._master.pid, os.WSTOPPED)

    def stop(self) -> None:
        """Stop both processes."""
        self._processes.close()

    def _run(self, program: str, *options: str) -> subprocess.Popen[bytes]:
        path = Path(importlib.util.find_spec("mooncake").origin).with_name(program)
        process = subprocess.Popen(
            (path, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._processes.callback(lambda: (process.kill(), process.wait()))
        return process

    def _wait_until(self, path: str, *, wants_text: bool = False) -> None:
        until_s = time.monotonic() + STARTED_S
        while time.monotonic() < until_s:
            try:
                with closing(HTTPConnection("127.0.0.1", self._admin)) as connection:
                    connection.request("GET", path)
                    answer = connection.getresponse()
                    if answer.status == 200 and (answer.read() or not wants_text):
                        return
            except OSError:
                pass
            time.sleep(0.01)
        raise AssertionError(f"no Mooncake master answers {path}")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run an S3 server with a bucket."""
    pytest.importorskip("moto.server")
    server = S3Server()
    server.start()
    try:
        server.make_bucket()
        with _store_environment(server.environ):
            yield server
    finally:
        server.interrupt()


@contextmanager
def mooncake_server(lease_ms: int = LEASE_MS) -> Iterator[MooncakeServer]:
    """Run a Mooncake store with a little memory."""
    try:
        check_installed()
    except StoreMissingError as error:
        pytest.skip(str(error))
    server = MooncakeServer(lease_ms)
    try:
        server.start()
        with _store_environment(server.environ):
            yield server
    finally:
        server.stop()


SERVERS = {"s3": s3_server, "mooncake": mooncake_server}


@contextmanager
def _store_environment(environ: dict[str, str]) -> Iterator[None]:
    """Set the variables that let this process reach a server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield


def free_ports(number: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free at the moment."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.socket()) for _ in range(number)]
        for server in servers:
            server.bind(("127.0.0.1", 0))
        return [int(server.getsockname()[1]) for server in servers]
