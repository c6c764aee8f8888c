"""Completion of turns: store the answer when a turn ends, remove sessions that are not kept.

A *temporary* session is made for one request alone: a fork, or a session that the client does not
want stored. It is recorded before it exists. It is removed when the turn fails or its client
leaves; a session that is not to be stored is also removed when it has its answer. The next start
removes the temporary sessions that a kill has left.

An *unnamed* session (no client gave it a name) is found by its history alone, so no client ever
deletes it. Their number is bounded: a new one replaces the least recently used one of the tenant
that has the most. Where servers share sessions, each server counts those of which it has had, or
begun, a turn. A session that another server has continued is removed from this server only.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from inference_svc.core.chat import Message
from inference_svc.core.misses import Resembled
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_record import Finished
from inference_svc.http_api.agents import IdleSubagents
from inference_svc.http_api.sessions.history_chain import HistoryChain
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import (
    ConversationTurn,
    Point,
    Route,
    StoredRequest,
    StoredResponse,
)
from inference_svc.http_api.sessions.replicated_conversations import ReplicatedConversations
from inference_svc.http_api.sessions.replicated_responses import ReplicatedResponses
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.sessions import Sessions
from shared.access.identity import ANY, Identity
from shared.process.log import get_logger
from shared.types.awaited_tools import possible_tools
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

CLEANER = Identity("openai", "internal", (ANY,), frozenset())  # acts for no client

CHECKS_PER_IDLE = 8  # checks for idle sub-agents in each `subagent_idle_s`
MAX_TRIES = 8  # sessions tried to make room: busy or deleted ones free none

log = get_logger(__name__)


class Completion:
    """Stores answers and removes sessions.

    Args:
        sessions: the service's sessions.
        model: fingerprint of the model, part of every session's key.
        store: stores where histories and responses end.
        max_sessions: most unnamed sessions.
        subagent_idle_s: seconds after which an idle session of a sub-agent is ended.

    Attributes:
        responses: stored responses, those of other servers included.
        conversations: stored conversations, those of other servers included.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: str,
        store: ApiStore,
        max_sessions: int,
        subagent_idle_s: float,
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._store = store
        self.responses = ReplicatedResponses(sessions, model, store)
        self.conversations = ReplicatedConversations(sessions.conversations, store)
        self._max_sessions = max_sessions
        self._subagents = IdleSubagents(subagent_idle_s, max_sessions)
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Remove left-over temporary sessions, then run background removals until cancelled."""
        async with self._tasks:
            for tenant, session_id in await self._store.temporary_sessions():
                self.spawn(self.remove(Caller(CLEANER, tenant), session_id))
            while True:
                await asyncio.sleep(self._subagents.idle_s / CHECKS_PER_IDLE)
                for key, turns in self._subagents.take_idle(time.monotonic()):
                    self.spawn(self._end_subagent(key, turns))

    def chain(self, caller: Caller) -> HistoryChain:
        """Return the history chain of a caller's tenant, keyed with this service's secret."""
        return HistoryChain(self._store.key, caller.tenant, self._model)

    async def record(
        self,
        caller: Caller,
        turn: HttpTurn,
        route: Route,
        finished: Finished,
        *,
        is_temporary: bool,
    ) -> None:
        """Store a turn: its answer, where its history ends now, its response and conversation.

        A temporary session becomes a lasting one.

        Raises:
            StoreUnavailableError: the turn could not be added to its conversation.
        """
        at = Point(route.session_id, finished.turns, turn.request_id, route.is_named)
        if turn.conversation is not None:
            await self._add_to_conversation(
                turn.conversation, caller, turn.session_id, at, finished
            )
        if route.is_named:  # the name may be the id of an unnamed session, which the client knows
            await self._store.touch_session(caller.tenant, route.session_id)
        else:
            await self._store.use_session(caller.tenant, route.session_id)
            if turn.is_subagent:
                key = caller.key(self._model, route.session_id)
                self._subagents.record_use(key, finished.turns, time.monotonic())
            for tenant, oldest in await self._store.take_oldest(self._max_sessions):
                self.spawn(self._remove_old(Caller(CLEANER, tenant), oldest))
        answer = turn.reading.message(finished.text)
        if not turn.is_final:
            self.spawn(self._report_expectations(caller, turn, route, at, answer))
        history = await self._keep_history(caller, turn, route, at, answer)
        known = None if turn.info is None else StoredResponse(at, history, turn.info)
        if known is not None:
            await self._store.keep_response(
                caller.tenant, turn.response_id, known, turn.stored_input
            )
        if is_temporary:
            await self._store.forget_temporary(caller.tenant, route.session_id)
        if turn.conversation is not None:
            turn.conversation.release()
        if known is not None:  # last, so that nothing else waits for a slow object store
            call_ids = [call.call_id for call in answer.tool_calls]
            await self.responses.share(caller, turn.response_id, known, turn.stored_input, call_ids)

    async def keep_request(self, caller: Caller, turn: HttpTurn, route: Route) -> None:
        """Store the route of a request that may be repeated, before the turn is submitted."""
        if turn.repeat_key is not None:
            known = StoredRequest(turn.body, route)
            await self._store.keep_request(caller.tenant, turn.repeat_key, known)

    async def _add_to_conversation(
        self,
        conversation: ConversationTurn,
        caller: Caller,
        session_id: str,
        end: Point,
        finished: Finished,
    ) -> None:
        """Add a turn to its conversation, and remove the session that the conversation left."""
        tenant, before = caller.tenant, conversation.before.session_id
        kept = conversation.at.turns if conversation.at else 0
        moves = end.session_id != before
        if end.turns != kept + 1 or moves != (session_id != before):
            return  # a repeat of an old turn, after which the conversation has had others
        items = [*conversation.input_items, *conversation.make_answer_items(finished)]
        for left_session in await self.conversations.record(tenant, conversation, end, items):
            self.spawn(self.remove(Caller(CLEANER, tenant), left_session))

    async def _keep_history(
        self, caller: Caller, turn: HttpTurn, route: Route, at: Point, answer: Message
    ) -> bytes | None:
        """Store where the turn's history ends; return its digest, None if it is unknown."""
        if route.history is None:
            return None
        chain = self.chain(caller)
        new_messages = (*turn.messages[route.first :], answer)
        history = chain.along(route.history, new_messages)[-1]
        digests = [history, chain.within(history, route.session_id)]
        if len(new_messages) > 1:
            digests.append(chain.exchange(*new_messages[-2:]))
        await self._store.keep_histories(caller.tenant, [(digest, at) for digest in digests])
        return history

    async def _report_expectations(
        self, caller: Caller, turn: HttpTurn, route: Route, at: Point, answer: Message
    ) -> None:
        """Report to kvd how soon the answering session, and one it supersedes, are used again.

        The session awaits the tools that its answer calls. The session that the conversation
        resembles may be superseded by it: see `supersedes`.
        """
        tools = possible_tools(call.name for call in answer.tool_calls)
        key, resembled = caller.key(self._model, route.session_id), route.resembles
        try:
            if tools and len((await self._sessions.get(key))[0].turns) == at.turns:
                await self._sessions.expect(key, tools)  # unless an old turn was repeated
            if resembled is not None and resembled.session_id:
                key = caller.key(self._model, resembled.session_id)
                if supersedes(turn, route, resembled, (await self._sessions.get(key))[0]):
                    await self._sessions.expect(key, superseded=True)
        except ReportedError as error:  # the session is in use again, or deleted
            log.debug("nothing_expected", session=str(key), reason=error.reason)

    async def _end_subagent(self, key: SessionKey, turns: int) -> None:
        """End a sub-agent's session, unless it has had another turn, here or at another server."""
        histories = self._sessions.histories
        try:
            found, _ = await self._sessions.get(key, is_fresh=histories is not None)
            is_unknown = histories is not None and histories.calls.is_silent
            if is_unknown or len(found.turns) != turns:
                return
            await self._sessions.end(key)
        except ReportedError as error:  # the session is in use again, or deleted
            log.debug("subagent_not_ended", session=str(key), reason=error.reason)
        else:
            log.info("subagent_ended", session=str(key))

    async def make_room(self, caller: Caller) -> bool:
        """Remove the tenant's least recently used unnamed session; return whether one was removed.

        Sessions that are in use, or deleted already, are skipped, up to `MAX_TRIES`.
        """
        for _ in range(MAX_TRIES):
            oldest = await self._store.take_oldest_of(caller.tenant)
            if oldest and await self._remove_old(caller, oldest):
                return True
        return False

    async def record_temporary(self, caller: Caller, session_id: str) -> None:
        """Record that a session is temporary; call it before the session is made."""
        try:
            await self._store.record_temporary(caller.tenant, session_id)
        except BaseException:  # it may have been recorded, and the session is not made now
            self.spawn(self._store.forget_temporary(caller.tenant, session_id))
            raise

    async def _remove_old(self, caller: Caller, session_id: str) -> bool:
        """Remove an old unnamed session from this server; return whether it was removed."""
        key = caller.key(self._model, session_id)
        try:
            await self._sessions.release(key)
        except ReportedError as error:  # the session is in use again, or deleted
            log.debug("openai_session_not_removed", session=session_id, reason=error.reason)
            return False
        await self._store.forget_texts(key.tenant, key.session_id)
        return True

    async def remove(self, caller: Caller, session_id: str, turns: int | None = None) -> bool:
        """Delete a session if it has at most `turns` turns; return whether it was deleted.

        A temporary session is no longer recorded as one, whether it was deleted or not.
        """
        is_removed = False
        try:
            key = caller.key(self._model, session_id)
            found, _ = await self._sessions.get(key)
            if turns is None or len(found.turns) <= turns:
                await self._sessions.delete(key)
                await self._store.forget_texts(key.tenant, key.session_id)
                is_removed = True
        except ReportedError as error:  # most likely the session was never made
            log.debug("openai_session_not_removed", session=session_id, reason=error.reason)
        await self._store.forget_temporary(caller.tenant, session_id)
        return is_removed

    async def abandon(self, caller: Caller, turn: HttpTurn, route: Route) -> None:
        """Remove the temporary session of a turn whose client has left.

        The session stays if a repeat of the request has followed the turn to its end.
        """
        turns = route.turns if turn.is_kept else None
        # A session that the conversation did not take is unreachable: remove it with any turns.
        if turn.conversation is not None:
            name = turn.conversation.before.conversation_id
            found = await self._store.conversations.find(caller.tenant, name)
            turns = turns if found and found.session_id == route.session_id else None
        await self.remove(caller, route.session_id, turns)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run work in the background; failures are logged."""
        task = _log_failure(work)
        try:
            self._tasks.create_task(task)
        except RuntimeError:  # the task group has closed: the next start removes what is left
            task.close()
            work.close()


def supersedes(turn: HttpTurn, route: Route, resembled: Resembled, found: Transcript) -> bool:
    """Return whether a turn's session supersedes the one that the conversation resembles. Pure.

    A client that edits its conversation (messages, results of tools, the model's thoughts)
    continues it in another session, and does not return to the one before: the KV cache of that
    need not be kept. *Superseded* is the session that gave the conversation's newest known
    answer, if

        1. the conversation was answered in another session;
        2. that answer is the session's newest, and no turn of it is running: it was left where
           the other session begins. A session that has had a turn since is a branch of its own,
           as when a user goes back to an earlier answer and tries again;
        3. no client named it: a client that names a session means to return;
        4. the turn is no sub-agent's: a sub-agent is given what its agent knows, and the agent's
           session continues beside it.

    A conversation that begins as a session does, with nothing of it edited, resembles none:
    forks of a common beginning, several answers to one question, and clients that take turns with
    it are branches, and stay. The guess may be wrong, as when two clients have copied one
    conversation. Then the next turn of the superseded session uses it, which ends that state.
    Until then its KV was evicted earlier than it should have been, and nothing else is lost.

    Args:
        turn: the turn that was answered.
        route: the session where it was answered.
        resembled: the other session, as it was when the turn arrived.
        found: the other session's transcript as it is now; no turn of it is running.
    """
    is_left = len(found.turns) == resembled.turns and not found.has_ended
    is_other = route.session_id != resembled.session_id
    return is_left and is_other and not (resembled.is_named or turn.is_subagent)


async def _log_failure(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except Exception:
        log.exception("openai_tidying_failed")
