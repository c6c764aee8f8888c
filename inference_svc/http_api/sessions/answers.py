"""Turns of HTTP requests: find the session, fork it if necessary, submit the turn, stream events.

Invariants:
    1. two requests with the same history never share a session: one of them gets a fork;
    2. when a client has the end of an answer, the answer is stored and its session is free
       (`LiveAnswer`);
    3. a repeat under an idempotency key goes to the session that the first request went to;
    4. a client that names no session is never refused because another server continues it.
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
from inference_svc.http_api.errors import unknown_previous
from inference_svc.http_api.sessions.completion import Completion
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import Route
from inference_svc.http_api.sessions.replicated_conversations import conversation_moved
from inference_svc.http_api.sessions.routing import Router
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.service.gateway import Gateway, TurnStream
from inference_svc.service.submissions import new_session_id

OnQueued = Callable[[], None]
# Errors of a turn that cannot be appended, because another turn of its session came first.
TAKEN = (SessionBusyError, TurnMismatchError, SessionEndedError)


class LiveAnswer:
    """A turn in progress, for one client; leaving the context cancels an unfinished turn.

    Args:
        completion: stores the answer at its end.
        caller: the client and its tenant.
        turn: the turn of the request.
        route: the session where the turn is answered.
        stream: the turn's events.
        is_temporary: whether the session was made for this turn alone.

    Attributes:
        session_id: the turn's session; it changes if the turn is moved to a fork.
        started: what loading or computing the history cost, once the turn has begun.
    """

    def __init__(
        self,
        completion: Completion,
        caller: Caller,
        turn: HttpTurn,
        route: Route,
        stream: TurnStream,
        *,
        is_temporary: bool,
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
        self._is_temporary = is_temporary
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

    async def wait_begun(self) -> None:
        """Wait for the first tokens: until then an error can still become an HTTP status.

        The turn's `Started` event is not enough: a service that drains hands back turns whose
        history has been loaded.
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
        """Yield the tokens, then the end; the answer is stored before the end is yielded.

        Raises:
            ReportedError: the turn failed.
        """
        async for event in self._all_events():
            if isinstance(event, Finished):
                await self._end(event)
            if isinstance(event, Tokens | Finished):
                yield event

    async def whole(self) -> tuple[list[AnswerToken], Finished]:
        """Collect the answer: return all tokens, and the end.

        Raises:
            ReportedError: the turn failed.
        """
        tokens: list[AnswerToken] = []
        async for event in self.events():
            if isinstance(event, Finished):
                return tokens, event
            tokens += event.tokens
        raise AssertionError("a turn that does not fail ends with Finished")

    async def _all_events(self) -> AsyncIterator[TurnEvent]:
        if self._first is not None:
            yield self._first
        async for event in self._events:
            yield event

    def close(self) -> None:
        """Leave the turn, and remove a session that was made for it; idempotent."""
        self._stream.leave()
        if self._is_temporary and not self._is_over:
            self._completion.spawn(self._remove_session())
        self._is_over = True

    async def _end(self, finished: Finished) -> None:
        _check_not_cancelled(finished)
        await self._stream.wait_ended()
        if not self._turn.is_kept:
            await self._completion.remove(self._caller, self.session_id)
        else:
            if finished.moved_to:
                await self._record_move(finished.moved_to)
            await self._completion.record(
                self._caller, self._turn, self._route, finished, is_temporary=self._is_temporary
            )
            if self._turn.is_final:
                await self._completion.remove(self._caller, self.session_id)
        self._is_over = True

    async def _record_move(self, session_id: str) -> None:
        """Record that the turn was moved to a fork, so that a repeat of the request finds it."""
        self.session_id = session_id
        self._route = replace(self._route, session_id=session_id)
        await self._completion.keep_request(self._caller, self._turn, self._route)

    async def _remove_session(self) -> None:
        await self._stream.wait_ended()
        await self._completion.abandon(self._caller, self._turn, self._route)


def _check_not_cancelled(finished: Finished) -> None:
    """Check that a finished turn was not cancelled.

    Raises:
        TurnCancelledError: another client stopped the turn, by gRPC for example.
    """
    if finished.finish_reason == FinishReason.CANCELLED:
        raise TurnCancelledError("the turn was cancelled", "send it again")


class Answers:
    """Starts the turns of HTTP requests.

    Args:
        gateway: the service's gateway, through which all turns are submitted.
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
        self, caller: Caller, turn: HttpTurn, on_queued: OnQueued = lambda: None
    ) -> LiveAnswer:
        """Start a turn and return when it has its first tokens; the caller owes `close`.

        Args:
            caller: the client and its tenant.
            turn: the turn to start.
            on_queued: called when the turn is queued; a later error is a failure, no refusal.

        Raises:
            ReportedError: the turn was refused, or failed before its first tokens.
        """
        if turn.repeat_key is None:
            return await self._open(caller, turn, on_queued)
        lock = self._repeats.setdefault(turn.repeat_key, asyncio.Lock())
        async with lock:
            known = await self._store.find_request(turn.repeat_key)
            if known is not None and known.body != turn.body:
                raise RequestIdReusedError(
                    "the Idempotency-Key was used before with another body",
                    "use a new key for each turn",
                )
            if known is not None:
                # If another turn took the session, the first request's turn was never recorded:
                # answer the repeat as a new request.
                with suppress(*TAKEN):
                    return await self._start(
                        caller, turn, known.route, on_queued, is_temporary=not turn.is_kept
                    )
            return await self._open(caller, turn, on_queued)

    async def _open(self, caller: Caller, turn: HttpTurn, on_queued: OnQueued) -> LiveAnswer:
        """Start a turn; at the session limit, delete the tenant's oldest session and retry."""
        try:
            return await self._open_once(caller, turn, on_queued)
        except TooManySessionsError:
            if not await self._completion.make_room(caller):
                raise
        return await self._open_once(caller, turn, on_queued)

    async def _open_once(self, caller: Caller, turn: HttpTurn, on_queued: OnQueued) -> LiveAnswer:
        route = await self._find_route(caller, turn)
        if route.session_id and route.may_append and turn.is_kept:
            try:
                return await self._start(caller, turn, route, on_queued, is_temporary=False)
            except TAKEN as error:
                if turn.conversation is not None and isinstance(error, TurnMismatchError):
                    raise conversation_moved(turn.conversation.before.conversation_id) from error
                if turn.session_id:
                    raise
        return await self._open_separately(caller, turn, route, on_queued)

    async def _open_separately(
        self, caller: Caller, turn: HttpTurn, route: Route, on_queued: OnQueued
    ) -> LiveAnswer:
        """Start a turn in a session of its own: a new session, or a fork of the route's."""
        session_id = route.name or new_session_id()
        separate = replace(route, session_id=session_id, is_named=bool(route.name))
        if not route.turns:
            is_temporary = not turn.is_kept or bool(route.name)
            if is_temporary:
                await self._completion.record_temporary(caller, session_id)
            return await self._start(caller, turn, separate, on_queued, is_temporary=is_temporary)
        identity, tenant, turns = caller.identity, caller.tenant, self._gateway.turns
        turns.check_limits(identity.tenant(tenant))  # before the fork: it is a file on disk
        await self._completion.record_temporary(caller, session_id)
        try:
            key = self._gateway.key(identity, tenant, route.session_id)
            new_key = self._gateway.key(identity, tenant, session_id)
            await turns.sessions.fork(key, route.turns, new_key.session_id, is_local=not route.name)
        except BaseException:
            self._completion.spawn(self._completion.remove(caller, session_id, route.turns))
            raise
        return await self._start(caller, turn, separate, on_queued, is_temporary=True)

    async def _find_route(self, caller: Caller, turn: HttpTurn) -> Route:
        """Find the session for a turn.

        Raises:
            UnknownPreviousError: the session of the previous response is gone.
            UnknownConversationError: the turn's conversation is gone.
            SessionBusyError: a turn is running in the session of the conversation.
        """
        chain = self._completion.chain(caller)
        if turn.conversation is not None:
            return await self._router.find_in_conversation(caller, chain, turn, turn.conversation)
        if turn.previous is None:
            return await self._router.find(caller, chain, turn)
        route = await self._router.find_after(caller, turn.previous.at, turn.previous.history)
        if route is None:
            raise unknown_previous(turn.info.previous_id if turn.info else "")
        if turn.previous.info.conversation_id:  # only its own turns may extend its session
            return replace(route, may_append=False)
        return route

    async def _start(
        self,
        caller: Caller,
        turn: HttpTurn,
        route: Route,
        on_queued: OnQueued,
        *,
        is_temporary: bool,
    ) -> LiveAnswer:
        try:
            await self._completion.keep_request(caller, turn, route)
            before = await self._router.digest_before_answer(caller, turn, route)
            is_local = self._router.is_local(turn, route, before)
            stream = await self._gateway.submit(
                caller.identity,
                TurnNames(caller.tenant, route.session_id, turn.request_id),
                lambda key, defaults: turn.as_submission(
                    route, key, defaults, before, is_local=is_local
                ),
            )
        except BaseException:
            if is_temporary:
                turns = route.turns if turn.is_kept else None
                self._completion.spawn(self._completion.remove(caller, route.session_id, turns))
            raise
        on_queued()
        answer = LiveAnswer(
            self._completion, caller, turn, route, stream, is_temporary=is_temporary
        )
        try:
            await answer.wait_begun()
        except BaseException:
            answer.close()
            raise
        return answer
