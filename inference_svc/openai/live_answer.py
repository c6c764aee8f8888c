"""A turn under way, for one HTTP client."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from inference_svc.core.answers import AnswerToken, FinishReason
from inference_svc.core.errors import TurnCancelledError
from inference_svc.core.turn_record import Finished, Tokens, TurnEvent
from inference_svc.openai.endings import Endings
from inference_svc.openai.places import Caller, Place
from inference_svc.openai.wanted_turn import WantedTurn
from inference_svc.service.gateway import Following

CANCELLED = str(FinishReason.CANCELLED)


class LiveAnswer:
    """See the module docstring; leaving it as a context gives the turn up, unless it is over.

    Args:
        endings: what is done at the end.
        caller: whose turn.
        wanted: what was asked for.
        place: where it is answered.
        following: the turn.
        is_passing: the session was made for this turn.
    """

    def __init__(
        self,
        endings: Endings,
        caller: Caller,
        wanted: WantedTurn,
        place: Place,
        following: Following,
        *,
        is_passing: bool,
    ) -> None:
        self._endings = endings
        self._caller = caller
        self._wanted = wanted
        self._place = place
        self._following = following
        self._events: AsyncIterator[TurnEvent] = following.events()
        self._first: Tokens | Finished | None = None
        self._is_passing = is_passing
        self._is_over = False

    @property
    def session_id(self) -> str:
        """Of the turn."""
        return self._place.session_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def until_begun(self) -> None:
        """Wait for its first tokens: until then a refusal is a status of its own.

        Not for the turn's Started: a service that stops hands back turns that have been loaded.
        """
        async for event in self._events:
            if isinstance(event, Finished) and event.finish_reason == CANCELLED:
                raise _cancelled()
            if isinstance(event, Tokens | Finished):
                self._first = event
                return

    async def events(self) -> AsyncIterator[Tokens | Finished]:
        """The tokens, and the end, by when everything about the answer is remembered.

        Raises:
            ReportedError: the turn failed.
        """
        async for event in self._all():
            if isinstance(event, Finished):
                await self._end(event)
            if isinstance(event, Tokens | Finished):
                yield event

    async def whole(self) -> tuple[list[AnswerToken], Finished]:
        """All tokens, and the end.

        Raises:
            ReportedError: the turn failed.
        """
        tokens: list[AnswerToken] = []
        async for event in self.events():
            if isinstance(event, Finished):
                return tokens, event
            tokens += event.tokens
        raise AssertionError("a turn that does not fail ends with Finished")

    async def _all(self) -> AsyncIterator[TurnEvent]:
        if self._first is not None:
            yield self._first
        async for event in self._events:
            yield event

    def close(self) -> None:
        """Leave the turn; a second call does nothing."""
        self._following.leave()
        if self._is_passing and not self._is_over:
            self._endings.spawn(self._remove())
        self._is_over = True

    async def _end(self, finished: Finished) -> None:
        if finished.finish_reason == CANCELLED:
            raise _cancelled()
        await self._turn_ended()
        if not self._wanted.is_kept:
            await self._endings.remove(self._caller, self.session_id)
        else:
            await self._endings.remember(self._caller, self._wanted, self._place, finished)
            if self._is_passing:
                await self._endings.end_passing(self._caller, self.session_id)
        self._is_over = True

    async def _remove(self) -> None:
        await self._turn_ended()
        turns = self._place.turns if self._wanted.is_kept else None
        await self._endings.remove(self._caller, self.session_id, turns)

    async def _turn_ended(self) -> None:
        """The session is busy until the turn's task has ended, which is after its last event."""
        task = self._following.turn.task
        if task is not None:
            await asyncio.wait({task})


def _cancelled() -> TurnCancelledError:
    return TurnCancelledError("the turn was cancelled", "send it again")
