"""Existing responses by their ids: show them and their input, follow, cancel and delete them.

*Source:* OpenAI API reference, "Responses" and "List input items".
"""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import web

from inference_svc.core.turn_record import AnswerToken, Finished
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.api import Api
from inference_svc.http_api.errors import (
    InputNotKeptError,
    RequestError,
    UnknownResponseError,
)
from inference_svc.http_api.openai.pages import check_query, read_page
from inference_svc.http_api.openai.responses.background import (
    FollowedReply,
    events_of_ended,
    events_of_unanswered,
    unanswered_object,
)
from inference_svc.http_api.openai.responses.input_items import with_ids
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.openai.responses.response_turns import (
    find_stored,
    max_stored_input,
    recorded_turn,
)
from inference_svc.http_api.replies import reply, send_events
from inference_svc.http_api.requests import caller_of
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.http_api.sessions.lookup import StoredResponse
from shared.types.errors import NotFoundError

MAX_NUMBER = 12  # a sequence number has fewer digits


async def show_response(api: Api, request: web.Request) -> web.StreamResponse:
    """Show a stored or running response, or stream its events if the client asks for them."""
    caller, response_id = caller_of(request), request.match_info["id"]
    after = _read_starting_after(request)
    running = api.background.find(caller.tenant, response_id)
    if running is not None:
        if after is None:
            return reply(running.current_object)
        following = FollowedReply(running.events(after), running.objects("").failure)
        return await send_events(request, api.settings, following, {})
    try:
        stored = await find_stored(api, caller, response_id)
    except UnknownResponseError:
        unanswered = await api.store.find_unanswered(caller.tenant, response_id)
        if unanswered is None:
            raise
        objects = ResponseObjects(response_id, "", unanswered.info, api.token_text, Reading())
        if after is None:
            return reply(unanswered_object(objects, unanswered))
        return await _send(api, request, objects, events_of_unanswered(objects, unanswered, after))
    objects, tokens, finished = await _read_recorded(api, caller, response_id, stored)
    if after is None:
        return reply(objects.whole(tokens, finished))
    if after >= 0 and not stored.info.is_background:
        raise RequestError(
            "only a background response can be continued after an event",
            "leave starting_after out, or create the response with background: true",
            "starting_after",
        )
    past = events_of_ended(objects, tokens, finished, is_background=stored.info.is_background)
    return await _send(
        api, request, objects, (event for event in past if event["sequence_number"] > after)
    )


async def list_input_items(api: Api, request: web.Request) -> web.Response:
    """Show a page of a stored response's input items."""
    caller, response_id = caller_of(request), request.match_info["id"]
    page = read_page(request)
    try:
        stored = await find_stored(api, caller, response_id)
    except UnknownResponseError as error:
        if await api.store.find_unanswered(caller.tenant, response_id) is None:
            raise
        raise InputNotKeptError(
            "the input of a response is stored with its answer, and this one ended without any",
            "keep the input yourself",
        ) from error
    await recorded_turn(api, caller, response_id, stored)
    items = await api.store.find_input(caller.tenant, response_id)
    if items is None:
        raise _input_not_kept_error(stored.info.input_bytes, max_stored_input(api.settings))
    return reply(page.of(with_ids(response_id, json.loads(items))))


def _input_not_kept_error(num_bytes: int, most: int) -> InputNotKeptError:
    if num_bytes > most:
        message = f"the input of the response has {num_bytes} bytes, but at most {most} are stored"
    else:
        message = "the input is no longer stored, because newer inputs fill openai.kept_input_bytes"
    return InputNotKeptError(message, "keep the input yourself")


async def _send(
    api: Api, request: web.Request, objects: ResponseObjects, past: Iterator[Mapping[str, Any]]
) -> web.StreamResponse:
    """Send events of an ended response."""

    async def events() -> AsyncGenerator[Mapping[str, Any], None]:
        for event in past:
            yield event

    return await send_events(request, api.settings, FollowedReply(events(), objects.failure), {})


def _read_starting_after(request: web.Request) -> int | None:
    """Return the sequence number after which the client wants events; None if it wants no stream.

    Raises:
        RequestError: a parameter is invalid or unknown.
    """
    query = request.query
    check_query(request, "stream", "starting_after", "include_obfuscation")
    after = query.get("starting_after", "-1")
    if not (after == "-1" or (after.isascii() and after.isdecimal() and len(after) < MAX_NUMBER)):
        raise RequestError(
            f"starting_after {after[:20]!r} is not valid",
            "send the sequence_number of an event",
            "starting_after",
        )
    if query.get("stream", "false") == "true":
        return int(after)
    if after != "-1":
        raise RequestError(
            "starting_after has no effect without a stream",
            "send stream=true too",
            "starting_after",
        )
    return None


async def _read_recorded(
    api: Api, caller: Caller, response_id: str, stored: StoredResponse
) -> tuple[ResponseObjects, list[AnswerToken], Finished]:
    """Return the builder of a stored response's objects, its tokens, and its end.

    Raises:
        UnknownResponseError: its session is gone.
    """
    record, reading = await recorded_turn(api, caller, response_id, stored)
    at = stored.at
    finished = Finished(record.finish_reason, record.text, record.usage, at.turns)
    objects = ResponseObjects(response_id, at.session_id, stored.info, api.token_text, reading)
    return objects, list(map(AnswerToken, record.output_ids, record.pieces)), finished


async def cancel_response(api: Api, request: web.Request) -> web.StreamResponse:
    """Cancel a background response, and show it; one that has ended is only shown."""
    caller, response_id = caller_of(request), request.match_info["id"]
    running = api.background.find(caller.tenant, response_id)
    if running is not None:
        await api.background.cancel(running)
    elif await api.store.find_unanswered(caller.tenant, response_id) is None:
        stored = await find_stored(api, caller, response_id)
        if not stored.info.is_background:
            raise RequestError(
                "only a background response can be cancelled",
                "create it with background: true, or close the connection that it is sent on",
                "background",
            )
    return await show_response(api, request)


async def delete_response(api: Api, request: web.Request) -> web.Response:
    """Delete a response, and an unnamed session with its last response."""
    caller, response_id = caller_of(request), request.match_info["id"]
    running = api.background.find(caller.tenant, response_id)
    if running is not None:
        await api.background.cancel(running)
    unanswered = await api.store.find_unanswered(caller.tenant, response_id)
    if unanswered is not None:
        await api.store.forget_unanswered(caller.tenant, response_id)
    try:
        stored = await find_stored(api, caller, response_id)
    except UnknownResponseError:
        if unanswered is None:
            raise
        return _deletion_reply(response_id)
    at, responses = stored.at, api.completion.responses
    # The session first: this may be refused, because a turn runs, and then nothing is deleted.
    if not at.is_named and await responses.is_last(caller, response_id, at):
        with suppress(NotFoundError):
            key = api.gateway.key(caller.identity, caller.tenant, at.session_id)
            await api.gateway.delete_session(key)
    await responses.delete(caller, response_id, at)
    return _deletion_reply(response_id)


def _deletion_reply(response_id: str) -> web.Response:
    return reply({"id": response_id, "object": "response", "deleted": True})
