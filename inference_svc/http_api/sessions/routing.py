"""Where a turn goes: into which session, after how many of its turns, with which of the messages.

Three ways to say it: the client names a session, or a response that it follows, or lets the
messages speak for themselves: then the longest beginning of them that ended with an answer of this
service is the session's history, and what follows is new. Nothing is changed here.

A history is known by a digest (`history_chain.py`). Where one ended, this service has stored, of
its own answers. Of an answer that another server gave in a session that its client named, the
session's transcript says it.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference_svc.core.chat import ASSISTANT, Message
from inference_svc.core.errors import SessionBusyError
from inference_svc.core.misses import Resembled
from inference_svc.core.submission import (
    NO_RETENTION,
    Retention,
    Submission,
    TextInput,
    TokenInput,
    TurnDefaults,
)
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.transcript_format import Transcript
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.errors import UnknownHistoryError, unknown_conversation
from inference_svc.http_api.sessions.history_chain import HistoryChain, beginnings, open_chain
from inference_svc.http_api.sessions.lookup import (
    ConversationTurn,
    Point,
    ResponseInfo,
    Route,
    StoredResponse,
)
from inference_svc.http_api.sessions.store import ApiStore
from inference_svc.runtime.turns.sessions import Sessions
from inference_svc.service.submissions import (
    chat_input,
    fill_compression,
    fill_overflow,
    fill_sampling,
)
from shared.access.identity import Identity
from shared.types.errors import NotFoundError
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class Caller:
    """A client's identity, and the tenant that it acts for: one of the identity's."""

    identity: Identity
    tenant: str


@dataclass(frozen=True)
class HttpTurn:
    """A turn that an HTTP request asks for, whichever API it speaks.

    Attributes:
        messages: the history and the new ones, or those that follow `previous`; none: it is raw.
        sampling: the client's sampling values, by the names of `SamplingParams`.
        session_id: the session that the client named; "" for none.
        is_kept: whether the session may stay when the turn is over.
        overflow: the overflow policy's name; "" for the service's.
        request_id: the turn's: a digest of the whole request, or one that is never used again.
        body: digest of the request's body.
        repeat_key: digest of its idempotency key; None if there is none.
        previous: the response that it follows.
        response_id: id under which its response is stored; "" if it is no response.
        info: the response's members beside its answer.
        brought: the response's input, to be kept with it; "": it is not.
        raw: raw text or token ids in place of messages; no later history is known by them.
        reading: how its answer is read, and the tools that it offers.
        is_final: whether the session is deleted when the answer has come.
        is_subagent: whether a sub-agent asks.
        retention: for how long the client wants what is computed to be kept at least.
        arguments: of the chat template, as the client gives them.
        prediction: what most of the answer will likely be; "" if the client does not say.
        conversation: the conversation that it is a turn of, in the session `session_id`.
    """

    messages: tuple[Message, ...]
    sampling: Mapping[str, Any]
    session_id: str
    is_kept: bool
    overflow: str
    request_id: str
    body: bytes
    repeat_key: bytes | None = None
    previous: StoredResponse | None = None
    response_id: str = ""
    info: ResponseInfo | None = None
    brought: str = ""
    raw: TextInput | TokenInput | None = None
    reading: Reading = field(default_factory=Reading)
    is_final: bool = False
    is_subagent: bool = False
    retention: Retention = NO_RETENTION
    arguments: Arguments = field(default_factory=dict)
    prediction: str = ""
    conversation: ConversationTurn | None = None

    def as_submission(
        self, route: Route, key: SessionKey, defaults: TurnDefaults, before: bytes | None = None
    ) -> Submission:
        """Make the submission to the route's session.

        Args:
            route: where the turn goes.
            key: of the session there.
            defaults: what the client does not say.
            before: digest of all that was said before the answer; see `Router.before_answer`.

        Raises:
            EmptyTurnError: no new message has any content.
            InvalidSamplingError: listing every value out of range.
            InvalidCompressionError: the settings' policy does not go with this model.
        """
        new, reading = self.messages[route.first :], self.reading
        return Submission(
            key=key,
            input=self.raw or chat_input(new, reading.use.tools, self.arguments, reading.beginning),
            sampling=fill_sampling(self.sampling, defaults),
            has_max_tokens="max_tokens" in self.sampling,
            request_id=self.request_id,
            digest="",
            expected_turn=route.turns,
            waits=False,
            is_final=not self.is_kept,
            arrived_ns=time.monotonic_ns(),
            overflow=fill_overflow({"name": self.overflow} if self.overflow else {}, defaults),
            compression=fill_compression(defaults),
            retention=self.retention,
            shown_marks=reading.marks if self.raw is None else frozenset(),
            calls=reading.calls if self.raw is None else None,
            prediction=self.prediction,
            resembles=route.resembles,
            is_local=not route.is_named,
            said=self._said(key, before),
        )

    def _said(self, key: SessionKey, before: bytes | None) -> Callable[[str], str] | None:
        """Return what makes the digest of all that was said, once the answer is there."""
        if before is None:
            return None
        chain = open_chain(key)

        def said(text: str) -> str:
            history = chain.after(before, self.reading.message(text))
            return chain.within(history, key.session_id).hex()

        return said


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
        if route is None or transcript is not None:
            route = Route(name, 0, 0, start, is_named=bool(name))
        elif name:
            route = replace(route, may_append=False, is_named=True, name=name)
        resembles = await self._resembled(caller, chain, messages, route.first)
        return replace(route, resembles=resembles)

    async def before_answer(self, caller: Caller, turn: HttpTurn, route: Route) -> bytes | None:
        """Return the digest, the same on every server, of all that was said before a turn's answer.

        None: the turn does not have all of it, or no client has named the session.
        """
        has_all = turn.messages and (route.first or not route.turns)
        if not (has_all and route.is_named) or turn.conversation is not None:
            return None
        key = self._key(caller, route.session_id)
        return (await self._digests(open_chain(key), turn))[-1]

    async def _digests(self, chain: HistoryChain, turn: HttpTurn) -> list[bytes]:
        """Return the digests of a turn's messages: of none of them, the first, … all of them."""
        framing = await self._framing(turn.arguments) if turn.messages else ""
        return chain.along(chain.opening(turn.reading.use.tools, framing), turn.messages)

    async def after(self, caller: Caller, at: Point, history: bytes | None) -> Route | None:
        """Find the route of messages that follow a point; None if its session is gone."""
        transcript, is_busy = await self._session(caller, at.session_id)
        if transcript is None or not holds(transcript, at):
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
            if transcript is not None and holds(transcript, at):
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
            if at is not None and at.turns == turns and holds(transcript, at):
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
        chain = open_chain(header.key)
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
            return await self._sessions.get(self._key(caller, session_id), is_fresh=is_fresh)
        except NotFoundError:
            return None, False

    def _key(self, caller: Caller, session_id: str) -> SessionKey:
        return caller.identity.key(caller.tenant, self._model, session_id)


def holds(transcript: Transcript, at: Point) -> bool:
    """Whether a session still has the turn: one of the same name may have been made since."""
    turns = transcript.turns
    return 0 < at.turns <= len(turns) and turns[at.turns - 1].request_id == at.request_id
