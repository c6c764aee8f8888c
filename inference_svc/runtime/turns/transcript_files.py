"""The files of transcripts: one for each session, in a directory that one service owns.

    DIGEST.jsonl               a transcript, in the format of core/transcript_format.py
    DIGEST.jsonl.diverged-N    set aside: it had turns that differ from those of another server
    DIGEST.behind              the object store does not have all of the transcript
    lock                       locked by the service that runs

Writes are on disk when a call returns; a call that raises OSError has changed no transcript. The
caller serialises the calls for one session.
"""

import asyncio
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import aiofiles

from inference_svc.core.errors import TranscriptError
from inference_svc.core.transcript_format import Header, decode_header, digest_of
from shared.process.log import get_logger
from shared.types.session_key import SessionKey

LOCK_FILE = "lock"
MAX_HEADER_BYTES = 4096  # of a file's first line; names in it have at most 128 characters
_BEHIND = ".behind"

log = get_logger(__name__)


class TranscriptFiles:
    """The transcript files of one directory.

    Args:
        directory: the directory, which one service owns.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock_file: int | None = None

    def open(self) -> None:
        """Make the directory, check that it can be written, and lock it until `close`.

        Raises:
            TranscriptError: it cannot be written, other users could write to it or replace it, or
                another service uses it.
        """
        directory = self.directory
        try:
            if not directory.is_dir():
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                log.info("directory_made", directory=str(directory), reason="transcripts")
            for path in (directory.parent, directory):
                if path.stat().st_mode & stat.S_IWOTH:
                    raise TranscriptError(
                        f"other users may write to {path}",
                        f"run chmod 700 {path} if only this service uses it, or give another "
                        "directory with --state-dir",
                    )
            self._lock_file = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            # The kernel drops the lock when the process dies, however it does: no stale lock stays.
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TranscriptError(
                f"another service uses the transcript directory {directory}",
                "stop that service, or give another directory with --state-dir",
            ) from error
        except OSError as error:
            raise TranscriptError(
                f"the transcript directory {directory} is not writable ({error.strerror})",
                "give a directory that this user may write to with --state-dir",
            ) from error

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def path(self, key: SessionKey) -> Path:
        """Return the path of a session's transcript."""
        return self.directory / f"{digest_of(key)}.jsonl"

    def headers(self) -> Iterator[Header]:
        """Yield the header of each file; blocks. Files that a crash left empty are removed."""
        for path in self.directory.glob("*.jsonl"):
            header = _header(path)
            if header is not None:
                yield header

    def header_of(self, digest: str) -> Header | None:
        """Return the header of the file of a digest; None: there is no such file."""
        return _header(self.directory / f"{digest}.jsonl")

    async def read(self, key: SessionKey) -> bytes | None:
        """Return the bytes of a session's file; None: there is none."""
        try:
            async with aiofiles.open(self.path(key), "rb") as file:
                return await file.read()
        except FileNotFoundError:
            return None

    async def append(self, key: SessionKey, lines: bytes, begin: Callable[[], bytes]) -> bool:
        """Append lines to a session's file, or begin it with `begin()`; return whether it began.

        Raises:
            OSError: the file is what it was.
        """
        size: int | None = None
        try:
            async with aiofiles.open(self.path(key), "ab") as file:
                size = await file.tell()
                await file.write(lines if size else begin())
                await file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            if not size:  # a new file's name is durable only once its directory is synced
                await asyncio.to_thread(_sync_directory, self.directory)
        except OSError:
            if size is not None:  # a write that failed may have left part of a line
                await self.cut(key, size)
            raise
        return not size

    async def cut(self, key: SessionKey, num_bytes: int) -> None:
        """Cut a file back to its first `num_bytes`; 0 removes it."""
        if num_bytes:
            await asyncio.to_thread(os.truncate, self.path(key), num_bytes)
        else:
            await self.remove(key)

    async def replace(self, key: SessionKey, data: bytes) -> None:
        """Make a session's file, atomically in place of the old one if there is one."""
        await asyncio.to_thread(_replace, self.path(key), data)

    async def remove(self, key: SessionKey) -> None:
        """Remove a file, if there is one."""
        await asyncio.to_thread(_unlink, self.path(key))

    async def set_aside(self, key: SessionKey) -> Path:
        """Rename a file, so that it is not the session's any more; return its new path."""
        return await asyncio.to_thread(_set_aside, self.path(key))

    # ----------------------------------------------------------------------------- the object store

    async def mark_behind(self, key: SessionKey) -> None:
        """Mark on disk that the object store does not have all of a session's file."""
        await asyncio.to_thread(_touch, self._behind(key))

    async def unmark_behind(self, key: SessionKey) -> None:
        """Remove that mark."""
        await asyncio.to_thread(_unlink, self._behind(key))

    def behind(self) -> Iterator[Header]:
        """Yield the headers of sessions that are marked as behind; blocks."""
        for path in self.directory.glob(f"*{_BEHIND}"):
            header = self.header_of(path.stem)
            if header is not None:
                yield header

    def _behind(self, key: SessionKey) -> Path:
        return self.directory / f"{digest_of(key)}{_BEHIND}"


def _header(path: Path) -> Header | None:
    """Return the header of a file; None: it is empty, and removed, or cannot be read."""
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_HEADER_BYTES)
        if not line:
            path.unlink()
    except OSError:  # reported when the session is used
        return None
    return decode_header(line)


def _replace(path: Path, data: bytes) -> None:
    """Write a file atomically and durably."""
    # Written, synced, then renamed: after a crash the path names the old file or all of the new.
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _set_aside(path: Path) -> Path:
    """Rename a file to the first free name."""
    number = 1
    while (moved := path.with_name(f"{path.name}.diverged-{number}")).exists():
        number += 1
    path.rename(moved)
    _sync_directory(path.parent)
    return moved


def _touch(path: Path) -> None:
    path.touch(mode=0o600)
    _sync_directory(path.parent)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make a new or removed name durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
