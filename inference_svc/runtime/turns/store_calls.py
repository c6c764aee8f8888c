"""Calls to the object store that services share; they never block the event loop.

The caller waits for no call longer than a deadline; the call itself may still complete later. A
store that fails is not called for a while: then calls fail at once.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shared.blobs.blob_store import BlobStore, OvertakenError
from shared.blobs.release import claim
from shared.process.backoff import Backoff
from shared.process.log import get_logger
from shared.types.errors import ReportedError, UnavailableError
from shared.types.histogram import Tally

THREADS = 16  # calls at once

T = TypeVar("T")

log = get_logger(__name__)


class StoreSilentError(UnavailableError):
    """The store did not answer, or failed: what it has is not known."""

    reason = "transcript_store_silent"


class StoreCalls:
    """Calls a store on threads, with a deadline and a backoff. Methods run on the event loop.

    Args:
        store: the store.
        deadline_s: most seconds to wait for an answer.
        backoff: for how long a store that failed is not called.

    Attributes:
        ended: number of calls by result: looked, read, replaced, asked, told, failed.
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
        """Whether the last call to the store failed."""
        return self._backoff.is_failing

    @property
    def retry_s(self) -> float:
        """Seconds until the store may be called again; 0: now."""
        return max(0.0, self._backoff.retry_at_s - time.monotonic())

    async def call(self, kind: str, do: Callable[[BlobStore], T], *, is_long: bool = False) -> T:
        """Call the store on another thread.

        Args:
            kind: the kind of call, as it is counted in `ended`.
            do: calls the store; runs on a thread.
            is_long: whether to wait for it without a deadline.

        Returns:
            The result of `do`.

        Raises:
            OvertakenError: as `do` raises it; the store is well.
            StoreSilentError: the store failed, or was not called; it is not known what was done.
        """
        # After the backoff one call tries whether the store is back; the others fail until then.
        if self.retry_s or (self.is_silent and self._is_trying):
            raise _silent_error("it is not called again yet, because it failed a moment ago")
        self._is_trying = True
        try:
            calling = asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: do(self._claim_store())
            )
            result = await asyncio.wait_for(calling, None if is_long else self._deadline_s)
        except TimeoutError as error:
            raise self._record_failure(f"it has not answered for {self._deadline_s:g} s") from error
        except OvertakenError:  # an answer of the store, which is well
            self._record_success(kind)
            raise
        except ReportedError as error:
            raise self._record_failure(error.message) from error
        finally:
            self._is_trying = False
        self._record_success(kind)
        return result

    def close(self) -> None:
        """Stop the threads; calls that have passed their deadline are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _claim_store(self) -> BlobStore:
        """Return the store after checking once that it is one of this release; on any thread."""
        if not self._is_claimed:
            claim(self._store)
            self._is_claimed = True
        return self._store

    def _record_success(self, kind: str) -> None:
        """Count a call, and end the backoff."""
        self.ended.add(kind)
        if self._backoff.record_success():
            log.info("transcript_store_answers")

    def _record_failure(self, why: str) -> StoreSilentError:
        """Count a failed call, begin or extend the backoff, and return the error."""
        self.ended.add("failed")
        now_s = time.monotonic()
        if now_s < self._backoff.retry_at_s:  # failures of calls at the same time count once
            return _silent_error(why)
        if self._backoff.record_failure(now_s):
            log.warning("transcript_store_silent", error=why)
        return _silent_error(why)


def _silent_error(why: str) -> StoreSilentError:
    return StoreSilentError(
        f"the object store for transcripts cannot be used: {why}",
        "try again later; the log of the service says what to do",
    )
