"""A turn under way: a log of events that any number of clients follow from its beginning.

The log is bounded by the length of the answer. A turn whose last follower leaves is cancelled,
unless it is being recorded already. Its deadline is the latest of its followers'. A turn that is
handed back ends with an error in place of its answer: its client has to submit it again. A turn
that was answered before is replayed from its record (`replay`).
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

from inference_svc.core.errors import RequestIdReusedError
from inference_svc.core.submission import Submission
from inference_svc.core.turn_record import (
    Accepted,
    AnswerToken,
    Finished,
    Started,
    Tokens,
    TurnEvent,
    TurnRecord,
)
from shared.types.errors import ReportedError
from shared.types.units import NS_PER_S

if TYPE_CHECKING:
    from inference_svc.core.scheduling.request import Request


class Turn:
    """One turn and the log of its events.

    Attributes:
        submission: the submission that started it.
        may_run: set when the turns before it in its session are over.
        is_settled: whether it is being written to the transcript: then it cannot be cancelled.
        is_cancelled: whether it was asked to stop: no further client should join it.
        handed_back: the error that its followers get if it is handed back; None: it is not.
        task: the task that runs it; None for the replay of a recorded turn.
        deadline_ns: time on the monotonic clock; None: no deadline. It can only be moved later.
        request: its request in the engine; None: there is none yet.
    """

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.may_run = asyncio.Event()
        self.is_settled = False
        self.is_cancelled = False
        self.handed_back: ReportedError | None = None
        self.task: asyncio.Task[ReportedError | None] | None = None
        self.deadline_ns = submission.deadline_ns
        self.request: Request | None = None
        self._events: list[TurnEvent] = []
        self._error: ReportedError | None = None
        self._is_over = False
        self._num_followers = 0
        self._news = asyncio.Event()

    def publish(self, *events: TurnEvent) -> None:
        """Append events to the log; ignored after the last event.

        A turn that was cancelled may still publish some.
        """
        if not self.is_answered:
            self._events += events
            self._wake_followers()

    def close(self, error: ReportedError | None = None) -> None:
        """End the log; followers get the error after the last event, unless that is Finished."""
        if not self.is_answered:
            self._error = error
        self._is_over = True
        self._wake_followers()

    def join(self) -> None:
        """Count a follower; the caller owes `leave`."""
        self._num_followers += 1

    def leave(self) -> None:
        """Count a follower less; when the last one leaves, the turn is cancelled."""
        self._num_followers -= 1
        if self._num_followers == 0:
            self.cancel()

    def cancel(self) -> bool:
        """Ask the turn to stop; return whether it will."""
        if self._is_over or self.is_settled or self.task is None:
            return False
        self.is_cancelled = True
        return self.task.cancel()

    def hand_back(self, error: ReportedError) -> bool:
        """Ask the turn to stop and give its followers the error; return whether it will."""
        if not self.cancel():
            return False
        self.handed_back = error
        return True

    @property
    def has_started(self) -> bool:
        """Whether anything of it has been computed."""
        return self.request is not None and self.request.started_ns > 0

    @property
    def computed_tokens(self) -> int:
        """Number of tokens computed for it; 0 if it has not finished, or nothing was computed."""
        last = self._events[-1] if self._events else None
        return last.usage.computed_tokens if isinstance(last, Finished) and self.has_started else 0

    def extend_deadline(self, deadline_ns: int | None) -> None:
        """Move the deadline to that of a repeated submission, if that is later."""
        if self.deadline_ns is None or (deadline_ns is not None and deadline_ns < self.deadline_ns):
            return
        self.deadline_ns = deadline_ns
        if self.request is not None:
            self.request.deadline_ns = deadline_ns

    @property
    def is_answered(self) -> bool:
        """Whether its last event has been published."""
        return bool(self._events) and isinstance(self._events[-1], Finished)

    async def wait_for_session(self) -> bool:
        """Wait until the turn may run; return False if its deadline passes before."""
        while not self.may_run.is_set():
            deadline_ns = self.deadline_ns  # it may be extended during each wait
            left_s = None
            if deadline_ns is not None:
                left_s = (deadline_ns - time.monotonic_ns()) / NS_PER_S
                if left_s <= 0:
                    return False
            with suppress(TimeoutError):  # the loop decides whether the deadline has passed
                async with asyncio.timeout(left_s):
                    await self.may_run.wait()
        return True

    async def follow(self) -> AsyncIterator[TurnEvent]:
        """Yield all events from the first to the last.

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
        # Each wait has an event of its own: clearing a shared one could lose a wake-up.
        news, self._news = self._news, asyncio.Event()
        news.set()


def replay(submission: Submission, record: TurnRecord) -> Turn:
    """Make a turn that is over from the record of an answered one; it has the same events."""
    logprobs = record.logprobs or (None,) * len(record.output_ids)
    top = record.top_logprobs or ((),) * len(record.output_ids)
    tokens = zip(record.output_ids, record.pieces, logprobs, top, strict=True)
    usage = record.usage
    turn = Turn(submission)
    turn.publish(
        Accepted(submission.key.session_id, record.turn, record.request_id, 0, is_replayed=True),
        Started(usage.history_tokens, usage.reused_tokens, usage.queue_s, usage.new_tokens),
        Tokens(tuple(AnswerToken(*token) for token in tokens)),
        Finished(record.finish_reason, record.text, usage, record.turn + 1, record.stop_string),
    )
    turn.close()
    return turn


def check_same(submission: Submission, digest: str) -> None:
    """Check that a repeated submission has the input and sampling of the turn of its request id.

    Args:
        submission: the repeat.
        digest: the digest of the turn's own submission.

    Raises:
        RequestIdReusedError: it has another input or sampling.
    """
    if submission.digest and submission.digest != digest:
        raise RequestIdReusedError(
            f"request id {submission.request_id!r} was used before with another input or sampling",
            "use a new request id for each new turn",
        )
