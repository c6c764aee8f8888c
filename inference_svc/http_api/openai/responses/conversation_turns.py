"""Turns of a conversation: which items they read, and in which session.

The session of a conversation has read its instructions and tools at the beginning, and its items
up to some turn. The next turn reads the other items. If not all turns of the session are valid
(an item was deleted, a turn was started whose client left), a fork replaces the session. If the
instructions or tools have changed, a new session replaces it, and reads everything.

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
    """Stored items; their number was checked when they were added."""

    items: list[Item]


class Place(NamedTuple):
    """Where the next turn of a conversation goes.

    Attributes:
        at: the point that it follows; None: it reads everything.
        session_id: the conversation's session, or the name of one that replaces it.
    """

    at: Point | None
    session_id: str


@dataclass(frozen=True)
class NextTurn:
    """The next turn of a conversation.

    Attributes:
        before: the conversation before the turn.
        place: where the turn goes.
        instructions: the conversation's instructions.
        messages: the messages that the turn reads.
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
    """Find where the next turn of a conversation goes. Pure.

    Args:
        before: the conversation.
        session: its session; None if there is none.
        instructions: instructions of the next response; "" to keep the conversation's.
        tools: tools that it offers; empty to keep the conversation's.
        new_name: name of a session that would replace the conversation's.
    """
    if session is None:
        return Place(None, before.session_id)
    digest = ChatInput((), tuple(tools)).tools_digest
    has_same_instructions = instructions in {"", before.instructions}
    continues = (
        has_same_instructions
        and digest in {"", session.tools_digest}
        and _has_turns(session, before)
    )
    num_read = before.turns if continues else 0
    is_free = len(session.turns) == num_read and not session.has_ended
    at = _end_point(before) if continues else None
    return Place(at, before.session_id if is_free else new_name)


def without_turn(before: Conversation, session: Transcript | None, turn: int) -> Conversation:
    """Return a conversation with the turns that stay valid when an item is deleted. Pure.

    Args:
        before: the conversation.
        session: its session; None if there is none.
        turn: the turn that has read the item, from 1; a larger number than the conversation has
            turns if none has read it.
    """
    if turn > before.turns:
        return before
    if session is None or turn == 1 or not _has_turns(session, before):
        return replace(before, turns=0, request_id="")
    return replace(before, turns=turn - 1, request_id=session.turns[turn - 2].request_id)


def _end_point(conversation: Conversation) -> Point:
    """Return where the turns of a conversation end."""
    name, turns = conversation.session_id, conversation.turns
    return Point(name, turns, conversation.request_id, is_named=True)


def _has_turns(session: Transcript, conversation: Conversation) -> bool:
    """Return whether a session has the conversation's turns; its name may have been used again."""
    return _end_point(conversation).is_in(session)


async def find_next_turn(
    api: Api,
    caller: Caller,
    conversation_id: str,
    items: Sequence[Item],
    instructions: str,
    tools: Sequence[Tool],
    *,
    is_held: bool = False,
) -> NextTurn:
    """Find where the next turn of a conversation goes, and what it reads.

    Args:
        api: the API's parts.
        caller: the client and its tenant.
        conversation_id: id of the conversation.
        items: input items of the next response.
        instructions: see `next_place`.
        tools: see `next_place`.
        is_held: whether the caller holds the conversation.

    Raises:
        UnknownConversationError: the tenant has none of that id.
        TranscriptUnavailableError: it is not here, and the object store does not answer.
        InputTooLongError: there is more to read than one turn may.
    """
    before = await find_conversation(api, caller, conversation_id, is_held=is_held)
    session = await session_of(api, caller, before)
    new_name = f"{conversation_id}-{uuid4().hex[:8]}"
    place = next_place(before, session, instructions, tools, new_name)
    num_read = place.at.turns if place.at else 0
    stored, most_bytes = api.store.conversations, api.settings.max_body_bytes
    unread = await stored.unread(conversation_id, num_read, most_bytes)
    calls = await stored.calls(conversation_id, num_read) if num_read else []
    leading_instructions = instructions or before.instructions
    system = (
        () if num_read or not leading_instructions else (Message(SYSTEM, leading_instructions),)
    )
    messages = with_names(messages_of([*_decode_items(unread), *items]), _calls_of(calls))
    return NextTurn(before, place, leading_instructions, (*system, *messages))


async def find_conversation(
    api: Api, caller: Caller, conversation_id: str, *, is_held: bool = False
) -> Conversation:
    """Return a conversation of the caller's tenant, with the changes of other servers.

    Args:
        api: the API's parts.
        caller: the client and its tenant.
        conversation_id: id of the conversation.
        is_held: whether the caller holds the conversation.

    Raises:
        UnknownConversationError: the tenant has none of that id.
        TranscriptUnavailableError: it is not here, and the object store does not answer.
    """
    if conversation_id.isascii() and conversation_id.startswith(CONVERSATION):
        find = api.conversations.find
        found = await find(caller.tenant, conversation_id, is_held=is_held)
        if found is not None:
            return found
    raise unknown_conversation(conversation_id)


async def session_of(api: Api, caller: Caller, conversation: Conversation) -> Transcript | None:
    """Return the newest transcript of a conversation's session; None if there is none."""
    key = api.gateway.key(caller.identity, caller.tenant, conversation.session_id)
    try:
        session, _ = await api.gateway.turns.sessions.get(key, is_fresh=True)
    except NotFoundError:
        return None
    return session


def _decode_items(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    return decode(_StoredItems, {"items": items}).items


def _calls_of(items: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    return [call for message in messages_of(_decode_items(items)) for call in message.tool_calls]
