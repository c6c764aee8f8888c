"""RememberedFile: what a start has found out, kept in a file for the next start.

Entries by name in one JSON file, below a line with its checksum; those that were used last are
kept. What was found out can be found out again: a file that is missing, damaged, of another format
or on a disk that takes no more costs time, and nothing else.

Invariant: the file is replaced as a whole, durably, and what does not match its own checksum is not
believed.
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
    """See the module docstring.

    Args:
        path: of the file; its directory is the service's own.
        what: is remembered there, for the log.
        file_format: what entries look like; others are not believed.
        most: entries that are kept.
    """

    def __init__(self, path: Path, what: str, file_format: bytes, most: int) -> None:
        self._path = path
        self._what = what
        self._format = file_format
        self._most = most
        self._entries = self._read()

    def find(self, name: str) -> dict[str, Any] | None:
        """Return an entry; None: it is not remembered."""
        return self._entries.get(name)

    def remember(self, found: Mapping[str, dict[str, Any] | None]) -> None:
        """Keep entries, durably; those that are None are forgotten."""
        before = list(self._entries.items())
        for name, entry in found.items():
            self._entries.pop(name, None)  # the last used ones stand last
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
        """Replace the file, so that a crash leaves the old one or the new one."""
        body = json.dumps(self._entries).encode()
        new = self._path.with_name(self._path.name + ".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
            file.write(self._checksum(body) + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _checksum(self, body: bytes) -> bytes:
        return hashlib.sha256(self._format + body).hexdigest().encode()

    def _warn(self, event: str, **fields: str | None) -> None:
        log.warning(event, what=self._what, path=str(self._path), **fields)
