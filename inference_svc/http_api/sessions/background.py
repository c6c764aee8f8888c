"""Background responses: computed without a waiting client; started, followed, cancelled.

A background response is queued, then in progress, and ends like any other response. A failed or
cancelled response is stored, too. A client that follows a response gets its events from the first
one, one token at a time, and may reconnect: the same response has the same events with the same
sequence numbers, also after its end.

Responses that were being computed when the service was killed, or stopped without a drain, have
failed.

*Source:* OpenAI API guides, "Background mode".
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference_svc.core.turn_record import AnswerToken, Finished, Tokens
from inference_svc.http_api.errors import TooManyRequestsError
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import (
    CANCELLED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    ResponseInfo,
    UnansweredResponse,
)
from inference_svc.http_api.sessions.store import ApiStore
from shared.serving.grpc_status import InternalError
from shared.types.errors import ReportedError

RETRY_S = 1.0  # seconds after which a refused client may try again

Event = Mapping[str, Any]


class BackgroundObjects(Protocol):
    """Builds the JSON objects and stream events of one response, in the format of its API."""

    session_id: str

    def without_answer(self, status: str, error: Event | None = None) -> dict[str, Any]:
        """Build the response object in a given status, without an answer."""

    def background_opening(self) -> Iterable[Event]:
        """Build the events of the response's beginning."""

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterable[Event]:
        """Build the events of the next tokens."""

    def closing(self, finished: Finished) -> Iterable[Event]:
        """Build the events of the response's end."""

    def failure(self, error: ReportedError) -> Event:
        """Build the last event of a response that failed."""

    def cancellation(self) -> Event:
        """Build the last event of a response that was cancelled."""


class Answer(Protocol):
    """The answer of a turn in progress; leaving its context cancels the turn.

    Attributes:
        session_id: the turn's session.
    """

    session_id: str

    def events(self) -> AsyncIterator[Tokens | Finished]:
        """Yield the tokens, then the end; the answer is stored before the end is yielded."""


# Starts a turn, and calls the callback once it is queued: `Answers.open`.
OpenAnswer = Callable[
    [Caller, HttpTurn, Callable[[], None]], Awaitable[AbstractAsyncContextManager[Answer]]
]
MakeObjects = Callable[[str], BackgroundObjects]
Reported = Callable[[Exception], ReportedError]


@dataclass(eq=False)
class RunningResponse:
    """A background response that is being computed.

    Attributes:
        caller: the client and its tenant.
        turn: the response's turn.
        info: the response's members beside its answer.
        objects: returns the builder of the response's objects, given its session id.
        session_id: the session of the turn; "" while the turn is queued.
        is_cancelled: whether the client has cancelled the response.
        task: the task that computes the response.
        is_queued: whether the turn was accepted; a later error is a failure, no refusal.
    """

    caller: Caller
    turn: HttpTurn
    info: ResponseInfo
    objects: MakeObjects
    session_id: str = ""
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None
    is_queued: bool = False
    _tokens: list[AnswerToken] = field(default_factory=list)
    _finished: Finished | None = None
    _error: ReportedError | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> tuple[str, str]:
        """The tenant, and the response's id."""
        return self.caller.tenant, self.turn.response_id

    @property
    def is_answered(self) -> bool:
        """Whether the answer is complete, and stored."""
        return self._finished is not None

    @property
    def current_object(self) -> dict[str, Any]:
        """The response object in its current status."""
        return self.objects(self.session_id).without_answer(
            IN_PROGRESS if self.session_id else QUEUED
        )

    async def run(self, open_answer: OpenAnswer, reported: Reported) -> None:
        """Start the turn, and collect its answer.

        Args:
            open_answer: starts the turn.
            reported: converts any exception to an error that clients may see.

        Raises:
            ReportedError: the turn failed.
        """
        try:
            async with await open_answer(self.caller, self.turn, self._on_queued) as answer:
                self.session_id = answer.session_id
                async for event in answer.events():
                    if isinstance(event, Finished):
                        self._finished = event
                    else:
                        self._tokens += event.tokens
                    self._wake_followers()
        except asyncio.CancelledError:
            self._error = response_stopped()
            raise
        except Exception as error:  # kept for followers: no client waits for this task
            self._error = reported(error)
            raise self._error from error
        finally:
            self._wake_followers()

    async def wait_queued(self) -> None:
        """Wait until the turn is queued or refused.

        Raises:
            ReportedError: the turn was refused.
        """
        while not self.is_queued:
            if self._error is not None:
                raise self._error
            await self._news.wait()

    async def events(self, after: int) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the events whose sequence number is above `after`; see the module docstring."""
        async for event in self._all_events():
            if event["sequence_number"] > after:
                yield event

    async def _all_events(self) -> AsyncIterator[Mapping[str, Any]]:
        objects, num_read = self.objects(self.session_id), 0
        for opening in objects.background_opening():
            yield opening
        while True:
            for event in events_of_tokens(objects, self._tokens[num_read:]):
                yield event
            num_read, objects.session_id = len(self._tokens), self.session_id
            if self._finished is not None:
                for closing in objects.closing(self._finished):
                    yield closing
                return
            if self._error is not None:
                yield objects.cancellation() if self.is_cancelled else objects.failure(self._error)
                return
            await self._news.wait()

    def end(self) -> None:
        """Wake all waiters: the response is over, perhaps before its task has begun."""
        if not self.is_answered and self._error is None:
            self._error = response_stopped()
        self._wake_followers()

    def _on_queued(self) -> None:
        self.is_queued = True
        self._wake_followers()

    def _wake_followers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def events_of_tokens(
    objects: BackgroundObjects, tokens: Sequence[AnswerToken]
) -> Iterator[Mapping[str, Any]]:
    """Build the events of tokens one token at a time, so that they do not depend on batching."""
    for token in tokens:
        yield from objects.piece([token])


class BackgroundResponses:
    """Runs background responses.

    Args:
        open_answer: starts turns.
        store: stores responses that have no answer.
        max_running: most responses that run at once.
        reported: converts any exception to an error that clients may see.
    """

    def __init__(
        self, open_answer: OpenAnswer, store: ApiStore, max_running: int, reported: Reported
    ) -> None:
        self._open_answer = open_answer
        self._store = store
        self._max_running = max_running
        self._reported = reported
        self._running: dict[tuple[str, str], RunningResponse] = {}
        self._is_closing = False

    async def close(self) -> None:
        """Stop all running responses; they have failed then, as after a kill."""
        self._is_closing = True
        tasks = [response.task for response in self._running.values() if response.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def find(self, tenant: str, response_id: str) -> RunningResponse | None:
        """Return a tenant's running response; None if none of that id runs."""
        return self._running.get((tenant, response_id))

    async def start(self, running: RunningResponse, release: Callable[[], None]) -> RunningResponse:
        """Start a response, and return it when it is queued.

        A repeat of a running response returns the running one.

        Args:
            running: the response.
            release: called when the response is over, or cannot be started.

        Raises:
            ReportedError: the response was refused.
        """
        found = self._running.get(running.key)
        if found is not None:
            release()
            return found
        if len(self._running) >= self._max_running:
            release()
            raise TooManyRequestsError(
                f"{self._max_running} responses are running in the background, and no more are "
                "accepted",
                "try again later",
                retry_after_s=RETRY_S,
            )
        self._running[running.key] = running
        running.task = asyncio.create_task(self._run(running))

        # A done callback, not a `finally` in the task: a task that is cancelled before its first
        # step runs none of its code.
        def settle(_task: asyncio.Task[None]) -> None:
            del self._running[running.key]
            running.end()
            release()

        running.task.add_done_callback(settle)
        await running.wait_queued()
        return running

    async def cancel(self, running: RunningResponse) -> None:
        """Cancel a response, and return when it is over; its answer may still be complete."""
        running.is_cancelled = True
        assert running.task is not None, "it was started"  # noqa: S101
        running.task.cancel()
        await asyncio.wait({running.task})

    async def _run(self, running: RunningResponse) -> None:
        tenant, response_id = running.key
        unanswered = UnansweredResponse(running.info)
        try:
            await self._store.keep_unanswered(tenant, response_id, unanswered)
            await running.run(self._open_answer, self._reported)
            await self._store.forget_unanswered(tenant, response_id)
        except asyncio.CancelledError:
            if not (self._is_closing or running.is_answered):
                state = UnansweredResponse(running.info, CANCELLED)
                await self._store.keep_unanswered(tenant, response_id, state)
        except ReportedError as error:
            if running.is_queued:
                state = UnansweredResponse(running.info, FAILED, error.reason, str(error))
                await self._store.keep_unanswered(tenant, response_id, state)
            else:
                await self._store.forget_unanswered(tenant, response_id)


def response_stopped() -> ReportedError:
    """Make the error of a response that the service stopped computing."""
    return InternalError(
        "the service was stopped before the response was complete", "send the request again"
    )
