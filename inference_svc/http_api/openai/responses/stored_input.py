"""What a stored response was asked: its own input, as items with ids, page by page.

*Source:* OpenAI API reference, "List input items".
"""

import json

from aiohttp import web

from inference_svc.http_api.api import Api
from inference_svc.http_api.errors import InputNotKeptError
from inference_svc.http_api.openai.pages import read_page
from inference_svc.http_api.openai.responses.input_items import with_ids
from inference_svc.http_api.openai.responses.stored_response import (
    find_stored,
    most_kept,
    recorded_turn,
)
from inference_svc.http_api.replies import reply
from inference_svc.http_api.requests import caller_of


async def list_input_items(api: Api, request: web.Request) -> web.Response:
    """Show the input of a response that was stored, or a page of it."""
    caller, response_id = caller_of(request), request.match_info["id"]
    page = read_page(request)
    stored = await find_stored(api, caller, response_id)
    await recorded_turn(api, caller, response_id, stored)
    items = await api.store.find_input(caller.tenant, response_id)
    if items is None:
        raise _not_kept(stored.info.input_bytes, most_kept(api.settings))
    return reply(page.of(with_ids(response_id, json.loads(items))))


def _not_kept(num_bytes: int, most: int) -> InputNotKeptError:
    if num_bytes > most:
        message = f"the input of the response has {num_bytes} bytes, and up to {most} are kept"
    else:
        message = "the input is older than what openai.kept_input_bytes has room for"
    return InputNotKeptError(message, "keep what you send")
