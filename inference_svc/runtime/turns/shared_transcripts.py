"""Transcripts in an object store, where several services have one of each session: the newest.

    v1/transcripts/TENANT/DIGEST/NUMBER    versions of a session's (shared/blobs/register.py)

    value = eight random bytes, then the file, compressed; nothing behind them: it was deleted

Who adds a turn replaces what it has seen, or is told that somebody else has. No call is waited for
longer than a deadline; what it does may still be done later. A store that fails is left alone for a
while: then nobody waits at all.
"""

import asyncio
import hashlib
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from inference_svc.core.transcript_format import (
    Transcript,
    TranscriptDamagedError,
    decode_transcript,
)
from inference_svc.runtime.turns.transcript_files import digest_of
from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import OvertakenError
from shared.blobs.register import Register, Seen, is_version
from shared.blobs.release import DELETED_BYTES, TRANSCRIPTS, claim
from shared.process.backoff import Backoff
from shared.process.log import get_logger
from shared.types.errors import ReportedError, UnavailableError
from shared.types.histogram import Tally
from shared.types.session_key import SessionKey

THREADS = 16  # calls at once
MAX_FILE_BYTES = 1 << 30  # of a transcript: more is no transcript

T = TypeVar("T")

log = get_logger(__name__)


class StoreSilentError(UnavailableError):
    """The store did not answer, or refused: nobody knows what it has."""

    reason = "transcript_store_silent"


@dataclass(frozen=True)
class SharedTranscript:
    """A session's transcript as the store has it.

    Attributes:
        seen: its version.
        data: the file; None: the session was deleted.
        transcript: that the file has.
    """

    seen: Seen
    data: bytes | None = None
    transcript: Transcript | None = None


class SharedTranscripts:
    """See the module docstring. Methods are called on the event loop, but for `close`.

    Args:
        store: where they are.
        deadline_s: most seconds to wait for an answer.
        backoff: how long the store is left alone.

    Attributes:
        calls: to the store by what they did: looked, read, replaced, failed.
    """

    def __init__(self, store: BlobStore, deadline_s: float, backoff: Backoff) -> None:
        self._store = store
        self._is_claimed = False
        self._deadline_s = deadline_s
        self._backoff = backoff
        self._threads = ThreadPoolExecutor(THREADS, "transcripts")
        self._is_trying = False
        self.calls = Tally()

    @property
    def is_silent(self) -> bool:
        """Whether the store has not answered when it was last called."""
        return self._backoff.is_failing

    @property
    def retry_s(self) -> float:
        """Seconds until it is called again; 0: at once."""
        return max(0.0, self._backoff.retry_at_s - time.monotonic())

    async def look(self, key: SessionKey) -> Seen:
        """Return which versions of a session's transcript there are.

        Raises:
            StoreSilentError: nobody knows.
        """
        return await self._call("looked", lambda store: register_of(store, key).look())

    async def read(self, key: SessionKey) -> SharedTranscript | None:
        """Return the newest; None: there never was one, or it was deleted long ago.

        Raises:
            StoreSilentError: nobody knows.
            TranscriptDamagedError: it is not what was put there.
        """
        version = await self._call("read", lambda store: register_of(store, key).read())
        if version is None:
            return None
        data, transcript = await asyncio.to_thread(decode_value, version.data, key)
        return SharedTranscript(version.seen, data, transcript)

    async def replace(self, key: SessionKey, before: Seen, data: bytes | None) -> Seen:
        """Put a transcript in place of the version that was seen.

        Args:
            key: the session's.
            before: that version.
            data: the file; None: the session is deleted.

        Raises:
            OvertakenError: another service has replaced it.
            StoreSilentError: nobody knows whether it was replaced.
        """
        value = await asyncio.to_thread(encode_value, data)
        return await self._call(
            "replaced", lambda store: register_of(store, key).replace(before, value)
        )

    async def deleted(self) -> list[str]:
        """Return what the files of deleted sessions are called.

        Raises:
            StoreSilentError: nobody knows.
        """
        return await self._call("looked", lambda store: list(_deleted(store)), is_long=True)

    def close(self) -> None:
        """Let go of the store; calls that nobody waits for any more are not waited for here."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, kind: str, do: Callable[[BlobStore], T], *, is_long: bool = False) -> T:
        if self.retry_s or (self.is_silent and self._is_trying):  # one tries whether it is back
            raise _silent("is left alone")
        self._is_trying = True
        try:
            calling = asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: do(self._claimed())
            )
            result = await asyncio.wait_for(calling, None if is_long else self._deadline_s)
        except TimeoutError as error:
            raise self._failed(f"has not answered for {self._deadline_s:g} s") from error
        except OvertakenError:  # the store is well
            self._answered(kind)
            raise
        except ReportedError as error:
            raise self._failed(error.message) from error
        finally:
            self._is_trying = False
        self._answered(kind)
        return result

    def _claimed(self) -> BlobStore:
        """Return the store, once it is known to be one for us; on any of the threads."""
        if not self._is_claimed:
            claim(self._store)
            self._is_claimed = True
        return self._store

    def _answered(self, kind: str) -> None:
        self.calls.add(kind)
        if self._backoff.succeeded():
            log.info("transcript_store_answers")

    def _failed(self, why: str) -> StoreSilentError:
        self.calls.add("failed")
        now_s = time.monotonic()
        if now_s < self._backoff.retry_at_s:  # another call has found out: it counts once
            return _silent(why)
        if self._backoff.failed(now_s):
            log.warning("transcript_store_silent", error=why)
        return _silent(why)


def _silent(why: str) -> StoreSilentError:
    return StoreSilentError(
        f"the store of transcripts {why}",
        "come back later; the log of the service says what to do",
    )


def register_of(store: BlobStore, key: SessionKey) -> Register:
    """Return where a session's transcript is."""
    return Register(store, f"{TRANSCRIPTS}/{_tenant(key.tenant)}/{digest_of(key)}")


def _tenant(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def encode_value(data: bytes | None) -> bytes:
    """Encode a file, unlike every other value; None: the session is deleted."""
    return secrets.token_bytes(DELETED_BYTES) + (b"" if data is None else zlib.compress(data))


def decode_value(value: bytes, key: SessionKey) -> tuple[bytes | None, Transcript | None]:
    """Decode a session's file and its transcript; None: it was deleted.

    Raises:
        TranscriptDamagedError: it is none, or another session's.
    """
    if len(value) == DELETED_BYTES:
        return None, None
    decompressor = zlib.decompressobj()
    try:
        data = decompressor.decompress(value[DELETED_BYTES:], MAX_FILE_BYTES)
    except zlib.error as error:
        raise _damaged() from error
    transcript, good_bytes = decode_transcript(data)
    is_whole = decompressor.eof and good_bytes == len(data)
    if transcript is None or transcript.header.key != key or not is_whole:
        raise _damaged()
    return data, transcript


def _damaged() -> TranscriptDamagedError:
    return TranscriptDamagedError(
        "the session's transcript in the object store is damaged",
        "delete the session, or remove its objects from the store",
    )


def _deleted(store: BlobStore) -> Iterator[str]:
    """Yield the digests of sessions whose newest version says that they were deleted."""
    newest: dict[str, tuple[str, int]] = {}
    for page in store.list(f"{TRANSCRIPTS}/"):
        for blob in page:
            if is_version(blob.name):
                place, _, number = blob.name.rpartition("/")
                newest[place] = max(newest.get(place, ("", 0)), (number, blob.num_bytes))
    for place, (_, num_bytes) in newest.items():
        if num_bytes == DELETED_BYTES:
            yield place.rpartition("/")[2]
