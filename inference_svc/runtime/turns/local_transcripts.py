"""Transcripts on this server: the file of each session, and the last used ones in memory.

The caller of a method for a session has the session's lock, except for `cache`. `disk_trouble.py`
handles writes that fail.

Invariants:
    1. a transcript in memory is never ahead of its file;
    2. the cache is bounded; what is evicted from it is read again;
    3. once they are counted, the sessions of each tenant are those that have a file;
    4. an empty file is no session, and is removed.
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

MAX_CACHED_TOKENS = 8_000_000  # about half a gigabyte of Python integers at worst

log = get_logger(__name__)


class LocalTranscripts:
    """The transcripts of this server's sessions: files, cache and counts.

    Args:
        files: the files of the transcripts.
        max_cached_tokens: most tokens of the transcripts in memory.

    Attributes:
        files: the files of the transcripts.
        cache: the transcripts in memory.
        trouble: failures of the disk.
        on_opened: called with the tenant and the id of a session that has got its file.
    """

    def __init__(self, files: TranscriptFiles, max_cached_tokens: int) -> None:
        self.files = files
        self.cache = TranscriptCache(max_cached_tokens)
        self.trouble = DiskTrouble(files.directory)
        self.on_opened: Callable[[str, str], object] = lambda _tenant, _session_id: None
        self._num_sessions: Counter[str] = Counter()

    def count_sessions(self) -> None:
        """Count each tenant's sessions; blocks while the first line of every file is read.

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
        return self.cache.get(key) or await self._load(key)

    async def read(self, key: SessionKey) -> bytes | None:
        """Return the bytes of a session's file; None: there is none.

        Raises:
            TranscriptUnavailableError: it cannot be read.
        """
        try:
            return await self.files.read(key)
        except OSError as error:
            raise self.record_failure(key, error, "read") from error

    async def append(self, key: SessionKey, lines: bytes, begin: Callable[[], bytes]) -> None:
        """Append lines to a session's file, or begin it with the whole transcript.

        Args:
            key: the session's key.
            lines: the lines to append.
            begin: makes the whole file, if there is none yet.

        Raises:
            OSError: nothing was written; the file is unchanged.
        """
        if await self.files.append(key, lines, begin):
            self._count_opened(key)
            self.trouble.record_room()

    async def replace(
        self, key: SessionKey, data: bytes, transcript: Transcript, *, sets_aside: bool
    ) -> None:
        """Replace a session's file, or make it.

        Args:
            key: the session's key.
            data: the new file.
            transcript: the transcript in it.
            sets_aside: whether to keep the old file under another name.

        Raises:
            TranscriptUnavailableError: it cannot be written.
        """
        self.cache.drop(key)
        opens = await self.read(key) is None
        try:
            if sets_aside:
                aside = await self.files.set_aside(key)
                log.warning("transcript_diverged", session=str(key), moved_to=str(aside))
            await self.files.replace(key, data)
        except OSError as error:
            raise self.record_failure(key, error, "write") from error
        if opens:
            self._count_opened(key)
        self.cache.keep(key, transcript)

    async def remove(self, key: SessionKey) -> None:
        """Remove a session's file, which exists.

        Raises:
            OSError: it is still there.
        """
        self.cache.drop(key)
        await self.files.remove(key)
        self._num_sessions[key.tenant] -= 1

    def _count_opened(self, key: SessionKey) -> None:
        self._num_sessions[key.tenant] += 1
        self.on_opened(key.tenant, key.session_id)

    def record_failure(self, key: SessionKey, error: OSError, kind: str) -> ReportedError:
        """Record that reading or writing a session's file failed; return the client's error."""
        return self.trouble.record_failure(key.session_id, self.files.path(key), error, kind)

    async def _load(self, key: SessionKey) -> Transcript | None:
        """Read a file into the cache; a torn last line is cut off, so that appending is safe."""
        data = await self.read(key)
        if data is None:
            return None
        transcript, good_bytes = await asyncio.to_thread(decode_transcript, data)
        if good_bytes < len(data):
            log.warning("transcript_torn", session=str(key), torn_bytes=len(data) - good_bytes)
            try:
                await self.files.cut(key, good_bytes)
            except OSError as error:
                raise self.record_failure(key, error, "write") from error
        if transcript is not None:
            self.cache.keep(key, transcript)
        return transcript


class TranscriptCache:
    """An LRU cache of transcripts, bounded by their tokens.

    The transcript that was kept last stays, even if it alone exceeds the bound.

    Args:
        max_tokens: most tokens of all of them together.
    """

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._transcripts: OrderedDict[SessionKey, Transcript] = OrderedDict()

    def get(self, key: SessionKey) -> Transcript | None:
        """Return a session's transcript; None: it is not cached."""
        transcript = self._transcripts.get(key)
        if transcript is not None:
            self._transcripts.move_to_end(key)
        return transcript

    def keep(self, key: SessionKey, transcript: Transcript) -> None:
        """Cache a session's transcript; the least recently used ones are evicted for it."""
        self.drop(key)
        self._transcripts[key] = transcript
        self._num_tokens += transcript.num_tokens
        while self._num_tokens > self._max_tokens and len(self._transcripts) > 1:
            self.drop(next(iter(self._transcripts)))

    def drop(self, key: SessionKey) -> None:
        """Drop a session's transcript, if it is cached."""
        transcript = self._transcripts.pop(key, None)
        if transcript is not None:
            self._num_tokens -= transcript.num_tokens

    def keys(self) -> list[SessionKey]:
        """Return the sessions whose transcripts are cached, the last used one at the end."""
        return list(self._transcripts)
