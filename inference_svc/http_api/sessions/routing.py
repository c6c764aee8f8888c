"""Routing: the session of a turn, how many of its turns precede it, and which messages are new.

There are three ways to find a session: the client names it, or names the response that it
follows, or sends the whole conversation. In the third case the longest beginning of the messages
that ended with an answer of this service is the session's history; the messages after it are new.
Routing changes nothing, except that transcripts of other servers are copied to this one.

A history is identified by a digest (`history_chain.py`). Where a history ended, this service has
stored for its own answers. For an answer of another server, the session's transcript has it. The
client names that session, or it is unnamed and found in the object store (`remote_histories.py`).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from inference_svc.core.chat import ASSISTANT, Message
from inference_svc.core.errors import SessionBusyError
from inference_svc.core.misses import Resembled
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.transcript_format import Transcript
from inference_svc.http_api.errors import UnknownHistoryError, unknown_conversation
from inference_svc.http_api.sessions.history_chain import HistoryChain, beginnings, open_chain
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import ConversationTurn, Point, Route
from inference_svc.http_api.sessions.remote_histories import RemoteHistories
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.sessions import Sessions
from shared.types.errors import NotFoundError


class Router:
    """Finds the routes of turns, for all tenants.

    Args:
        sessions: the service's sessions.
        model: fingerprint of the model, part of every session's key.
        store: finds histories.
        framing: returns what the template makes of a client's template arguments; see
            `TurnText.framing`.
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
        self._remote = RemoteHistories(sessions, model, store)

    async def find(self, caller: Caller, chain: HistoryChain, turn: HttpTurn) -> Route:
        """Find the route of a turn that follows no response; its messages may repeat a history.

        Args:
            caller: the client and its tenant.
            chain: the history chain of the caller's tenant.
            turn: the turn.

        Raises:
            UnknownHistoryError: the named session has another history.
        """
        messages, name = turn.messages, turn.session_id
        digests = await self._digests(chain, turn)
        start = digests[0] if messages else None  # raw text or token ids have no such history
        transcript, _ = (
            await self._read_session(caller, name, is_fresh=True) if name else (None, False)
        )
        if transcript is not None and transcript.turns:
            return await self._find_in_session(chain, digests, turn, transcript)
        route = await self._find_longest_known(caller, digests, messages)
        if not name:
            known = route.first if route else 0
            route = await self._find_remote(caller, turn, digests, known) or route
        if route is None or transcript is not None:
            route = Route(name, 0, 0, start, is_named=bool(name))
        elif name:
            route = replace(route, may_append=False, is_named=True, name=name)
        resembles = await self._find_resembled(caller, chain, messages, route.first)
        return replace(route, resembles=resembles)

    async def digest_before_answer(
        self, caller: Caller, turn: HttpTurn, route: Route
    ) -> bytes | None:
        """Return the digest of all messages before a turn's answer, the same on every server.

        Returns:
            The digest; None if the turn's messages are not the whole history, or if other servers
            have no use for the session.
        """
        has_all = turn.messages and (route.first or not route.turns)
        stays = turn.is_kept and not turn.is_final
        is_shared = route.is_named or (stays and self._remote.is_shared)
        if not (has_all and is_shared) or turn.conversation is not None:
            return None
        return (await self._open_digests(caller, turn))[-1]

    def is_local(self, turn: HttpTurn, route: Route, before: bytes | None) -> bool:
        """Return whether a turn's session is this server's alone: no other server could find it.

        Args:
            turn: the turn.
            route: where it goes.
            before: the result of `digest_before_answer` for the turn.
        """
        is_response = turn.info is not None and turn.is_kept and not turn.is_final
        is_found = before is not None or (is_response and self._remote.is_shared)
        return not (route.is_named or is_found)

    async def _digests(self, chain: HistoryChain, turn: HttpTurn) -> list[bytes]:
        """Return the digests of a turn's histories: of no message, the first one, … all of them."""
        framing = await self._framing(turn.arguments) if turn.messages else ""
        return chain.along(chain.opening(turn.reading.use.tools, framing), turn.messages)

    async def _open_digests(self, caller: Caller, turn: HttpTurn) -> list[bytes]:
        """Return the digests of a turn's histories that are the same on every server."""
        return await self._digests(open_chain(caller.tenant, self._model), turn)

    async def find_after(self, caller: Caller, at: Point, history: bytes | None) -> Route | None:
        """Return the route of messages that follow a point; None if its session is gone."""
        transcript, is_busy = await self._read_session(caller, at.session_id)
        if transcript is None or not at.is_in(transcript):
            return None
        is_last = len(transcript.turns) == at.turns
        may_append = is_last and not (is_busy or transcript.has_ended)
        return Route(
            at.session_id, at.turns, 0, history, is_named=at.is_named, may_append=may_append
        )

    async def find_in_conversation(
        self, caller: Caller, chain: HistoryChain, turn: HttpTurn, conversation: ConversationTurn
    ) -> Route:
        """Find the route of a conversation's turn: its session, or one that replaces the session.

        Raises:
            UnknownConversationError: the conversation was deleted in the meantime.
            SessionBusyError: a turn is running in its session.
        """
        name, before = turn.session_id, conversation.before
        is_new = name != before.session_id
        if conversation.at is None:
            start = chain.opening(turn.reading.use.tools)
            new_name = name if is_new else ""
            return Route("" if is_new else name, 0, 0, start, is_named=True, name=new_name)
        route = await self.find_after(caller, conversation.at, None)
        if route is None:
            raise unknown_conversation(before.conversation_id)
        if is_new:
            return replace(route, may_append=False, name=name)
        if not route.may_append:
            raise SessionBusyError(
                f"session {name} is in use", "try again when its turn has finished"
            )
        return route

    async def _find_longest_known(
        self, caller: Caller, digests: Sequence[bytes], messages: Sequence[Message]
    ) -> Route | None:
        """Find the longest stored beginning of the messages whose session still exists.

        Stored histories of sessions that are gone are forgotten on the way.
        """
        lengths = beginnings(messages)
        if not lengths:
            return None
        points = await self._store.find_histories([digests[length] for length in lengths])
        gone = []
        found = None
        for length in lengths:
            at = points.get(digests[length])
            route = await self.find_after(caller, at, digests[length]) if at else None
            if route is not None:
                # A named session is its client's: a match by history alone only forks it.
                may_append = route.may_append and not route.is_named
                found = replace(route, first=length, is_named=False, may_append=may_append)
                break
            if at is not None:
                gone.append(digests[length])
        if gone:
            await self._store.forget_histories(gone)
        return found

    async def _find_remote(
        self, caller: Caller, turn: HttpTurn, digests: Sequence[bytes], known: int
    ) -> Route | None:
        """Find a beginning that another server answered, longer than the one that is known here."""
        lengths = [length for length in beginnings(turn.messages) if length > known]
        if not (lengths and self._remote.is_shared):
            return None
        shared = await self._open_digests(caller, turn)
        found = await self._remote.find(caller, [(length, shared[length]) for length in lengths])
        if found is None:
            return None
        length, at = found
        route = await self.find_after(caller, at, digests[length])
        return None if route is None else replace(route, first=length)

    async def _find_resembled(
        self, caller: Caller, chain: HistoryChain, messages: Sequence[Message], first: int
    ) -> Resembled | None:
        """Find the session that gave the last known answer among the new messages.

        Returns:
            That session, or the fact that it is gone or unknown; None if no new message is an
            answer.
        """
        ends = [place for place in beginnings(messages) if place > max(first, 1)]
        if not ends:
            return None
        digests = [chain.exchange(*messages[end - 2 : end]) for end in ends]
        points = await self._store.find_histories(digests)
        for at in (points[digest] for digest in digests if digest in points):
            transcript, _ = await self._read_session(caller, at.session_id)
            if transcript is not None and at.is_in(transcript):
                where = at.session_id, at.turns
                return Resembled(*where, was_known=True, first_message=first, is_named=at.is_named)
        return Resembled(was_known=bool(points), first_message=first)

    async def _find_in_session(
        self,
        chain: HistoryChain,
        digests: Sequence[bytes],
        turn: HttpTurn,
        transcript: Transcript,
    ) -> Route:
        """Route to the end of a named session; the messages repeat its whole history or none of it.

        Raises:
            UnknownHistoryError: the messages have another history.
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
        length = await self._matching_length(turn, transcript) if own else 0
        if length:  # another server answered, or the row here was pruned
            return Route(session_id, turns, length, digests[length], is_named=True)
        if any(message.role == ASSISTANT for message in turn.messages):
            raise UnknownHistoryError(
                f"session {session_id} has {turns} turns, but these messages do not begin with "
                "them",
                "send only what is new since its last answer, or name no session",
            )
        return Route(session_id, turns, 0, None, is_named=True)

    async def _matching_length(self, turn: HttpTurn, transcript: Transcript) -> int:
        """Return how many of the messages make up a transcript's whole history; 0: none do."""
        digest_here, header = transcript.turns[-1].said, transcript.header
        if not digest_here:
            return 0
        chain = open_chain(header.tenant, header.model)
        digests = await self._digests(chain, turn)
        return next(
            (
                length
                for length in beginnings(turn.messages)
                if chain.within(digests[length], header.session_id).hex() == digest_here
            ),
            0,
        )

    async def _read_session(
        self, caller: Caller, session_id: str, *, is_fresh: bool = False
    ) -> tuple[Transcript | None, bool]:
        """Return a session's transcript (None: there is no session), and whether a turn runs."""
        try:
            return await self._sessions.get(caller.key(self._model, session_id), is_fresh=is_fresh)
        except NotFoundError:
            return None, False
