"""Calls to the object store that services share, which never hold up the event loop.

No call is waited for longer than a deadline; what it does may still be done later. A store that
fails is left alone for a while: then nobody waits at all.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import OvertakenError
from shared.blobs.release import claim
from shared.process.backoff import Backoff
from shared.process.log import get_logger
from shared.types.errors import ReportedError, UnavailableError
from shared.types.histogram import Tally

THREADS = 16  # calls at once

T = TypeVar("T")

log = get_logger(__name__)


class StoreSilentError(UnavailableError):
    """The store did not answer, or refused: nobody knows what it has."""

    reason = "transcript_store_silent"


class StoreCalls:
    """See the module docstring. Methods are called on the event loop, but for `close`.

    Args:
        store: what is called.
        deadline_s: most seconds to wait for an answer.
        backoff: how long the store is left alone.

    Attributes:
        ended: calls by what they did: looked, read, replaced, asked, told, failed.
    """

    def __init__(self, store: BlobStore, deadline_s: float, backoff: Backoff) -> None:
        self._store = store
        self._is_claimed = False
        self._deadline_s = deadline_s
        self._backoff = backoff
        self._threads = ThreadPoolExecutor(THREADS, "transcripts")
        self._is_trying = False
        self.ended = Tally()

    @property
    def is_silent(self) -> bool:
        """Whether the store has not answered when it was last called."""
        return self._backoff.is_failing

    @property
    def retry_s(self) -> float:
        """Seconds until it is called again; 0: at once."""
        return max(0.0, self._backoff.retry_at_s - time.monotonic())

    async def call(self, kind: str, do: Callable[[BlobStore], T], *, is_long: bool = False) -> T:
        """Have something done with the store, on another thread.

        Args:
            kind: of call, as it is counted.
            do: what is done.
            is_long: whether it is waited for to its end.

        Raises:
            OvertakenError: as `do` says.
            StoreSilentError: nobody knows whether it is done.
        """
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

    def close(self) -> None:
        """Let go of the store; calls that nobody waits for any more are not waited for here."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _claimed(self) -> BlobStore:
        """Return the store, once it is known to be one for us; on any of the threads."""
        if not self._is_claimed:
            claim(self._store)
            self._is_claimed = True
        return self._store

    def _answered(self, kind: str) -> None:
        self.ended.add(kind)
        if self._backoff.record_success():
            log.info("transcript_store_answers")

    def _failed(self, why: str) -> StoreSilentError:
        self.ended.add("failed")
        now_s = time.monotonic()
        if now_s < self._backoff.retry_at_s:  # another call has found out: it counts once
            return _silent(why)
        if self._backoff.record_failure(now_s):
            log.warning("transcript_store_silent", error=why)
        return _silent(why)


def _silent(why: str) -> StoreSilentError:
    return StoreSilentError(
        f"the store of transcripts {why}",
        "come back later; the log of the service says what to do",
    )
