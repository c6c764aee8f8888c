"""MooncakeBlobStore: the BlobStore over Mooncake Store, the DRAM of many servers under one master.

Objects may go at any time: they are evicted when memory is full, and lost with the master or with
the server whose memory they are in. Then they are absent, as if deleted. Objects that were stored
"only if absent" decide between writers, so they are never evicted. Wrong bytes are never returned:
each object begins with a stamp (stamp.py), because Mooncake may reuse memory that is being read.

The master decides "only if absent", but does not report the outcome. So the object is read back,
and the nonce in its stamp says whose it is.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import SplitResult, unquote

from shared.blobs import mooncake_client as mooncake
from shared.blobs.blob_store import (
    Blob,
    BlobDamagedError,
    BlobExistsError,
    BlobMissingError,
    BlobStore,
    Data,
    bad_url,
)
from shared.blobs.mooncake_client import Connection
from shared.blobs.stamp import NONCE_BYTES, STAMP_BYTES, read_stamp, stamp_bytes

PORT = 50051
PAGE = 1000  # objects in a page of a listing
PATIENCE_S = 5.0  # most seconds of retries: memory is being freed, another writer stores the same
PAUSE_S = 0.05  # between two tries
_TORN = 1  # a code of our own: the bytes read do not match their stamp
_RETRYABLE = (  # codes after which a retry may succeed
    *(mooncake.NO_ROOM, mooncake.SHORT, mooncake.NOT_READY, mooncake.BUSY, mooncake.COPIED),
    *(mooncake.EXPIRED, _TORN),
)
_PREFIX = re.compile(r"[\w./-]*", re.ASCII)

Answer = tuple[int, bytes | memoryview]  # a code, and the object's bytes


def open_mooncake(parts: SplitResult, patience_s: float | None) -> BlobStore:
    """Open the store of a Mooncake master; see shared/blobs/opening.py."""
    try:
        host, port = parts.hostname, parts.port or PORT
    except ValueError as error:
        raise bad_url("names no port") from error
    if not host:
        raise bad_url("names no master")
    prefix = unquote(parts.path).strip("/")
    if not _PREFIX.fullmatch(prefix):
        raise bad_url("has a prefix with characters other than letters, digits, . _ - and /")
    mooncake.check_installed()
    connection = Connection(mooncake.settings_of(host, port, os.environ))
    place = f"{prefix}/" if prefix else ""
    return MooncakeBlobStore(connection, place, patience_s=patience_s or PATIENCE_S)


class MooncakeBlobStore:
    """A BlobStore over one Mooncake master.

    Args:
        connection: the connection to the master.
        prefix: prefix of all keys; "" or with "/" at its end.
        patience_s: most seconds of retries after failures that may pass.

    Attributes:
        prefix: prefix of all keys.
    """

    keeps = False

    def __init__(
        self,
        connection: Connection,
        prefix: str,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._connection = connection
        self.prefix = prefix
        self._patience_s = patience_s

    @property
    def client(self) -> mooncake.Client:
        """Mooncake's own client, connected; benchmarks compare this class with it."""
        return self._connection.connect().client

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store an object."""
        key, there = self.prefix + name, self._connection.connect()
        stamp = stamp_bytes(key, data, time.time_ns(), secrets.token_bytes(NONCE_BYTES))
        store = there.client.put_parts if if_absent else there.client.upsert_parts
        config = there.pinned if if_absent else there.usual
        code, _ = self._retry(lambda: (store(key, stamp, data, config=config), b""))
        if code != mooncake.OK:
            raise mooncake.failed(name, code)
        if if_absent and self._stamp_of(name) != stamp:
            raise BlobExistsError(
                f"the object store already has {name}", "read it again, then decide"
            )

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return an object, or a part of it; always reads all of it, to check its stamp."""
        if num_bytes == 0:
            return b""
        data = self.view(name)[start:]
        return bytes(data if num_bytes is None else data[:num_bytes])

    def view(self, name: str) -> memoryview:
        """Return an object without a copy, in the connection's bounded buffer."""
        code, data = self._retry(lambda: self._read(name))
        if code == mooncake.NOT_FOUND:
            raise BlobMissingError(
                f"the object store has no {name}", "list what it has with: kvd remote ls"
            )
        if code == _TORN:
            raise BlobDamagedError(
                f"{name} in the object store is damaged", "remove it, or store it there again"
            )
        if code != mooncake.OK:
            raise mooncake.failed(name, code)
        return memoryview(data)

    def find(self, name: str) -> Blob | None:
        """Return an object's name, size and time."""
        return next(iter(self._blobs([name])), None)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, also those that are being read: readers notice by the stamp."""
        client = self.client
        codes = client.batch_remove([self.prefix + name for name in names], force=True)
        for name, code in zip(names, codes, strict=True):
            # An object that is being stored at the moment: the deletion came before it.
            if code not in (mooncake.OK, mooncake.NOT_FOUND, mooncake.NOT_READY):
                raise mooncake.failed(name, code)

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        """Yield objects, a page at a time; the master sends the keys of all its users."""
        start = (self.prefix + prefix).encode()
        keys = [key for key in self._connection.keys().split(b"\n") if key.startswith(start)]
        names = [key.decode().removeprefix(self.prefix) for key in keys]
        for first in range(0, len(names), PAGE):
            yield self._blobs(names[first : first + PAGE])

    # ------------------------------------------------------------------------------------- private

    def _retry(self, ask: Callable[[], Answer]) -> Answer:
        """Repeat a call while its code may pass, up to `patience_s`; return the last answer."""
        until_s = time.monotonic() + self._patience_s
        while (answer := ask())[0] in _RETRYABLE and time.monotonic() < until_s:
            time.sleep(PAUSE_S)
        return answer

    def _read(self, name: str) -> Answer:
        """Return an object's code and bytes; _TORN if they do not match their stamp."""
        key, client = self.prefix + name, self.client
        found = client.get_buffer(key)
        if found is None:
            size = client.get_size(key)
            return (size if size < 0 else mooncake.SHORT), b""
        view = memoryview(found).cast("B")
        stamp, data = read_stamp(key, bytes(view[:STAMP_BYTES])), view[STAMP_BYTES:]
        return (mooncake.OK, data) if stamp is not None and stamp.matches(data) else (_TORN, b"")

    def _stamp_of(self, name: str) -> bytes:
        """Return the stamp of an existing object."""
        code, stamp = self._head(name)
        if code != mooncake.OK:
            raise mooncake.failed(name, code)
        return stamp

    def _blobs(self, names: Sequence[str]) -> Sequence[Blob]:
        """Return the objects that exist; one without a valid stamp with its name only."""
        blobs = []
        for name, found in zip(names, self._heads(names), strict=True):
            # A lease that is too short for a page of heads may be long enough for one.
            code, head = self._head(name) if found[0] == mooncake.EXPIRED else found
            if code in (mooncake.NOT_FOUND, mooncake.NOT_READY):
                continue
            if code not in (mooncake.OK, mooncake.SHORT):
                raise mooncake.failed(name, code)
            stamp = read_stamp(self.prefix + name, head)
            if stamp is None:
                blobs.append(Blob(name, 0, 0.0))
            else:
                blobs.append(Blob(name, stamp.num_bytes, stamp.unix_ns / 1e9))
        return blobs

    def _head(self, name: str) -> tuple[int, bytes]:
        """Return a code and the first STAMP_BYTES of an object, with retries."""
        code, head = self._retry(lambda: self._heads([name])[0])
        return code, bytes(head)

    def _heads(self, names: Sequence[str]) -> Sequence[tuple[int, bytes]]:
        """Return a code and the first STAMP_BYTES of each object."""
        there, num = self._connection.connect(), len(names)
        with there.pool.buffer(num * STAMP_BYTES) as lent:
            [sizes] = there.client.get_into_ranges(
                [lent.ptr],
                [[self.prefix + name for name in names]],
                [[[i * STAMP_BYTES] for i in range(num)]],
                [[[0]] * num],
                [[[STAMP_BYTES]] * num],
            )
            heads = bytes(lent.buffer[: num * STAMP_BYTES])
        return [
            (mooncake.OK, heads[i * STAMP_BYTES : (i + 1) * STAMP_BYTES])
            if size == STAMP_BYTES
            else (size, b"")
            for i, [size] in enumerate(sizes)
        ]
