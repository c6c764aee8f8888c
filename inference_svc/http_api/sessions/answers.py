"""Answers requests with turns: finds where they go, forks if need be, joins repeats, follows them.

Invariants:
    1. two requests with the same history never share a session: one of them gets a fork;
    2. who has the end of an answer finds it stored, and its session free (`LiveAnswer`);
    3. a repeat under an idempotency key goes to the session that the request went to;
    4. who has named no session is never refused because another server goes on with it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from inference_svc.core.errors import (
    RequestIdReusedError,
    SessionBusyError,
    SessionEndedError,
    TooManySessionsError,
    TurnCancelledError,
    TurnMismatchError,
)
from inference_svc.core.submission import TurnNames
from inference_svc.core.turn_record import (
    AnswerToken,
    Finished,
    FinishReason,
    Started,
    Tokens,
    TurnEvent,
)
from inference_svc.http_api.errors import unknown_response
from inference_svc.http_api.sessions.completion import Completion
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import Route
from inference_svc.http_api.sessions.moving_conversations import moved
from inference_svc.http_api.sessions.routing import Router
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.service.gateway import Gateway, TurnStream
from inference_svc.service.submissions import new_session_id

Queued = Callable[[], None]
TAKEN = (SessionBusyError, TurnMismatchError, SessionEndedError)  # another turn was there first


class LiveAnswer:
    """A turn under way, for one client; leaving the context cancels it, unless it is over.

    Args:
        completion: stores the answer at its end.
        caller: the client, and its tenant.
        turn: the turn of the request.
        route: the session where it is answered.
        stream: the turn's events.
        is_passing: the session was made for this turn.

    Attributes:
        session_id: the session of the turn.
        started: what its history cost, once it has begun.
    """

    def __init__(
        self,
        completion: Completion,
        caller: Caller,
        turn: HttpTurn,
        route: Route,
        stream: TurnStream,
        *,
        is_passing: bool,
    ) -> None:
        self._completion = completion
        self._caller = caller
        self._turn = turn
        self._route = route
        self.session_id = route.session_id
        self.started = Started(0, 0, 0.0, 0)
        self._stream = stream
        self._events: AsyncIterator[TurnEvent] = stream.events
        self._first: Tokens | Finished | None = None
        self._is_passing = is_passing
        self._is_over = False

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
            if isinstance(event, Finished):
                _check_not_cancelled(event)
            if isinstance(event, Started):
                self.started = event
            if isinstance(event, Tokens | Finished):
                self._first = event
                return

    async def events(self) -> AsyncIterator[Tokens | Finished]:
        """Yield the tokens, and the end, by when everything about the answer is stored.

        Raises:
            ReportedError: the turn failed.
        """
        async for event in self._all():
            if isinstance(event, Finished):
                await self._end(event)
            if isinstance(event, Tokens | Finished):
                yield event

    async def whole(self) -> tuple[list[AnswerToken], Finished]:
        """Return all tokens, and the end.

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
        self._stream.leave()
        if self._is_passing and not self._is_over:
            self._completion.spawn(self._remove())
        self._is_over = True

    async def _end(self, finished: Finished) -> None:
        _check_not_cancelled(finished)
        await self._stream.wait_ended()
        if not self._turn.is_kept:
            await self._completion.remove(self._caller, self.session_id)
        else:
            if finished.moved_to:
                await self._move(finished.moved_to)
            await self._completion.record(
                self._caller, self._turn, self._route, finished, is_passing=self._is_passing
            )
            if self._turn.is_final:
                await self._completion.remove(self._caller, self.session_id)
        self._is_over = True

    async def _move(self, session_id: str) -> None:
        """Take that the turn is in a session of its own; who repeats the request finds it there."""
        self.session_id = session_id
        self._route = replace(self._route, session_id=session_id)
        await self._completion.keep_request(self._caller, self._turn, self._route)

    async def _remove(self) -> None:
        await self._stream.wait_ended()
        await self._completion.leave(self._caller, self._turn, self._route)


def _check_not_cancelled(finished: Finished) -> None:
    """Check that a turn that has ended has an answer.

    Raises:
        TurnCancelledError: somebody else stopped it, by gRPC for example.
    """
    if finished.finish_reason == FinishReason.CANCELLED:
        raise TurnCancelledError("the turn was cancelled", "send it again")


class Answers:
    """Starts turns for HTTP.

    Args:
        gateway: the one way in.
        store: finds repeats of requests.
        completion: stores answers at their end.
    """

    def __init__(self, gateway: Gateway, store: ApiStore, completion: Completion) -> None:
        self._gateway = gateway
        self._store = store
        self._completion = completion
        self._router = Router(gateway.turns.sessions, gateway.model, store, gateway.prompts.framing)
        self._repeats: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def open(
        self, caller: Caller, turn: HttpTurn, on_queued: Queued = lambda: None
    ) -> LiveAnswer:
        """Start a turn and return when it has its first tokens; the caller owes `close`.

        Args:
            caller: who asks.
            turn: that is asked for.
            on_queued: called when it is queued: what fails later is no refusal.

        Raises:
            ReportedError: it was refused, or failed before it began.
        """
        if turn.repeat_key is None:
            return await self._open(caller, turn, on_queued)
        lock = self._repeats.setdefault(turn.repeat_key, asyncio.Lock())
        async with lock:
            known = await self._store.find_request(turn.repeat_key)
            if known is not None and known.body != turn.body:
                raise RequestIdReusedError(
                    "the Idempotency-Key was used with another body", "make a new key for each turn"
                )
            if known is not None:
                with suppress(*TAKEN):  # its turn was never recorded, and others came after it
                    return await self._start(
                        caller, turn, known.route, on_queued, is_passing=not turn.is_kept
                    )
            return await self._open(caller, turn, on_queued)

    async def _open(self, caller: Caller, turn: HttpTurn, on_queued: Queued) -> LiveAnswer:
        """Start a turn; delete the tenant's oldest session if there is no room for another one."""
        try:
            return await self._open_once(caller, turn, on_queued)
        except TooManySessionsError:
            if not await self._completion.make_room(caller):
                raise
        return await self._open_once(caller, turn, on_queued)

    async def _open_once(self, caller: Caller, turn: HttpTurn, on_queued: Queued) -> LiveAnswer:
        route = await self._find(caller, turn)
        if route.session_id and route.may_append and turn.is_kept:
            try:
                return await self._start(caller, turn, route, on_queued, is_passing=False)
            except TAKEN as error:
                if turn.conversation is not None and isinstance(error, TurnMismatchError):
                    raise moved(turn.conversation.before.conversation_id) from error
                if turn.session_id:
                    raise
        return await self._open_apart(caller, turn, route, on_queued)

    async def _open_apart(
        self, caller: Caller, turn: HttpTurn, route: Route, on_queued: Queued
    ) -> LiveAnswer:
        """Answer in a session of its own: a new one, or a fork."""
        session_id = route.name or new_session_id()
        apart = replace(route, session_id=session_id, is_named=bool(route.name))
        if not route.turns:
            is_passing = not turn.is_kept or bool(route.name)
            if is_passing:
                await self._completion.begin_passing(caller, session_id)
            return await self._start(caller, turn, apart, on_queued, is_passing=is_passing)
        identity, tenant, turns = caller.identity, caller.tenant, self._gateway.turns
        turns.check_limits(identity.tenant(tenant))  # a fork is a file on disk
        await self._completion.begin_passing(caller, session_id)
        try:
            key = self._gateway.key(identity, tenant, route.session_id)
            new_key = self._gateway.key(identity, tenant, session_id)
            await turns.sessions.fork(key, route.turns, new_key.session_id, is_local=not route.name)
        except BaseException:
            self._completion.spawn(self._completion.remove(caller, session_id, route.turns))
            raise
        return await self._start(caller, turn, apart, on_queued, is_passing=True)

    async def _find(self, caller: Caller, turn: HttpTurn) -> Route:
        """Find where the turn goes.

        Raises:
            UnknownResponseError: the session of the response that it follows is gone.
            UnknownConversationError: the conversation that it is a turn of is gone.
            SessionBusyError: a turn is under way in the session of its conversation.
        """
        chain = self._completion.chain(caller)
        if turn.conversation is not None:
            return await self._router.in_conversation(caller, chain, turn, turn.conversation)
        if turn.previous is None:
            return await self._router.find(caller, chain, turn)
        route = await self._router.after(caller, turn.previous.at, turn.previous.history)
        if route is None:
            raise unknown_response(turn.info.previous_id if turn.info else "")
        if turn.previous.info.conversation_id:  # in whose session nobody else goes on
            return replace(route, may_append=False)
        return route

    async def _start(
        self, caller: Caller, turn: HttpTurn, route: Route, on_queued: Queued, *, is_passing: bool
    ) -> LiveAnswer:
        try:
            await self._completion.keep_request(caller, turn, route)
            before = await self._router.before_answer(caller, turn, route)
            is_local = self._router.is_local(turn, route, before)
            stream = await self._gateway.submit(
                caller.identity,
                TurnNames(caller.tenant, route.session_id, turn.request_id),
                lambda key, defaults: turn.as_submission(
                    route, key, defaults, before, is_local=is_local
                ),
            )
        except BaseException:
            if is_passing:
                turns = route.turns if turn.is_kept else None
                self._completion.spawn(self._completion.remove(caller, route.session_id, turns))
            raise
        on_queued()
        answer = LiveAnswer(self._completion, caller, turn, route, stream, is_passing=is_passing)
        try:
            await answer.until_begun()
        except BaseException:
            answer.close()
            raise
        return answer
