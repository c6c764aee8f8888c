"""Transcripts on this server: the file of each session, and the last ones in memory.

Who calls for a session has its lock, but for `cached`. What becomes of failing writes is
`disk_trouble.py`'s business.

Invariants:
    1. a transcript in memory is never ahead of its file;
    2. the cache is bounded; what is evicted from it is read again;
    3. once they are counted, the sessions of each tenant are those that have a file;
    4. a file that has nothing in it is no session, and does not stay.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

from inference_svc.core.transcript_format import Transcript, decode_transcript
from inference_svc.runtime.turns.disk_trouble import DiskTrouble
from inference_svc.runtime.turns.transcript_files import TranscriptFiles
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

MAX_CACHED_TOKENS = 8_000_000  # about half a gigabyte of Python integers at the very worst

log = get_logger(__name__)


class LocalTranscripts:
    """See the module docstring.

    Args:
        files: of the transcripts.
        max_cached_tokens: bound of the transcripts in memory.

    Attributes:
        files: likewise.
        cache: the transcripts in memory.
        trouble: failures of the disk.
    """

    def __init__(self, files: TranscriptFiles, max_cached_tokens: int) -> None:
        self.files = files
        self.cache = TranscriptCache(max_cached_tokens)
        self.trouble = DiskTrouble(files.directory)
        self._num_sessions: Counter[str] = Counter()

    def count_sessions(self) -> None:
        """Count each tenant's sessions; blocks for as long as reading every file's first line.

        Files that a crash left empty are removed.
        """
        self._num_sessions = Counter(header.tenant for header in self.files.headers())

    def num_sessions(self, tenant: str) -> int:
        """Return how many sessions a tenant has."""
        return self._num_sessions[tenant]

    async def current(self, key: SessionKey) -> Transcript | None:
        """Return a transcript from the cache, or from its file; None: there is none.

        Raises:
            TranscriptUnavailableError: it cannot be read.
        """
        return self.cache.get(key) or await self._read(key)

    async def whole(self, key: SessionKey) -> bytes | None:
        """Return a file; None: there is none.

        Raises:
            TranscriptUnavailableError: it cannot be read.
        """
        try:
            return await self.files.read(key)
        except OSError as error:
            raise self.failed(key, error, "read") from error

    async def append(self, key: SessionKey, lines: bytes, begin: Callable[[], bytes]) -> None:
        """Add lines to a file, or begin it with all of a transcript.

        Raises:
            OSError: the file is what it was.
        """
        if await self.files.append(key, lines, begin):
            self._num_sessions[key.tenant] += 1
            self.trouble.opened()

    async def take(
        self, key: SessionKey, data: bytes, transcript: Transcript, *, sets_aside: bool
    ) -> None:
        """Put a file in place of the one that there is, or begin with it.

        Args:
            key: the session's.
            data: the file.
            transcript: that it has.
            sets_aside: whether the one that there is stays beside it.

        Raises:
            TranscriptUnavailableError: it cannot be written.
        """
        self.cache.drop(key)
        opens = await self.whole(key) is None
        try:
            if sets_aside:
                aside = await self.files.set_aside(key)
                log.warning("transcript_diverged", session=str(key), moved_to=str(aside))
            await self.files.replace(key, data)
        except OSError as error:
            raise self.failed(key, error, "write") from error
        self._num_sessions[key.tenant] += opens
        self.cache.keep(key, transcript)

    async def remove(self, key: SessionKey) -> None:
        """Remove a file that there is.

        Raises:
            OSError: it is still there.
        """
        self.cache.drop(key)
        await self.files.remove(key)
        self._num_sessions[key.tenant] -= 1

    def failed(self, key: SessionKey, error: OSError, kind: str) -> ReportedError:
        """Return what a read or a write of a session's file failed with, as it is reported."""
        return self.trouble.failed(key.session_id, self.files.path(key), error, kind)

    async def _read(self, key: SessionKey) -> Transcript | None:
        """Read a file into the cache; a torn last line is cut off, so that appending is safe."""
        data = await self.whole(key)
        if data is None:
            return None
        transcript, good_bytes = await asyncio.to_thread(decode_transcript, data)
        if good_bytes < len(data):
            log.warning("transcript_torn", session=str(key), torn_bytes=len(data) - good_bytes)
            try:
                await self.files.cut(key, good_bytes)
            except OSError as error:
                raise self.failed(key, error, "write") from error
        if transcript is not None:
            self.cache.keep(key, transcript)
        return transcript


class TranscriptCache:
    """Transcripts in memory: those that were used last, as many as their tokens allow.

    The one that was kept last stays, however long it is.

    Args:
        max_tokens: bound of all of them together.
    """

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._transcripts: OrderedDict[SessionKey, Transcript] = OrderedDict()

    def get(self, key: SessionKey) -> Transcript | None:
        """Return a session's transcript, if it is here."""
        transcript = self._transcripts.get(key)
        if transcript is not None:
            self._transcripts.move_to_end(key)
        return transcript

    def keep(self, key: SessionKey, transcript: Transcript) -> None:
        """Put a transcript in place of the session's, if there is one; others may go for it."""
        self.drop(key)
        self._transcripts[key] = transcript
        self._num_tokens += transcript.num_tokens
        while self._num_tokens > self._max_tokens and len(self._transcripts) > 1:
            self.drop(next(iter(self._transcripts)))

    def drop(self, key: SessionKey) -> None:
        """Drop a session's transcript, if it is here."""
        transcript = self._transcripts.pop(key, None)
        if transcript is not None:
            self._num_tokens -= transcript.num_tokens

    def keys(self) -> list[SessionKey]:
        """Return whose transcripts are here, the one that was used last at the end."""
        return list(self._transcripts)
