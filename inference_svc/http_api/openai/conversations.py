"""/v1/conversations: lists of items that responses continue.

Nothing is computed here. Items that are added, and items after a deleted one, are read by the
conversation's next response (`responses/conversation_turns.py`).

*Source:* OpenAI API reference, "Conversations".
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any
from uuid import uuid4

from aiohttp import web
from pydantic import BeforeValidator, FailFast, Field

from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import Body, Metadata, WrongMemberError
from inference_svc.http_api.bodies.conversation import check_bounded
from inference_svc.http_api.errors import UnknownItemError
from inference_svc.http_api.openai.pages import check_query, list_object, read_page
from inference_svc.http_api.openai.responses.conversation_turns import (
    find_conversation,
    session_of,
    without_turn,
)
from inference_svc.http_api.openai.responses.input_items import (
    PREFIXES,
    Item,
    check_kinds,
    objects_of,
)
from inference_svc.http_api.replies import reply
from inference_svc.http_api.requests import caller_of
from inference_svc.http_api.sessions.lookup import CONVERSATION, Conversation
from shared.types.errors import NotFoundError

MAX_ADDED = 20  # items of one request; OpenAI's bound


def _check_added(raw: Any) -> Any:
    """Check the number and types of added items before they are validated."""
    if not isinstance(raw, list):
        raise WrongMemberError("{path} is not a list", "send a list of items")
    if len(raw) > MAX_ADDED:
        raise WrongMemberError(
            f"{len(raw)} items are too many", f"send at most {MAX_ADDED} at a time"
        )
    return check_kinds(check_bounded(raw) if raw else raw)


AddedItems = Annotated[list[Item], FailFast(), BeforeValidator(_check_added)]


class ConversationBody(Body):
    """The body of POST /v1/conversations."""

    items: AddedItems = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class MetadataBody(Body):
    """The body of POST /v1/conversations/{id}: the new metadata."""

    metadata: Metadata = Field(default_factory=dict)


class ItemsBody(Body):
    """The body of POST /v1/conversations/{id}/items."""

    items: AddedItems = Field(default=None, validate_default=True)


async def create_conversation(api: Api, request: web.Request) -> web.Response:
    """Create a conversation; its first response reads the items."""
    caller, body = caller_of(request), await api.read_body(request, ConversationBody)
    name = f"{CONVERSATION}{uuid4().hex}"
    conversation = Conversation(name, int(time.time()), body.metadata, session_id=name)
    await api.conversations.create(caller.tenant, conversation, _with_ids(body.items))
    return reply(_object(conversation))


async def show_conversation(api: Api, request: web.Request) -> web.Response:
    """Show a conversation."""
    return reply(_object(await find_conversation(api, caller_of(request), _name(request))))


async def update_conversation(api: Api, request: web.Request) -> web.Response:
    """Replace a conversation's metadata."""
    caller, body = caller_of(request), await api.read_body(request, MetadataBody)
    found = await find_conversation(api, caller, _name(request))
    await api.conversations.set_metadata(caller.tenant, found.conversation_id, body.metadata)
    return reply(_object(replace(found, metadata=body.metadata)))


async def delete_conversation(api: Api, request: web.Request) -> web.Response:
    """Delete a conversation with its items and its session."""
    caller, name = caller_of(request), _name(request)
    with api.conversations.holds.hold(caller.tenant, name):
        found = await find_conversation(api, caller, name, is_held=True)
        key = api.gateway.key(caller.identity, caller.tenant, found.session_id)
        try:
            await api.gateway.delete_session(key)  # a hook then deletes the conversation, too
        except NotFoundError:  # no response has begun the session yet
            await api.conversations.delete(caller.tenant, name)
    return reply({"id": name, "object": "conversation.deleted", "deleted": True})


async def list_items(api: Api, request: web.Request) -> web.Response:
    """Show a page of a conversation's items."""
    page = read_page(request)
    found = await find_conversation(api, caller_of(request), _name(request))
    shown = await api.store.conversations.page(
        found.conversation_id, page.limit, page.after, is_ascending=page.is_ascending
    )
    if shown is None:
        raise page.unknown_after_error()
    items, has_more = shown
    return reply(list_object(items, has_more=has_more))


async def add_items(api: Api, request: web.Request) -> web.Response:
    """Add items to a conversation; its next response reads them before its input."""
    check_query(request)
    caller, body = caller_of(request), await api.read_body(request, ItemsBody)
    items = _with_ids(body.items)
    with api.conversations.holds.hold(caller.tenant, _name(request)):
        found = await find_conversation(api, caller, _name(request), is_held=True)
        await api.conversations.add(caller.tenant, found.conversation_id, items)
    return reply(list_object(items))


async def show_item(api: Api, request: web.Request) -> web.Response:
    """Show one item of a conversation."""
    check_query(request)
    found = await find_conversation(api, caller_of(request), _name(request))
    item_id = request.match_info["item"]
    item = await api.store.conversations.item(found.conversation_id, item_id)
    if item is None:
        raise _unknown_item(item_id)
    return reply(item)


async def delete_item(api: Api, request: web.Request) -> web.Response:
    """Delete an item; the session's turns from the one that read it on do not count any more."""
    caller, item_id = caller_of(request), request.match_info["item"]
    with api.conversations.holds.hold(caller.tenant, _name(request)):
        found = await find_conversation(api, caller, _name(request), is_held=True)
        turn = await api.store.conversations.turn_of(found.conversation_id, item_id)
        if turn is None:
            raise _unknown_item(item_id)
        remaining = without_turn(found, await session_of(api, caller, found), turn)
        await api.conversations.delete_item(caller.tenant, remaining, item_id)
    return reply(_object(found))


def _name(request: web.Request) -> str:
    """Return the id of the request's conversation."""
    return request.match_info["id"]


def _with_ids(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return items as they are stored, each with a new id."""
    return [{"id": f"{PREFIXES[item['type']]}_{uuid4().hex}", **item} for item in objects_of(items)]


def _object(conversation: Conversation) -> Mapping[str, Any]:
    """Return the object of a conversation."""
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": int(conversation.created_s),
        "metadata": dict(conversation.metadata),
    }


def _unknown_item(item_id: str) -> UnknownItemError:
    return UnknownItemError(
        f"there is no item {item_id[:80]!r} in the conversation", "list the items that it has"
    )
