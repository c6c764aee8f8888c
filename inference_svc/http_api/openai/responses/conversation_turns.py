"""Turns of a conversation: what of it they read, and in which session.

The session of a conversation has read its items up to some turn, and its tools and instructions at
the beginning. What is left is new to the next turn. Where less of the session counts than it has
(an item was deleted, a turn was begun that nobody waited for), a fork takes its place, and where
instructions or tools are others, a new session does, which reads everything.

*Source:* OpenAI API reference, "Conversations".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from uuid import uuid4

from inference_svc.core.chat import SYSTEM, Message, Tool, ToolCall
from inference_svc.core.submission import ChatInput
from inference_svc.core.transcript_format import Transcript
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import Body, decode
from inference_svc.http_api.bodies.conversation import with_names
from inference_svc.http_api.errors import unknown_conversation
from inference_svc.http_api.openai.responses.input_items import Item, messages_of
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.http_api.sessions.lookup import CONVERSATION, Conversation, Point
from shared.types.errors import NotFoundError


class _StoredItems(Body):
    """Items as they are stored: their number was bounded as they came."""

    items: list[Item]


class Place(NamedTuple):
    """Where the next turn goes.

    Attributes:
        at: the turns that it follows; None: it reads everything.
        session_id: the session that has them, or one that takes its place.
    """

    at: Point | None
    session_id: str


@dataclass(frozen=True)
class Going:
    """A conversation that goes on.

    Attributes:
        before: the conversation as it is.
        place: where its next turn goes.
        instructions: that lead it.
        messages: what that turn reads.
    """

    before: Conversation
    place: Place
    instructions: str
    messages: tuple[Message, ...]


def next_place(
    before: Conversation,
    session: Transcript | None,
    instructions: str,
    tools: Sequence[Tool],
    new_name: str,
) -> Place:
    """Find where the next turn goes. Pure.

    Args:
        before: the conversation.
        session: its session, if it is there.
        instructions: of the next response; "": those that lead the conversation.
        tools: that it offers; none: those of the conversation.
        new_name: name of a session that takes the other's place.
    """
    if session is None:
        return Place(None, before.session_id)
    digest = ChatInput((), tuple(tools)).tools_digest
    is_led_so = instructions in {"", before.instructions}
    goes_on = is_led_so and digest in {"", session.tools_digest} and _has(session, before)
    num_read = before.turns if goes_on else 0
    is_free = len(session.turns) == num_read and not session.has_ended
    at = _end(before) if goes_on else None
    return Place(at, before.session_id if is_free else new_name)


def without_turn(before: Conversation, session: Transcript | None, turn: int) -> Conversation:
    """Return the conversation when an item is deleted, as far as its session still counts. Pure.

    Args:
        before: the conversation.
        session: its session, if it is there.
        turn: that has read the item, from 1; more than the conversation has: none has.
    """
    if turn > before.turns:
        return before
    if session is None or turn == 1 or not _has(session, before):
        return replace(before, turns=0, request_id="")
    return replace(before, turns=turn - 1, request_id=session.turns[turn - 2].request_id)


def _end(conversation: Conversation) -> Point:
    """Return where the turns of a conversation end."""
    name, turns = conversation.session_id, conversation.turns
    return Point(name, turns, conversation.request_id, is_named=True)


def _has(session: Transcript, conversation: Conversation) -> bool:
    """Whether a session has the conversation's turns: one of its name may have been made since."""
    return _end(conversation).is_in(session)


async def going_on(
    api: Api,
    caller: Caller,
    conversation_id: str,
    items: Sequence[Item],
    instructions: str,
    tools: Sequence[Tool],
    *,
    is_held: bool = False,
) -> Going:
    """Find where a conversation goes on, and what its next turn reads.

    Args:
        api: the API's parts.
        caller: whose conversation it is.
        conversation_id: its id.
        items: of the next response's input.
        instructions: see `next_place`.
        tools: likewise.
        is_held: whether the caller holds it.

    Raises:
        UnknownConversationError: there is none of that id.
        TranscriptUnavailableError: nobody knows whether there is.
        InputTooLongError: a turn does not read so much.
    """
    before = await find_conversation(api, caller, conversation_id, is_held=is_held)
    session = await session_of(api, caller, before)
    new_name = f"{conversation_id}-{uuid4().hex[:8]}"
    place = next_place(before, session, instructions, tools, new_name)
    num_read = place.at.turns if place.at else 0
    stored, most_bytes = api.store.conversations, api.settings.max_body_bytes
    unread = await stored.unread(conversation_id, num_read, most_bytes)
    called = await stored.calls(conversation_id, num_read) if num_read else []
    leading = instructions or before.instructions
    told = () if num_read or not leading else (Message(SYSTEM, leading),)
    messages = with_names(messages_of([*_decoded(unread), *items]), _calls(called))
    return Going(before, place, leading, (*told, *messages))


async def find_conversation(
    api: Api, caller: Caller, conversation_id: str, *, is_held: bool = False
) -> Conversation:
    """Look the caller's conversation up; what other servers have made of it is here then.

    Args:
        api: the API's parts.
        caller: whose conversation it is.
        conversation_id: its id.
        is_held: whether the caller holds it.

    Raises:
        UnknownConversationError: it has none of that id.
        TranscriptUnavailableError: nobody knows whether it has.
    """
    if conversation_id.isascii() and conversation_id.startswith(CONVERSATION):
        find = api.conversations.find
        found = await find(caller.tenant, conversation_id, is_held=is_held)
        if found is not None:
            return found
    raise unknown_conversation(conversation_id)


async def session_of(api: Api, caller: Caller, conversation: Conversation) -> Transcript | None:
    """Return a conversation's session, wherever it went on; None: it has none yet, or lost it."""
    key = api.gateway.key(caller.identity, caller.tenant, conversation.session_id)
    try:
        session, _ = await api.gateway.turns.sessions.get(key, is_fresh=True)
    except NotFoundError:
        return None
    return session


def _decoded(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    return decode(_StoredItems, {"items": items}).items


def _calls(items: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    return [call for message in messages_of(_decoded(items)) for call in message.tool_calls]
