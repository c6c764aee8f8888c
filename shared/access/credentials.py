"""TLS of our gRPC and HTTP servers, from the same files; and a count of failed handshakes.

A renewed certificate, key or list of authorities takes effect with the next connection, without a
restart or a reload. Files that do not fit together (a renewal under way) are logged, and the
previous ones stay in use.

gRPC reports no failed handshake. It does report that a connection begins, when it asks for the
certificates, and it reports the peer of each call. A connection without a call within CALL_S has
failed its handshake (a client without a certificate, one that does not trust ours, a peer that does
not speak TLS), or belongs to a peer that only tests the port: gRPC clients connect in order to
call. So the count is that of failures, except for clients that call long after they connect.
"""

import os
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from shared.access.settings import TlsSettings
from shared.process.log import RefusalLog, get_logger
from shared.types.errors import ConfigError

CALL_S = 15.0  # gRPC ends a handshake after 10 s: shared/serving/grpc_handlers.py
MAX_PEERS = 4096  # kept; more than may be connected


class TlsConnections:
    """Counts the TLS connections at all ports of a process. May be used from any thread."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._begun: deque[float] = deque()  # times of connections without a call, oldest first
        self._called: OrderedDict[str, None] = OrderedDict()  # peers, by their last call
        self._num_unused = 0
        self._log = RefusalLog("tls_connection_unused")

    def on_begin(self) -> None:
        """Record that a connection begins."""
        with self._lock:
            self._begun.append(self._clock_s())
        self.count_unused()

    def on_call(self, peer: str) -> None:
        """Record a call. `peer` is gRPC's name for it, different for each connection."""
        with self._lock:
            is_new = peer not in self._called
            self._called[peer] = None
            self._called.move_to_end(peer)
            if len(self._called) > MAX_PEERS:
                self._called.popitem(last=False)
            if is_new and self._begun:
                self._begun.pop()  # the newest, because calls come right after their handshake

    def count_unused(self) -> int:
        """Return how many connections so far had no call in time."""
        with self._lock:
            until_s = self._clock_s() - CALL_S
            before = self._num_unused
            while self._begun and self._begun[0] <= until_s:
                self._begun.popleft()
                self._num_unused += 1
            num_new = self._num_unused - before
        if num_new:
            self._log.note("no_call", connections=str(num_new))
        return self._num_unused


CREDENTIALS = "CREDENTIALS_DIRECTORY"  # systemd's variable for files of LoadCredential=

T = TypeVar("T")

log = get_logger(__name__)


class TlsFilesError(ConfigError):
    """Certificate, key or authorities cannot be used."""

    reason = "tls_files"


class TlsFiles:
    """The files of [tls], with their state when they were last read."""

    def __init__(self, tls: TlsSettings) -> None:
        assert tls.certificate is not None, "is_on"  # noqa: S101
        assert tls.key is not None, "is_on"  # noqa: S101
        self._certificate = file_of(tls.certificate)
        self._key = file_of(tls.key)
        self._client_ca = None if tls.client_ca is None else file_of(tls.client_ca)
        self._stamps: tuple[tuple[int, int, int], ...] = ()

    def context(self) -> ssl.SSLContext:
        """Return a TLS context of the files, which proves that they fit together.

        Raises:
            TlsFilesError: they do not, or cannot be read.
        """
        self._stamps = self._read_stamps()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        named = f"tls.certificate {self._certificate} with tls.key {self._key}"
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
            if self._client_ca is not None:
                named = f"tls.client_ca {self._client_ca}"
                context.load_verify_locations(self._client_ca)
                _ask_each_time(context)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = error.strerror if isinstance(error, OSError) else None
            raise TlsFilesError(
                f"{named} cannot be used ({why or error})",
                "give PEM files that belong together and that this user may read",
            ) from error
        return context

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return gRPC's configuration of the files.

        Raises:
            TlsFilesError: they cannot be used.
        """
        self.context()
        try:
            authorities = None if self._client_ca is None else self._client_ca.read_bytes()
            pair = (self._key.read_bytes(), self._certificate.read_bytes())
        except OSError as error:  # removed since they were read for the context
            raise TlsFilesError(
                "files named in [tls] no longer exist", "put them back, or correct [tls]"
            ) from error
        return grpc.ssl_server_certificate_configuration([pair], authorities)

    def reload_if_changed(self, read: Callable[[], T]) -> T | None:
        """Return what `read` makes of the files if they have changed; None: keep what is in use."""
        if self._read_stamps() == self._stamps:
            return None
        try:
            renewed = read()
        except TlsFilesError as error:
            log.warning("tls_files_not_renewed", error=str(error))
            return None
        log.info("tls_files_renewed")
        return renewed

    def _read_stamps(self) -> tuple[tuple[int, int, int], ...]:
        paths = (self._certificate, self._key, self._client_ca)
        return tuple(_stamp(path) for path in paths if path is not None)


def server_credentials(
    tls: TlsSettings, connections: TlsConnections | None = None
) -> grpc.ServerCredentials:
    """Return the credentials of a gRPC server's port. `connections` counts its connections.

    Raises:
        TlsFilesError: the files cannot be used.
    """
    files = TlsFiles(tls)

    def renew() -> Any:
        """Return a new configuration, or None: no change. gRPC calls it for each connection."""
        if connections is not None:
            connections.on_begin()
        return files.reload_if_changed(files.grpc_configuration)

    return grpc.dynamic_ssl_server_credentials(
        files.grpc_configuration(),
        renew,
        require_client_authentication=tls.client_ca is not None,
    )


def ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """Return the TLS context of an HTTP server's port.

    Raises:
        TlsFilesError: the files cannot be used.
    """
    files = TlsFiles(tls)
    first = current = files.context()

    def renew(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        """Replace the context if need be. TLS calls it before it chooses a certificate."""
        nonlocal current
        current = files.reload_if_changed(files.context) or current
        if current is not first:
            connection.context = current

    first.sni_callback = renew
    return first


def file_of(path: Path) -> Path:
    """Return the path of a file. A bare name is that of a credential that systemd has loaded."""
    directory = os.environ.get(CREDENTIALS)
    return path if len(path.parts) > 1 or directory is None else Path(directory) / path


def _ask_each_time(context: ssl.SSLContext) -> None:
    """Require a certificate at each connection.

    A client that resumes a session shows no certificate, so it would keep its access after its
    authority was removed from the list. TLS 1.2 can resume sessions even without tickets, and
    Python cannot turn that off.
    """
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def _no_password() -> str:
    """Fail instead of asking on a terminal for the key's password, which would hang the start."""
    raise ValueError("the key is protected by a password")
