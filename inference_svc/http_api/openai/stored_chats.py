"""/v1/chat/completions as a list: chats that their clients asked to store.

*Source:* OpenAI API reference, "Chat completions": list, retrieve, update, delete, messages.
"""

import re
from typing import Any

from aiohttp import web
from pydantic import Field

from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import Body, Metadata
from inference_svc.http_api.errors import UnknownChatError
from inference_svc.http_api.openai.pages import ASCENDING, list_object, read_page
from inference_svc.http_api.replies import reply
from inference_svc.http_api.requests import caller_of
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.http_api.sessions.stored_chats import ChatFilter

_NOTE = re.compile(r"metadata\[(.{1,64})\]")


class ChatMetadataBody(Body):
    """The body of POST /v1/chat/completions/{id}: the new metadata."""

    metadata: Metadata = Field(default_factory=dict)


async def list_chats(api: Api, request: web.Request) -> web.Response:
    """Show a page of the stored chats."""
    notes = {
        found[1]: request.query[found[0]] for found in map(_NOTE.fullmatch, request.query) if found
    }
    of_notes = [f"metadata[{name}]" for name in notes]
    page = read_page(request, "model", *of_notes, order=ASCENDING)
    chat_filter = ChatFilter(
        request.query.get("model", ""), notes, page.after, page.limit, page.is_ascending
    )
    found = await api.store.chats.page(caller_of(request).tenant, chat_filter)
    if found is None:
        raise page.unknown_after_error()
    chats, has_more = found
    return reply(list_object(chats, has_more=has_more))


async def show_chat(api: Api, request: web.Request) -> web.Response:
    """Show a stored chat."""
    return reply(await _find(api, caller_of(request), request.match_info["id"]))


async def list_chat_messages(api: Api, request: web.Request) -> web.Response:
    """Show a page of a stored chat's messages."""
    chat_id, page = request.match_info["id"], read_page(request, order=ASCENDING)
    messages = await api.store.chats.messages(caller_of(request).tenant, chat_id)
    if messages is None:
        raise _unknown(chat_id)
    return reply(page.of(messages))


async def update_chat(api: Api, request: web.Request) -> web.Response:
    """Replace a stored chat's metadata."""
    caller, chat_id = caller_of(request), request.match_info["id"]
    body = await api.read_body(request, ChatMetadataBody)
    await _find(api, caller, chat_id)
    await api.store.chats.set_metadata(caller.tenant, chat_id, body.metadata)
    return reply(await _find(api, caller, chat_id))


async def delete_chat(api: Api, request: web.Request) -> web.Response:
    """Delete a stored chat; its session stays, and can be continued."""
    chat_id = request.match_info["id"]
    if not await api.store.chats.delete(caller_of(request).tenant, chat_id):
        raise _unknown(chat_id)
    return reply({"id": chat_id, "object": "chat.completion.deleted", "deleted": True})


async def _find(api: Api, caller: Caller, chat_id: str) -> dict[str, Any]:
    """Return a stored chat of the caller's tenant.

    Raises:
        UnknownChatError: the tenant has none of that id.
    """
    found = await api.store.chats.find(caller.tenant, chat_id)
    if found is None:
        raise _unknown(chat_id)
    return found


def _unknown(chat_id: str) -> UnknownChatError:
    return UnknownChatError(
        f"there is no stored chat {chat_id[:80]!r}",
        "chats are stored if their request has store: true",
    )
