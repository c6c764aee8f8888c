"""Transcripts on disk: the token ids of every session (D8), so that nothing is lost without kvd.

Owns `<directory>/<digest of the key>.jsonl`, in the format of `core/transcript_format.py`. A turn
is on disk when `append` returns; the fsyncs of turns that end together run together and share the
file system's commit.

Invariants:
    1. a transcript in memory is never ahead of its file;
    2. one session's reads and writes are serialised, so that a read never overtakes a write;
    3. the cache is bounded; what is evicted from it is read again;
    4. once they are counted, the sessions of each tenant are those that have a file;
    5. a file that has nothing in it is no session, and does not stay.

What becomes of failing writes is `disk_trouble.py`'s business.
"""

import asyncio
import fcntl
import hashlib
import os
import stat
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

import aiofiles

from inference_svc.core.discards import Discard
from inference_svc.core.errors import TranscriptError, UnknownSessionError
from inference_svc.core.transcript_format import (
    Header,
    Transcript,
    decode_header,
    decode_transcript,
    encode_discard,
    encode_end,
    encode_transcript,
    encode_turn,
)
from inference_svc.core.turn_record import TurnRecord
from inference_svc.runtime.turns.disk_trouble import DiskTrouble
from shared.process.log import get_logger
from shared.types.session_key import SessionKey

MAX_CACHED_TOKENS = 8_000_000  # about half a gigabyte of Python integers at the very worst
LOCK_FILE = "lock"  # held by the service that owns the directory
MAX_HEADER_BYTES = 4096  # of a file's first line: names are 128 at most
NUM_LOCKS = 64  # sessions that share one only wait for each other's file

log = get_logger(__name__)


class TranscriptStore:
    """See the module docstring. Methods are called on the event loop.

    Attributes:
        trouble: failures of the disk.
    """

    def __init__(self, directory: Path, max_cached_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._directory = directory
        self._max_cached_tokens = max_cached_tokens
        self._cached_tokens = 0
        self._cache: OrderedDict[SessionKey, Transcript] = OrderedDict()
        self._lock_file: int | None = None
        self._locks = [asyncio.Lock() for _ in range(NUM_LOCKS)]
        self._num_sessions: Counter[str] = Counter()
        self.trouble = DiskTrouble(directory)

    def open(self) -> None:
        """Make the directory, check that it can be written, and lock it until `close`.

        Raises:
            TranscriptError: it cannot be written, others could write to it or put another one in
                its place, or another service uses it.
        """
        try:
            if not self._directory.is_dir():
                self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                log.info("directory_made", directory=str(self._directory), reason="transcripts")
            for path in (self._directory.parent, self._directory):
                if path.stat().st_mode & stat.S_IWOTH:
                    raise TranscriptError(
                        f"others may write to {path}",
                        f"chmod 700 {path}, if it is for this service alone, or give --state-dir "
                        "a directory of its own",
                    )
            self._lock_file = os.open(self._directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TranscriptError(
                f"the transcript directory {self._directory} is in use by another service",
                "stop that one, or give --state-dir another directory",
            ) from error
        except OSError as error:
            raise TranscriptError(
                f"the transcript directory {self._directory} is not writable ({error.strerror})",
                "give --state-dir a directory this user may write",
            ) from error

    def count_sessions(self) -> None:
        """Count each tenant's sessions; blocks for as long as reading every file's first line.

        Files that a crash left empty are removed.
        """
        self._num_sessions = Counter(header.tenant for header in _headers(self._directory))

    def num_sessions(self, tenant: str) -> int:
        """Return how many sessions a tenant has."""
        return self._num_sessions[tenant]

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    async def find(self, key: SessionKey) -> Transcript | None:
        """Find the session's transcript, None if there is no such session.

        Does not yield to the event loop after it has the answer, so the caller may act on it.
        """
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        async with self._lock(key):
            return await self._current(key)

    async def get(self, key: SessionKey) -> Transcript:
        """Return the session's transcript.

        Raises:
            UnknownSessionError: there is no such session.
        """
        transcript = await self.find(key)
        if transcript is None:
            raise UnknownSessionError(
                f"there is no session {key.session_id!r} of tenant {key.tenant!r} under this model",
                "submit a turn to open it, or check the id",
            )
        return transcript

    async def append(self, key: SessionKey, turn: TurnRecord, *, is_final: bool) -> Transcript:
        """Record a turn, durably; opens the session if it is the first.

        Raises:
            TranscriptUnavailableError: nothing was recorded.
        """
        async with self._lock(key):
            before = await self._current(key)
            after = (before or Transcript(Header(*key))).with_turn(turn, is_final=is_final)
            await self._write(key, after, encode_turn(turn) + (encode_end() if is_final else b""))
            return after

    async def discard(self, key: SessionKey, discard: Discard) -> Transcript:
        """Record, durably, a discard of a session's context between turns.

        Raises:
            UnknownSessionError: there is no such session.
            TranscriptUnavailableError: nothing was recorded.
        """
        after = (await self.get(key)).with_discard(discard)
        async with self._lock(key):
            await self._write(key, after, encode_discard(discard))
            return after

    async def end(self, key: SessionKey) -> None:
        """Record, durably, that the session takes no further turn.

        Raises:
            UnknownSessionError: there is no such session.
            TranscriptUnavailableError: nothing was recorded.
        """
        await self.get(key)
        async with self._lock(key):
            before = await self._current(key)
            if before is None or before.has_ended:
                return
            after = before.ended()
            await self._write(key, after, encode_end())

    async def fork(self, key: SessionKey, session_id: str, at_turn: int) -> Transcript | None:
        """Start a new session from another's first turns; None if the new one exists already."""
        new_key = key._replace(session_id=session_id)
        forked = (await self.get(key)).forked(session_id, at_turn)
        await asyncio.to_thread(getattr, forked, "context")  # replaying discards may take long
        async with self._lock(new_key):
            if await self._current(new_key):
                return None
            await self._write(new_key, forked, b"")
            return forked

    async def delete(self, key: SessionKey) -> None:
        """Remove a session for good.

        Raises:
            UnknownSessionError: there is no such session.
        """
        await self.get(key)
        async with self._lock(key):
            self._uncache(key)
            path = self._path(key)
            try:
                await asyncio.to_thread(_unlink, path)
            except OSError as error:
                raise self.trouble.failed(key.session_id, path, error, "write") from error
            self._num_sessions[key.tenant] -= 1

    async def _current(self, key: SessionKey) -> Transcript | None:
        """Return the transcript from the cache, or from its file; the caller has its lock."""
        return self._cache.get(key) or await self._read(key)

    async def _read(self, key: SessionKey) -> Transcript | None:
        """Read a file into the cache; a torn last line is cut off, so that appending is safe."""
        path = self._path(key)
        try:
            async with aiofiles.open(path, "rb") as file:
                data = await file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.trouble.failed(key.session_id, path, error, "read") from error
        transcript, good_bytes = await asyncio.to_thread(decode_transcript, data)
        if good_bytes < len(data):
            log.warning("transcript_torn", session=str(key), torn_bytes=len(data) - good_bytes)
            await self._cut(key, good_bytes)
        if transcript is not None:
            self._keep_cached(key, transcript)
        return transcript

    async def _write(self, key: SessionKey, transcript: Transcript, lines: bytes) -> None:
        """Append the lines, or start the file with all of the transcript; fsync, then cache it.

        On failure the file is cut back to what it was. The session leaves the cache meanwhile: a
        task that is cancelled here does not know what the file will have.

        Raises:
            TranscriptDiskFullError: there is no room for them.
            TranscriptUnavailableError: they cannot be written for another reason.
        """
        size: int | None = None
        path = self._path(key)
        self._uncache(key)
        try:
            async with aiofiles.open(path, "ab") as file:
                size = await file.tell()
                await file.write(lines if size else encode_transcript(transcript))
                await file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            if size == 0:
                await asyncio.to_thread(_sync_directory, self._directory)
                self._num_sessions[key.tenant] += 1
                self.trouble.opened()
            self._keep_cached(key, transcript)
        except OSError as error:
            if size is not None:
                await self._cut(key, size)
            raise self.trouble.failed(key.session_id, path, error, "write") from error

    async def _cut(self, key: SessionKey, num_bytes: int) -> None:
        """Cut a file back to its first `num_bytes`; remove it if these are none."""
        path = self._path(key)
        try:
            if num_bytes:
                await asyncio.to_thread(os.truncate, path, num_bytes)
            else:
                await asyncio.to_thread(_unlink, path)
        except OSError as error:
            raise self.trouble.failed(key.session_id, path, error, "write") from error

    def _keep_cached(self, key: SessionKey, transcript: Transcript) -> None:
        self._cache[key] = transcript
        self._cached_tokens += transcript.num_tokens
        while self._cached_tokens > self._max_cached_tokens and len(self._cache) > 1:
            self._uncache(next(iter(self._cache)))

    def _uncache(self, key: SessionKey) -> None:
        transcript = self._cache.pop(key, None)
        if transcript is not None:
            self._cached_tokens -= transcript.num_tokens

    def _path(self, key: SessionKey) -> Path:
        digest = hashlib.blake2b("\0".join(key).encode(), digest_size=16).hexdigest()
        return self._directory / f"{digest}.jsonl"

    def _lock(self, key: SessionKey) -> asyncio.Lock:
        return self._locks[hash(key) % NUM_LOCKS]


def _headers(directory: Path) -> Iterator[Header]:
    for path in directory.glob("*.jsonl"):
        try:
            with path.open("rb") as file:
                line = file.readline(MAX_HEADER_BYTES)
            if not line:
                path.unlink()
        except OSError:  # reported to whoever uses the session
            continue
        header = decode_header(line)
        if header is not None:
            yield header


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
