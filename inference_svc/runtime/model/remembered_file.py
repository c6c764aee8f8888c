"""RememberedFile: a file in which one start of the service caches results for the next start.

Named entries in a JSON file, below a line with its checksum; the most recently used ones are kept.
All entries can be found out again: a file that is missing, damaged, of another format or on a full
disk costs time only.

Invariant: the file is replaced as a whole, durably; contents that do not match their checksum are
ignored.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.process.log import get_logger

log = get_logger(__name__)


class RememberedFile:
    """A bounded cache of named entries in a file.

    Args:
        path: the file, in a directory of the service.
        what: what the entries are, for the log.
        file_format: identifies the format of entries; files of other formats are ignored.
        most: number of entries that are kept.
    """

    def __init__(self, path: Path, what: str, file_format: bytes, most: int) -> None:
        self._path = path
        self._what = what
        self._format = file_format
        self._most = most
        self._entries = self._read()

    def find(self, name: str) -> dict[str, Any] | None:
        """Return an entry; None: there is none of this name."""
        return self._entries.get(name)

    def remember(self, entries: Mapping[str, dict[str, Any] | None]) -> None:
        """Store entries durably; remove those that are None."""
        before = list(self._entries.items())
        for name, entry in entries.items():
            self._entries.pop(name, None)  # the most recently used entries stand last
            if entry is not None:
                self._entries[name] = entry
        for name in list(self._entries)[: -self._most]:
            del self._entries[name]
        if list(self._entries.items()) == before:
            return
        try:
            self._write()
        except OSError as error:
            self._warn("remembered_file_not_kept", error=error.strerror)

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            checksum, _, body = self._path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn("remembered_file_unreadable", error=error.strerror)
            return {}
        if checksum != self._checksum(body):
            self._warn("remembered_file_damaged")
            return {}
        entries: dict[str, dict[str, Any]] = json.loads(body)
        return entries

    def _write(self) -> None:
        """Replace the file atomically: a crash leaves either the old or the new contents."""
        body = json.dumps(self._entries).encode()
        new = self._path.with_name(self._path.name + ".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
            file.write(self._checksum(body) + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        # Without it the rename itself could be lost in a power failure.
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _checksum(self, body: bytes) -> bytes:
        return hashlib.sha256(self._format + body).hexdigest().encode()

    def _warn(self, event: str, **fields: str | None) -> None:
        log.warning(event, what=self._what, path=str(self._path), **fields)
