"""Where a turn goes: into which session, after how many of its turns, with which of the messages.

Three ways to say it: the client names a session, or a response that it follows, or lets the
messages speak for themselves: then the longest beginning of them that ended with an answer of this
service is the session's history, and what follows is new. Nothing is changed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_svc.core.transcript_format import Transcript
from inference_svc.openai.errors import UnknownHistoryError
from inference_svc.openai.history_chain import HistoryChain, beginnings
from inference_svc.openai.known import Point
from inference_svc.openai.messages import ASSISTANT, Message
from inference_svc.openai.remembered import Remembered
from inference_svc.service.gateway import Front
from shared.access.identity import Identity
from shared.types.errors import NotFoundError


@dataclass(frozen=True)
class Caller:
    """Who asks, and as which tenant."""

    identity: Identity
    tenant: str


@dataclass(frozen=True)
class Place:
    """See the module docstring.

    Attributes:
        session_id: "" for a new session.
        turns: of the session, that precede this one.
        first: of the messages, that is new.
        history: digest of what precedes that one; None if nobody knows.
        is_named: the client named the session.
        goes_on: the turn may be appended to the session; else it is for a fork of it.
        name: that the fork gets; "": one is made up.
    """

    session_id: str
    turns: int
    first: int
    history: bytes | None
    is_named: bool = False
    goes_on: bool = True
    name: str = ""


class Places:
    """Finds places; one for all tenants."""

    def __init__(self, front: Front, remembered: Remembered) -> None:
        self._front = front
        self._remembered = remembered

    async def find(
        self, caller: Caller, chain: HistoryChain, messages: Sequence[Message], name: str
    ) -> Place:
        """The place of messages that may repeat a history.

        Args:
            caller: who asks.
            chain: of the caller's tenant.
            messages: all of them.
            name: of the session; "" if the client leaves that to us.

        Raises:
            UnknownHistoryError: the named session has another history.
        """
        digests = chain.along(chain.start, messages)
        if not name:
            place = await self._known(caller, digests, messages)
            return place or Place("", 0, 0, chain.start)
        transcript = await self._transcript(caller, name)
        if transcript is not None and transcript.turns:
            return await self._in_session(chain, digests, messages, transcript)
        place = await self._known(caller, digests, messages)
        if place is None or transcript is not None:
            return Place(name, 0, 0, chain.start, is_named=True)
        return replace(place, goes_on=False, is_named=True, name=name)

    async def after(self, caller: Caller, at: Point, history: bytes | None) -> Place | None:
        """The place of messages that follow a point; None if the session is not there any more."""
        transcript, is_busy = await self._session(caller, at.session_id)
        if transcript is None or not _holds(transcript, at):
            return None
        is_last = len(transcript.turns) == at.turns
        goes_on = is_last and not (is_busy or transcript.has_ended)
        return Place(at.session_id, at.turns, 0, history, is_named=at.is_named, goes_on=goes_on)

    async def _known(
        self, caller: Caller, digests: Sequence[bytes], messages: Sequence[Message]
    ) -> Place | None:
        """The longest beginning that is known, and whose session is still there."""
        lengths = beginnings(messages)
        if not lengths:
            return None
        points = await self._remembered.find_histories([digests[length] for length in lengths])
        gone = []
        found = None
        for length in lengths:
            at = points.get(digests[length])
            place = await self.after(caller, at, digests[length]) if at else None
            if place is not None:  # nobody goes on with a session that another gave a name
                goes_on = place.goes_on and not place.is_named
                found = replace(place, first=length, is_named=False, goes_on=goes_on)
                break
            if at is not None:
                gone.append(digests[length])
        if gone:
            await self._remembered.forget_histories(gone)
        return found

    async def _in_session(
        self,
        chain: HistoryChain,
        digests: Sequence[bytes],
        messages: Sequence[Message],
        transcript: Transcript,
    ) -> Place:
        """The end of a session that the client named: its messages tell its history, or none."""
        session_id, turns = transcript.header.session_id, len(transcript.turns)
        own = {length: chain.within(digests[length], session_id) for length in beginnings(messages)}
        points = await self._remembered.find_histories(list(own.values())) if own else {}
        for length, digest in own.items():
            at = points.get(digest)
            if at is not None and at.turns == turns and _holds(transcript, at):
                return Place(session_id, turns, length, digests[length], is_named=True)
        if any(message.role == ASSISTANT for message in messages):
            raise UnknownHistoryError(
                f"session {session_id} has {turns} turns, and these messages do not repeat them",
                "send what is new since its last answer, or leave the session out",
            )
        return Place(session_id, turns, 0, None, is_named=True)

    async def _transcript(self, caller: Caller, session_id: str) -> Transcript | None:
        transcript, _ = await self._session(caller, session_id)
        return transcript

    async def _session(self, caller: Caller, session_id: str) -> tuple[Transcript | None, bool]:
        try:
            return await self._front.get_session(caller.identity, caller.tenant, session_id)
        except NotFoundError:
            return None, False


def _holds(transcript: Transcript, at: Point) -> bool:
    """Whether a session still has the turn: one of the same name may have been made since."""
    turns = transcript.turns
    return 0 < at.turns <= len(turns) and turns[at.turns - 1].request_id == at.request_id
