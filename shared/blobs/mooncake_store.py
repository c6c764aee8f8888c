"""The BlobStore over Mooncake Store: the DRAM of many servers, which one master knows.

What it holds may go at any time: it is evicted when memory is full, and lost with the master or
with the server whose memory it was in. Then it is not there, as if it had been deleted; what was
made "only if absent" decides something, and is never evicted. Nothing wrong is ever returned: each
object has a stamp before it (stamp.py), for Mooncake may give memory to others that is being read.

"Only if absent" is decided by the master, which however does not tell: what lies there is read
again, and its nonce says whose it is.
"""

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import SplitResult, unquote

from shared.blobs import mooncake_client as mooncake
from shared.blobs.blob_store import Blob, BlobStore, Data
from shared.blobs.errors import (
    BlobDamagedError,
    BlobExistsError,
    BlobMissingError,
    bad_url,
)
from shared.blobs.mooncake_client import Connection
from shared.blobs.stamp import NONCE_BYTES, STAMP_BYTES, read_stamp, stamp_bytes

PORT = 50051
PAGE = 1000  # objects in a page of a listing
PATIENCE_S = 5.0  # with what passes: memory that is being freed, somebody who is storing the same
PAUSE_S = 0.05
_TORN = 1  # a code of our own: what was read is not what was stored
_PASSING = (
    *(mooncake.NO_ROOM, mooncake.SHORT, mooncake.NOT_READY, mooncake.BUSY, mooncake.COPIED),
    _TORN,
)
_PREFIX = re.compile(r"[\w./-]*", re.ASCII)

Answer = tuple[int, bytes | memoryview]  # a code, and what was asked for


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
        raise bad_url("has a prefix of other characters than letters, digits, . _ - and /")
    mooncake.check_installed()
    connection = Connection(mooncake.settings_of(host, port, os.environ))
    place = f"{prefix}/" if prefix else ""
    return MooncakeBlobStore(connection, place, patience_s=patience_s or PATIENCE_S)


class MooncakeBlobStore:
    """See BlobStore and the module docstring.

    Args:
        connection: to the master.
        prefix: of all keys; "" or with "/" at its end.
        patience_s: with what passes by itself.

    Attributes:
        prefix: the same.
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
        """Mooncake's own client, connected; to be measured beside this."""
        return self._connection.connected().client

    def put(self, name: str, data: Data, *, if_absent: bool = False) -> None:
        """Store an object."""
        key, there = self.prefix + name, self._connection.connected()
        stamp = stamp_bytes(key, data, time.time_ns(), secrets.token_bytes(NONCE_BYTES))
        store = there.client.put_parts if if_absent else there.client.upsert_parts
        config = there.pinned if if_absent else there.usual
        code, _ = self._in_the_end(lambda: (store(key, stamp, data, config=config), b""))
        if code != mooncake.OK:
            raise mooncake.failed(name, code)
        if if_absent and self._stamp_of(name) != stamp:
            raise BlobExistsError(f"the store has {name} already", "look again")

    def get(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return an object, or a part of it: all of it is read, to know that it is whole."""
        if num_bytes == 0:
            return b""
        data = self.view(name)[start:]
        return bytes(data if num_bytes is None else data[:num_bytes])

    def view(self, name: str) -> memoryview:
        """Return an object where it lies, in memory of which a connection has a bounded part."""
        code, data = self._in_the_end(lambda: self._read(name))
        if code == mooncake.NOT_FOUND:
            raise BlobMissingError(f"the store has no {name}", "see: kvd remote ls")
        if code == _TORN:
            raise BlobDamagedError(
                f"{name} in the store is not what was put there", "remove it, or put it there again"
            )
        if code != mooncake.OK:
            raise mooncake.failed(name, code)
        return memoryview(data)

    def find(self, name: str) -> Blob | None:
        """Return what a listing would say of it."""
        return next(iter(self._blobs([name])), None)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, by force: whoever is reading one finds out that it is none any more."""
        client = self.client
        codes = client.batch_remove([self.prefix + name for name in names], force=True)
        for name, code in zip(names, codes, strict=True):
            # Of what somebody is storing just now, storing comes last.
            if code not in (mooncake.OK, mooncake.NOT_FOUND, mooncake.NOT_READY):
                raise mooncake.failed(name, code)

    def list(self, prefix: str) -> Iterator[Sequence[Blob]]:
        """Yield objects, a page at a time; the master is asked for the keys of all its users."""
        start = (self.prefix + prefix).encode()
        keys = [key for key in self._connection.keys().split(b"\n") if key.startswith(start)]
        names = [key.decode().removeprefix(self.prefix) for key in keys]
        for first in range(0, len(names), PAGE):
            yield self._blobs(names[first : first + PAGE])

    # -------------------------------------------------------------------------------------- inside

    def _in_the_end(self, ask: Callable[[], Answer]) -> Answer:
        """Ask until the answer is none that passes by itself, or patience is at its end."""
        until_s = time.monotonic() + self._patience_s
        while (answer := ask())[0] in _PASSING and time.monotonic() < until_s:
            time.sleep(PAUSE_S)
        return answer

    def _read(self, name: str) -> Answer:
        """Return an object's bytes if they are as they were stored."""
        key, client = self.prefix + name, self.client
        found = client.get_buffer(key)
        if found is None:
            size = client.get_size(key)
            return (size if size < 0 else mooncake.SHORT), b""
        view = memoryview(found).cast("B")
        stamp, data = read_stamp(key, bytes(view[:STAMP_BYTES])), view[STAMP_BYTES:]
        return (mooncake.OK, data) if stamp is not None and stamp.is_of(data) else (_TORN, b"")

    def _stamp_of(self, name: str) -> bytes:
        """Return the stamp of an object that is there."""
        code, stamp = self._in_the_end(lambda: self._heads([name])[0])
        if code != mooncake.OK:
            raise mooncake.failed(name, code)
        return bytes(stamp)

    def _blobs(self, names: Sequence[str]) -> Sequence[Blob]:
        """Return those objects that are there; of one without its stamp nothing but its name."""
        blobs = []
        for name, (code, head) in zip(names, self._heads(names), strict=True):
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

    def _heads(self, names: Sequence[str]) -> Sequence[tuple[int, bytes]]:
        """Return the first bytes of objects."""
        there, num = self._connection.connected(), len(names)
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
