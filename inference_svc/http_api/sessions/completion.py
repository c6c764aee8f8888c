"""What is done when an answer has ended or was cancelled: it is stored, its session tidied up.

A session that is made for one request alone (a fork; any that the client does not want stored) is
noted before it exists, and goes when the turn fails, its client leaves, or, not to be stored, when
it has its answer. What a kill leaves of them goes at the next start.

A session that nobody named is known by its history alone, so nobody would ever delete it: there are
so many of them, and the one that was used longest ago goes for a new one, of the tenant that has
the most of them. Where servers share these, each counts those that it has had a turn of, or
begun to; one that another server has gone on with goes here alone.
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
from inference_svc.http_api.sessions.moving_conversations import MovingConversations
from inference_svc.http_api.sessions.moving_responses import MovingResponses
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.sessions import Sessions
from shared.access.identity import ANY, Identity
from shared.process.log import get_logger
from shared.types.awaited_tools import possible_tools
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey

CLEANER = Identity("openai", "internal", (ANY,), frozenset())  # removes what a kill left

LOOKS = 8  # at idle sub-agents, in the time that makes one idle
MAX_TRIES = 8  # sessions that are busy, or gone already, make no room

log = get_logger(__name__)


class Completion:
    """Stores answers and removes sessions.

    Args:
        sessions: of the service.
        model: fingerprint of the model, part of every session's key.
        store: where answers are remembered.
        max_sessions: bound of the sessions that nobody named.
        subagent_idle_s: seconds after which an idle session of a sub-agent is ended.

    Attributes:
        responses: that are stored, also those that other servers have made.
        conversations: likewise.
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
        self.responses = MovingResponses(sessions, model, store)
        self.conversations = MovingConversations(sessions.conversations, store)
        self._max_sessions = max_sessions
        self._subagents = IdleSubagents(subagent_idle_s, max_sessions)
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Remove what a kill left, then hold the tasks that tidy up, until cancelled."""
        async with self._tasks:
            for tenant, session_id in await self._store.passing():
                self.spawn(self.remove(Caller(CLEANER, tenant), session_id))
            while True:
                await asyncio.sleep(self._subagents.idle_s / LOOKS)
                for key, turns in self._subagents.take_idle(time.monotonic()):
                    self.spawn(self._end(key, turns))

    def chain(self, caller: Caller) -> HistoryChain:
        """Return the digests of a caller's histories."""
        return HistoryChain(self._store.key, caller.tenant, self._model)

    async def record(
        self,
        caller: Caller,
        turn: HttpTurn,
        route: Route,
        finished: Finished,
        *,
        is_passing: bool,
    ) -> None:
        """Store an answer and what it answers; a session that was made for it stays.

        Raises:
            StoreUnavailableError: it could not be added to its conversation.
        """
        at = Point(route.session_id, finished.turns, turn.request_id, route.is_named)
        if turn.conversation is not None:
            await self._add_to(turn.conversation, caller, turn.session_id, at, finished)
        if route.is_named:  # it may be one of ours, whose id the client has
            await self._store.touch_session(caller.tenant, route.session_id)
        else:
            await self._store.use_session(caller.tenant, route.session_id)
            if turn.is_subagent:
                key = caller.key(self._model, route.session_id)
                self._subagents.used(key, finished.turns, time.monotonic())
            for tenant, oldest in await self._store.take_oldest(self._max_sessions):
                self.spawn(self._let_go(Caller(CLEANER, tenant), oldest))
        answer = turn.reading.message(finished.text)
        if not turn.is_final:
            self.spawn(self._expect(caller, turn, route, at, answer))
        history = await self._keep_history(caller, turn, route, at, answer)
        known = None if turn.info is None else StoredResponse(at, history, turn.info)
        if known is not None:
            await self._store.keep_response(caller.tenant, turn.response_id, known, turn.brought)
        if is_passing:
            await self._store.end_passing(caller.tenant, route.session_id)
        if turn.conversation is not None:
            turn.conversation.release()
        if known is not None:  # last: for a store that is slow nothing else waits
            call_ids = [call.call_id for call in answer.tool_calls]
            await self.responses.share(caller, turn.response_id, known, turn.brought, call_ids)

    async def keep_request(self, caller: Caller, turn: HttpTurn, route: Route) -> None:
        """Store where a request goes, if it may be repeated."""
        if turn.repeat_key is not None:
            known = StoredRequest(turn.body, route)
            await self._store.keep_request(caller.tenant, turn.repeat_key, known)

    async def _add_to(
        self,
        conversation: ConversationTurn,
        caller: Caller,
        session_id: str,
        end: Point,
        finished: Finished,
    ) -> None:
        """Add a turn to its conversation, and remove a session that this has left."""
        tenant, before = caller.tenant, conversation.before.session_id
        kept = conversation.at.turns if conversation.at else 0
        moves = end.session_id != before
        if end.turns != kept + 1 or moves != (session_id != before):
            return  # a repeat of a turn that was added before the conversation went on
        items = [*conversation.brought, *conversation.answered(finished)]
        for left in await self.conversations.record(tenant, conversation, end, items):
            self.spawn(self.remove(Caller(CLEANER, tenant), left))

    async def _keep_history(
        self, caller: Caller, turn: HttpTurn, route: Route, at: Point, answer: Message
    ) -> bytes | None:
        """Store where the turn's history ends, if it is known; returns its digest."""
        if route.history is None:
            return None
        chain = self.chain(caller)
        said = (*turn.messages[route.first :], answer)
        history = chain.along(route.history, said)[-1]
        digests = [history, chain.within(history, route.session_id)]
        if len(said) > 1:
            digests.append(chain.exchange(*said[-2:]))
        await self._store.keep_histories(caller.tenant, [(one, at) for one in digests])
        return history

    async def _expect(
        self, caller: Caller, turn: HttpTurn, route: Route, at: Point, answer: Message
    ) -> None:
        """Report what is likely to become of the session that has answered, and of the other one.

        That is the one that the conversation resembles, if it goes on in its place now.
        """
        tools = possible_tools(call.name for call in answer.tool_calls)
        key, resembled = caller.key(self._model, route.session_id), route.resembles
        try:
            if tools and len((await self._sessions.get(key))[0].turns) == at.turns:
                await self._sessions.expect(key, tools)  # else a turn of long ago is repeated
            if resembled is not None and resembled.session_id:
                key = caller.key(self._model, resembled.session_id)
                if supersedes(turn, route, resembled, (await self._sessions.get(key))[0]):
                    await self._sessions.expect(key, superseded=True)
        except ReportedError as error:  # it is in use again, or gone
            log.debug("nothing_expected", session=str(key), reason=error.reason)

    async def _end(self, key: SessionKey, turns: int) -> None:
        """End a session of a sub-agent, unless it has gone on, here or at another server."""
        histories = self._sessions.histories
        try:
            found, _ = await self._sessions.get(key, is_fresh=histories is not None)
            is_unknown = histories is not None and histories.calls.is_silent
            if is_unknown or len(found.turns) != turns:
                return
            await self._sessions.end(key)
        except ReportedError as error:  # it is in use again, or gone
            log.debug("subagent_not_ended", session=str(key), reason=error.reason)
        else:
            log.info("subagent_ended", session=str(key))

    async def make_room(self, caller: Caller) -> bool:
        """Remove the tenant's oldest session that nobody named; return whether there was one."""
        for _ in range(MAX_TRIES):
            oldest = await self._store.take_oldest_of(caller.tenant)
            if oldest and await self._let_go(caller, oldest):
                return True
        return False

    async def begin_passing(self, caller: Caller, session_id: str) -> None:
        """Record, before a session is made, that it is for one request."""
        try:
            await self._store.begin_passing(caller.tenant, session_id)
        except BaseException:  # recorded perhaps, and now nobody makes the session
            self.spawn(self._store.end_passing(caller.tenant, session_id))
            raise

    async def _let_go(self, caller: Caller, session_id: str) -> bool:
        """Remove a session that nobody named, as an old one; return whether it was removed."""
        key = caller.key(self._model, session_id)
        try:
            await self._sessions.release(key)
        except ReportedError as error:  # it is in use again, or gone
            log.debug("openai_session_not_removed", session=session_id, reason=error.reason)
            return False
        await self._store.forget_texts(key.tenant, key.session_id)
        return True

    async def remove(self, caller: Caller, session_id: str, turns: int | None = None) -> bool:
        """Remove a session, if it has no more than `turns`; return whether it was removed."""
        is_removed = False
        try:
            key = caller.key(self._model, session_id)
            found, _ = await self._sessions.get(key)
            if turns is None or len(found.turns) <= turns:
                await self._sessions.delete(key)
                await self._store.forget_texts(key.tenant, key.session_id)
                is_removed = True
        except ReportedError as error:  # most likely it never came into being
            log.debug("openai_session_not_removed", session=session_id, reason=error.reason)
        await self._store.end_passing(caller.tenant, session_id)
        return is_removed

    async def leave(self, caller: Caller, turn: HttpTurn, route: Route) -> None:
        """Remove the session that was made for a turn whose client has left.

        A repeat may have followed the turn to its end: then the session stays.
        """
        turns = route.turns if turn.is_kept else None
        if turn.conversation is not None:  # it goes on from what it has, not from what is recorded
            name = turn.conversation.before.conversation_id
            found = await self._store.conversations.find(caller.tenant, name)
            turns = turns if found and found.session_id == route.session_id else None
        await self.remove(caller, route.session_id, turns)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Tidy up beside everything else."""
        task = _logged(work)
        try:
            self._tasks.create_task(task)
        except RuntimeError:  # the service stops: the next start does it
            task.close()
            work.close()


def supersedes(turn: HttpTurn, route: Route, resembled: Resembled, found: Transcript) -> bool:
    """Whether a turn's session takes the place of the one that the conversation resembles. Pure.

    A client that edits its conversation (messages, results of tools, what the model had thought)
    goes on in another session, and nobody comes back to the one before: what is stored of it need
    not be kept. *Superseded* is the session that gave the conversation's newest known answer, if

        1. the conversation was answered in another session than that;
        2. that answer is the session's newest, and no turn of it is under way: it was left where
           the other one begins. One that has gone on since is a branch of its own, as where
           somebody goes back to an earlier answer and tries again;
        3. no client named it: who names a session means to come back;
        4. no sub-agent asks: it is given what its agent knows, which goes on beside it.

    A conversation that only begins as a session does, with nothing of it edited, resembles none:
    forks of a common beginning, several answers to one question, and clients that take turns with
    it are branches, and live. The guess may be wrong, as where two clients have copied one
    conversation: then the other's next turn ends it (it is used), and until then its KV has had a
    worse place in the order of eviction, and nothing else.

    Args:
        turn: that was answered.
        route: the session where.
        resembled: the other one, as it was when the turn came.
        found: what it has by now; no turn of it is under way.
    """
    is_left = len(found.turns) == resembled.turns and not found.has_ended
    is_other = route.session_id != resembled.session_id
    return is_left and is_other and not (resembled.is_named or turn.is_subagent)


async def _logged(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except Exception:
        log.exception("openai_tidying_failed")
