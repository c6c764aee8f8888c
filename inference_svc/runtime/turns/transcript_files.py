"""The files of transcripts: one for each session, in a directory that one service owns.

    DIGEST.jsonl               a transcript, in the format of core/transcript_format.py
    DIGEST.jsonl.diverged-N    one that went on here, and otherwise on another server
    DIGEST.behind              the object store does not have all of the transcript
    lock                       held by the service

What is written is on disk when a call returns; a call that raises OSError has changed nothing that
counts. Who calls keeps the calls for one session apart.
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
MAX_HEADER_BYTES = 4096  # of a file's first line: names are 128 at most
_BEHIND = ".behind"

log = get_logger(__name__)


class TranscriptFiles:
    """See the module docstring.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock_file: int | None = None

    def open(self) -> None:
        """Make the directory, check that it can be written, and lock it until `close`.

        Raises:
            TranscriptError: it cannot be written, others could write to it or put another one in
                its place, or another service uses it.
        """
        directory = self.directory
        try:
            if not directory.is_dir():
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                log.info("directory_made", directory=str(directory), reason="transcripts")
            for path in (directory.parent, directory):
                if path.stat().st_mode & stat.S_IWOTH:
                    raise TranscriptError(
                        f"others may write to {path}",
                        f"chmod 700 {path}, if it is for this service alone, or give --state-dir "
                        "a directory of its own",
                    )
            self._lock_file = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TranscriptError(
                f"the transcript directory {directory} is in use by another service",
                "stop that one, or give --state-dir another directory",
            ) from error
        except OSError as error:
            raise TranscriptError(
                f"the transcript directory {directory} is not writable ({error.strerror})",
                "give --state-dir a directory this user may write",
            ) from error

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def path(self, key: SessionKey) -> Path:
        """Return where a session's transcript is."""
        return self.directory / f"{digest_of(key)}.jsonl"

    def headers(self) -> Iterator[Header]:
        """Yield whose files there are; blocks. Files that a crash left empty are removed."""
        for path in self.directory.glob("*.jsonl"):
            header = _header(path)
            if header is not None:
                yield header

    def header_of(self, digest: str) -> Header | None:
        """Return whose file has this name; None if nobody's."""
        return _header(self.directory / f"{digest}.jsonl")

    async def read(self, key: SessionKey) -> bytes | None:
        """Return a file; None if there is none."""
        try:
            async with aiofiles.open(self.path(key), "rb") as file:
                return await file.read()
        except FileNotFoundError:
            return None

    async def append(self, key: SessionKey, lines: bytes, begin: Callable[[], bytes]) -> bool:
        """Add lines to a file, or begin it with all of a transcript; returns whether it began."""
        size: int | None = None
        try:
            async with aiofiles.open(self.path(key), "ab") as file:
                size = await file.tell()
                await file.write(lines if size else begin())
                await file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            if not size:
                await asyncio.to_thread(_sync_directory, self.directory)
        except OSError:
            if size is not None:
                await self.cut(key, size)
            raise
        return not size

    async def cut(self, key: SessionKey, num_bytes: int) -> None:
        """Cut a file back to its first `num_bytes`; remove it if these are none."""
        if num_bytes:
            await asyncio.to_thread(os.truncate, self.path(key), num_bytes)
        else:
            await self.remove(key)

    async def replace(self, key: SessionKey, data: bytes) -> None:
        """Put a file in place of the one that there is, if there is one."""
        await asyncio.to_thread(_replace, self.path(key), data)

    async def remove(self, key: SessionKey) -> None:
        """Remove a file, if there is one."""
        await asyncio.to_thread(_unlink, self.path(key))

    async def set_aside(self, key: SessionKey) -> Path:
        """Rename a file, so that it counts no more; nothing is overwritten."""
        return await asyncio.to_thread(_set_aside, self.path(key))

    # ----------------------------------------------------------------------------- the object store

    async def mark_behind(self, key: SessionKey) -> None:
        """Remember, also after a restart, that the object store does not have all of a file."""
        await asyncio.to_thread(_touch, self._behind(key))

    async def unmark_behind(self, key: SessionKey) -> None:
        """Forget that again."""
        await asyncio.to_thread(_unlink, self._behind(key))

    def behind(self) -> Iterator[Header]:
        """Yield whose files the object store does not have all of; blocks."""
        for path in self.directory.glob(f"*{_BEHIND}"):
            header = self.header_of(path.stem)
            if header is not None:
                yield header

    def _behind(self, key: SessionKey) -> Path:
        return self.directory / f"{digest_of(key)}{_BEHIND}"


def _header(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            line = file.readline(MAX_HEADER_BYTES)
        if not line:
            path.unlink()
    except OSError:  # reported to whoever uses the session
        return None
    return decode_header(line)


def _replace(path: Path, data: bytes) -> None:
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
