"""Where a turn goes: into which session, after how many of its turns, with which of the messages.

Three ways to say it: the client names a session, or a response that it follows, or lets the
messages speak for themselves: then the longest beginning of them that ended with an answer of this
service is the session's history, and what follows is new. Nothing is changed here, but that
sessions of other servers come here.

A history is known by a digest (`history_chain.py`). Where one ended, this service has stored, of
its own answers. Of an answer that another server gave the session's transcript says it; which
session that is, the client says, or the store of those that nobody named (`elsewhere.py`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from inference_svc.core.chat import ASSISTANT, Message
from inference_svc.core.errors import SessionBusyError
from inference_svc.core.misses import Resembled
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.transcript_format import Transcript
from inference_svc.http_api.errors import UnknownHistoryError, unknown_conversation
from inference_svc.http_api.sessions.elsewhere import Elsewhere
from inference_svc.http_api.sessions.history_chain import HistoryChain, beginnings, open_chain
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import ConversationTurn, Point, Route
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.sessions import Sessions
from shared.types.errors import NotFoundError


class Router:
    """Finds routes; one for all tenants.

    Args:
        sessions: of the service.
        model: fingerprint of the model, part of every session's key.
        store: finds histories.
        framing: of a client's template arguments; see `TurnText.framing`.
    """

    def __init__(
        self,
        sessions: Sessions,
        model: str,
        store: ApiStore,
        framing: Callable[[Arguments], Awaitable[str]],
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._store = store
        self._framing = framing
        self._elsewhere = Elsewhere(sessions, model, store)

    async def find(self, caller: Caller, chain: HistoryChain, turn: HttpTurn) -> Route:
        """Find the route of a turn whose messages, if it has any, may repeat a history.

        Args:
            caller: who asks.
            chain: digests of the caller's tenant.
            turn: that follows no response.

        Raises:
            UnknownHistoryError: the named session has another history.
        """
        messages, name = turn.messages, turn.session_id
        digests = await self._digests(chain, turn)
        start = digests[0] if messages else None  # what is raw is no history of messages
        transcript, _ = await self._session(caller, name, is_fresh=True) if name else (None, False)
        if transcript is not None and transcript.turns:
            return await self._in_session(chain, digests, turn, transcript)
        route = await self._longest_known(caller, digests, messages)
        if not name:
            known = route.first if route else 0
            route = await self._from_elsewhere(caller, turn, digests, known) or route
        if route is None or transcript is not None:
            route = Route(name, 0, 0, start, is_named=bool(name))
        elif name:
            route = replace(route, may_append=False, is_named=True, name=name)
        resembles = await self._resembled(caller, chain, messages, route.first)
        return replace(route, resembles=resembles)

    async def before_answer(self, caller: Caller, turn: HttpTurn, route: Route) -> bytes | None:
        """Return the digest, the same on every server, of all that was said before a turn's answer.

        None: the turn does not have all of it, or its session is of no use to other servers.
        """
        has_all = turn.messages and (route.first or not route.turns)
        stays = turn.is_kept and not turn.is_final
        is_shared = route.is_named or (stays and self._elsewhere.is_shared)
        if not (has_all and is_shared) or turn.conversation is not None:
            return None
        return (await self._open_digests(caller, turn))[-1]

    def is_local(self, turn: HttpTurn, route: Route, before: bytes | None) -> bool:
        """Whether a turn's session is of no use to other servers: nobody could find it there.

        Args:
            turn: the turn.
            route: where it goes.
            before: what `before_answer` has said of it.
        """
        is_response = turn.info is not None and turn.is_kept and not turn.is_final
        is_found = before is not None or (is_response and self._elsewhere.is_shared)
        return not (route.is_named or is_found)

    async def _digests(self, chain: HistoryChain, turn: HttpTurn) -> list[bytes]:
        """Return the digests of a turn's messages: of none of them, the first, … all of them."""
        framing = await self._framing(turn.arguments) if turn.messages else ""
        return chain.along(chain.opening(turn.reading.use.tools, framing), turn.messages)

    async def _open_digests(self, caller: Caller, turn: HttpTurn) -> list[bytes]:
        """Return the same digests as every server has."""
        return await self._digests(open_chain(caller.tenant, self._model), turn)

    async def after(self, caller: Caller, at: Point, history: bytes | None) -> Route | None:
        """Find the route of messages that follow a point; None if its session is gone."""
        transcript, is_busy = await self._session(caller, at.session_id)
        if transcript is None or not at.is_in(transcript):
            return None
        is_last = len(transcript.turns) == at.turns
        may_append = is_last and not (is_busy or transcript.has_ended)
        return Route(
            at.session_id, at.turns, 0, history, is_named=at.is_named, may_append=may_append
        )

    async def in_conversation(
        self, caller: Caller, chain: HistoryChain, turn: HttpTurn, going: ConversationTurn
    ) -> Route:
        """Find the route of a turn of a conversation: its session, or one that takes its place.

        Raises:
            UnknownConversationError: the conversation was deleted meanwhile.
            SessionBusyError: a turn is under way in its session.
        """
        name, before = turn.session_id, going.before
        is_new = name != before.session_id
        if going.at is None:
            start = chain.opening(turn.reading.use.tools)
            new_name = name if is_new else ""
            return Route("" if is_new else name, 0, 0, start, is_named=True, name=new_name)
        route = await self.after(caller, going.at, None)
        if route is None:
            raise unknown_conversation(before.conversation_id)
        if is_new:
            return replace(route, may_append=False, name=name)
        if not route.may_append:
            raise SessionBusyError(
                f"session {name} is in use", "try again when its turn has finished"
            )
        return route

    async def _longest_known(
        self, caller: Caller, digests: Sequence[bytes], messages: Sequence[Message]
    ) -> Route | None:
        """Find the longest beginning that is stored, and whose session is still there."""
        lengths = beginnings(messages)
        if not lengths:
            return None
        points = await self._store.find_histories([digests[length] for length in lengths])
        gone = []
        found = None
        for length in lengths:
            at = points.get(digests[length])
            route = await self.after(caller, at, digests[length]) if at else None
            if route is not None:  # nobody continues a session that another client named
                may_append = route.may_append and not route.is_named
                found = replace(route, first=length, is_named=False, may_append=may_append)
                break
            if at is not None:
                gone.append(digests[length])
        if gone:
            await self._store.forget_histories(gone)
        return found

    async def _from_elsewhere(
        self, caller: Caller, turn: HttpTurn, digests: Sequence[bytes], known: int
    ) -> Route | None:
        """Find a beginning that other servers know, if it is longer than what is known here."""
        lengths = [length for length in beginnings(turn.messages) if length > known]
        if not (lengths and self._elsewhere.is_shared):
            return None
        shared = await self._open_digests(caller, turn)
        found = await self._elsewhere.find(caller, [(length, shared[length]) for length in lengths])
        if found is None:
            return None
        length, at = found
        route = await self.after(caller, at, digests[length])
        return None if route is None else replace(route, first=length)

    async def _resembled(
        self, caller: Caller, chain: HistoryChain, messages: Sequence[Message], first: int
    ) -> Resembled | None:
        """Find a session that gave an answer among the new messages, the last one that is known."""
        ends = [place for place in beginnings(messages) if place > max(first, 1)]
        if not ends:
            return None
        digests = [chain.exchange(*messages[end - 2 : end]) for end in ends]
        points = await self._store.find_histories(digests)
        for at in (points[digest] for digest in digests if digest in points):
            transcript, _ = await self._session(caller, at.session_id)
            if transcript is not None and at.is_in(transcript):
                where = at.session_id, at.turns
                return Resembled(*where, was_known=True, first_message=first, is_named=at.is_named)
        return Resembled(was_known=bool(points), first_message=first)

    async def _in_session(
        self,
        chain: HistoryChain,
        digests: Sequence[bytes],
        turn: HttpTurn,
        transcript: Transcript,
    ) -> Route:
        """Route to the end of a session that the client named: its messages repeat it, or none do.

        Raises:
            UnknownHistoryError: they have another history.
        """
        session_id, turns = transcript.header.session_id, len(transcript.turns)
        own = {
            length: chain.within(digests[length], session_id)
            for length in beginnings(turn.messages)
        }
        points = await self._store.find_histories(list(own.values())) if own else {}
        for length, digest in own.items():
            at = points.get(digest)
            if at is not None and at.turns == turns and at.is_in(transcript):
                return Route(session_id, turns, length, digests[length], is_named=True)
        length = await self._length_said(turn, transcript) if own else 0
        if length:  # another server has answered, or this one has forgotten
            return Route(session_id, turns, length, digests[length], is_named=True)
        if any(message.role == ASSISTANT for message in turn.messages):
            raise UnknownHistoryError(
                f"session {session_id} has {turns} turns, and these messages do not repeat them",
                "send what is new since its last answer, or leave the session out",
            )
        return Route(session_id, turns, 0, None, is_named=True)

    async def _length_said(self, turn: HttpTurn, transcript: Transcript) -> int:
        """Return how many of the messages are all that a transcript's turns have said; 0: none."""
        said, header = transcript.turns[-1].said, transcript.header
        if not said:
            return 0
        chain = open_chain(header.tenant, header.model)
        digests = await self._digests(chain, turn)
        return next(
            (
                length
                for length in beginnings(turn.messages)
                if chain.within(digests[length], header.session_id).hex() == said
            ),
            0,
        )

    async def _session(
        self, caller: Caller, session_id: str, *, is_fresh: bool = False
    ) -> tuple[Transcript | None, bool]:
        """Return a session's transcript, if it is there, and whether a turn is under way."""
        try:
            return await self._sessions.get(caller.key(self._model, session_id), is_fresh=is_fresh)
        except NotFoundError:
            return None, False
