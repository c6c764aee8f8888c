"""One turn under way: a log of events that any number of clients follow from its beginning.

The log is bounded by the length of the answer. A turn whose last follower leaves is cancelled,
unless it is being recorded already.
"""

import asyncio
from collections.abc import AsyncIterator

from inference_svc.core.submission import Submission
from inference_svc.core.turn_events import Finished, TurnEvent
from shared.errors import ReportedError


class Turn:
    """See the module docstring.

    Attributes:
        may_run: set when the turns before it in its session are over.
        is_recorded: being written to the transcript: it can no longer be cancelled.
        is_cancelled: asked to stop: nobody should join it.
        task: the task that runs it; None for the replay of a recorded turn.
    """

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.may_run = asyncio.Event()
        self.is_recorded = False
        self.is_cancelled = False
        self.task: asyncio.Task[ReportedError | None] | None = None
        self._events: list[TurnEvent] = []
        self._error: ReportedError | None = None
        self._is_over = False
        self._num_followers = 0
        self._news = asyncio.Event()

    def publish(self, *events: TurnEvent) -> None:
        """Append events."""
        self._events += events
        self._wake_followers()

    def close(self, error: ReportedError | None = None) -> None:
        """End the log; followers get the error after the last event, unless that is Finished."""
        if not (self._events and isinstance(self._events[-1], Finished)):
            self._error = error
        self._is_over = True
        self._wake_followers()

    def join(self) -> None:
        """Count a follower; it owes `leave`."""
        self._num_followers += 1

    def leave(self) -> None:
        """Count a follower out."""
        self._num_followers -= 1
        if self._num_followers == 0:
            self.cancel()

    def cancel(self) -> bool:
        """Ask the turn to stop; return whether it will."""
        if self._is_over or self.is_recorded or self.task is None:
            return False
        self.is_cancelled = True
        return self.task.cancel()

    async def follow(self) -> AsyncIterator[TurnEvent]:
        """All events from the first to the last.

        Raises:
            ReportedError: the turn failed.
        """
        num_read = 0
        while True:
            while num_read < len(self._events):
                num_read += 1
                yield self._events[num_read - 1]
            if self._error is not None:
                raise self._error
            if self._is_over:
                return
            await self._news.wait()

    def _wake_followers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
