"""Responses that are computed while nobody waits: begun, followed, cancelled.

A response in the background is queued, then in progress, and ends like any other; one that fails or
is cancelled is remembered, too. Whoever follows one gets its events from the first, one token at a
time, and may come back: the same response has the same events, with the same numbers, also when it
has ended.

What the service was computing when it was killed, or stopped in haste, has failed.

*Source:* OpenAI API guides, "Background mode".
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Protocol

from inference_svc.core.turn_record import AnswerToken, Finished
from inference_svc.http_api.errors import TooManyRequestsError
from inference_svc.http_api.sessions.answers import Answers
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

RETRY_S = 1.0  # after a refusal

Event = Mapping[str, Any]


class BackgroundObjects(Protocol):
    """Makes the objects of one response, as clients of its API read them."""

    session_id: str

    def standing(self, status: str, error: Event | None = None) -> dict[str, Any]:
        """Make the response as it stands, without an answer."""

    def queued_opening(self) -> Iterable[Event]:
        """Make the events of its beginning."""

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterable[Event]:
        """Make the events of its next tokens."""

    def closing(self, finished: Finished) -> Iterable[Event]:
        """Make the events of its end."""

    def failure(self, error: ReportedError) -> Event:
        """Make its last event, if it has failed."""

    def cancellation(self) -> Event:
        """Make its last event, if it was cancelled."""


MakeObjects = Callable[[str], BackgroundObjects]
Reported = Callable[[Exception], ReportedError]


@dataclass(eq=False)
class Running:
    """A response that is being computed.

    Attributes:
        caller: who asked for it.
        turn: the turn that it is.
        info: its members beside its answer.
        objects: makes what makes its objects, given its session.
        session_id: the session that it is answered in; "" while it is queued.
        is_cancelled: whether its client has cancelled it.
        task: computes it.
        is_queued: whether it was taken: what fails later is no refusal.
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
        """Whose it is, and its id."""
        return self.caller.tenant, self.turn.response_id

    @property
    def is_answered(self) -> bool:
        """Whether it has its answer, which is stored."""
        return self._finished is not None

    @property
    def standing(self) -> dict[str, Any]:
        """The response as it stands."""
        return self.objects(self.session_id).standing(IN_PROGRESS if self.session_id else QUEUED)

    async def run(self, answers: Answers, reported: Reported) -> None:
        """Have it answered.

        Args:
            answers: starts turns.
            reported: makes an error that clients may see of any.

        Raises:
            ReportedError: it failed.
        """
        try:
            async with await answers.open(self.caller, self.turn, self._queue) as answer:
                self.session_id = answer.session_id
                async for event in answer.events():
                    if isinstance(event, Finished):
                        self._finished = event
                    else:
                        self._tokens += event.tokens
                    self._wake_followers()
        except asyncio.CancelledError:
            self._error = stopped()
            raise
        except Exception as error:  # nobody waits whom it could be raised to: it is remembered
            self._error = reported(error)
            raise self._error from error
        finally:
            self._wake_followers()

    async def until_queued(self) -> None:
        """Wait until it is known whether it can be had.

        Raises:
            ReportedError: it was refused.
        """
        while not self.is_queued:
            if self._error is not None:
                raise self._error
            await self._news.wait()

    async def events(self, after: int) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield its events, those that come after one of a number; see the module docstring."""
        async for event in self._all():
            if event["sequence_number"] > after:
                yield event

    async def _all(self) -> AsyncIterator[Mapping[str, Any]]:
        objects, num_read = self.objects(self.session_id), 0
        for opening in objects.queued_opening():
            yield opening
        while True:
            for made in events_of_tokens(objects, self._tokens[num_read:]):
                yield made
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
        """Let nobody wait for it any more: it is over, perhaps before it was begun."""
        if not self.is_answered and self._error is None:
            self._error = stopped()
        self._wake_followers()

    def _queue(self) -> None:
        self.is_queued = True
        self._wake_followers()

    def _wake_followers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def events_of_tokens(
    objects: BackgroundObjects, tokens: Sequence[AnswerToken]
) -> Iterator[Mapping[str, Any]]:
    """Make the events of tokens, one at a time: the same however they came."""
    for token in tokens:
        yield from objects.piece([token])


class BackgroundResponses:
    """Runs responses in the background.

    Args:
        answers: starts turns.
        store: remembers those that have no answer.
        max_running: bound of those that run at once.
        reported: makes an error that clients may see of any.
    """

    def __init__(
        self, answers: Answers, store: ApiStore, max_running: int, reported: Reported
    ) -> None:
        self._answers = answers
        self._store = store
        self._max_running = max_running
        self._reported = reported
        self._running: dict[tuple[str, str], Running] = {}
        self._is_closing = False

    async def close(self) -> None:
        """Stop all, as a kill would; they have failed."""
        self._is_closing = True
        tasks = [one.task for one in self._running.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def find(self, tenant: str, response_id: str) -> Running | None:
        """Return a tenant's response that runs; None if there is none of that id."""
        return self._running.get((tenant, response_id))

    async def start(self, running: Running, release: Callable[[], None]) -> Running:
        """Begin a response, and return it when it is queued; a repeat gets the one that runs.

        Args:
            running: the response.
            release: called when it is over, or cannot be begun.

        Raises:
            ReportedError: it was refused.
        """
        found = self._running.get(running.key)
        if found is not None:
            release()
            return found
        if len(self._running) >= self._max_running:
            release()
            raise TooManyRequestsError(
                f"{self._max_running} responses run in the background",
                "come back",
                retry_after_s=RETRY_S,
            )
        self._running[running.key] = running
        running.task = asyncio.create_task(self._run(running))

        def settle(_task: asyncio.Task[None]) -> None:  # also of a task that never came to begin
            del self._running[running.key]
            running.end()
            release()

        running.task.add_done_callback(settle)
        await running.until_queued()
        return running

    async def cancel(self, running: Running) -> None:
        """Cancel a response, and return when it is over: it may have its answer after all."""
        running.is_cancelled = True
        assert running.task is not None, "it was started"  # noqa: S101
        running.task.cancel()
        await asyncio.wait({running.task})

    async def _run(self, running: Running) -> None:
        tenant, response_id = running.key
        unanswered = UnansweredResponse(running.info)
        try:
            await self._store.keep_unanswered(tenant, response_id, unanswered)
            await running.run(self._answers, self._reported)
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


def stopped() -> ReportedError:
    """Make the error of a response that the service has not gone on with."""
    return InternalError("the service has stopped meanwhile", "send the request again")
