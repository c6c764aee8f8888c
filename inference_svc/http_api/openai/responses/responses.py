"""POST /v1/responses: a turn with an id, which the next response can follow.

POST /v1/responses/input_tokens: the number of tokens that such a turn would read.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web

from inference_svc.core.chat import Message
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.turn_record import AnswerToken, Finished
from inference_svc.http_api.api import Api
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.responses.background import FollowedReply
from inference_svc.http_api.openai.responses.conversation_turns import find_next_turn, session_of
from inference_svc.http_api.openai.responses.input_items import objects_of, with_ids
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.openai.responses.response_turns import (
    find_stored,
    following,
    make_turn,
    response_turn,
    session_up_to,
)
from inference_svc.http_api.replies import OneAnswer, reply, send_events, send_reply
from inference_svc.http_api.requests import REQUEST_IDS, TurnRequest, caller_of
from inference_svc.http_api.sessions.background import RunningResponse
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import ConversationTurn, ResponseInfo
from inference_svc.service.submissions import chat_input


async def create_response(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer an input: in a conversation, after another response, or at the beginning of one."""
    turn_request = await api.read(request, ResponseBody)
    body, tenant = turn_request.body, turn_request.caller.tenant
    with ExitStack() as hold:  # a background response keeps its conversation after the reply
        if body.conversation_id:
            key = turn_request.repeat_key
            release = hold.enter_context(
                api.conversations.holds.hold(tenant, body.conversation_id, key)
            )
            turn, info = await _conversation_turn(api, turn_request, release)
        else:
            turn, info = await response_turn(api, turn_request)
        if body.background:
            return await _start_background(api, turn_request, turn, info, hold.pop_all().close)
        return await _answer(api, turn_request, turn, info)


async def _answer(
    api: Api, turn_request: TurnRequest[ResponseBody], turn: HttpTurn, info: ResponseInfo
) -> web.StreamResponse:
    async with await api.answers.open(turn_request.caller, turn) as answer:
        objects = ResponseObjects(
            response_id=turn.response_id,
            session_id=answer.session_id,
            info=info,
            token_text=api.token_text,
            reading=turn.reading,
            top_logprobs=turn_request.body.shown_logprobs,
        )
        return await send_reply(turn_request, turn, OneAnswer(answer, objects))


async def _start_background(
    api: Api,
    turn_request: TurnRequest[ResponseBody],
    turn: HttpTurn,
    info: ResponseInfo,
    release: Callable[[], None],
) -> web.StreamResponse:
    """Start a background response, and reply with its object or its events.

    Args:
        api: the API's parts.
        turn_request: the request.
        turn: its turn.
        info: the members of its response.
        release: called when the response is over.
    """

    def objects(session_id: str) -> ResponseObjects:
        return ResponseObjects(turn.response_id, session_id, info, api.token_text, turn.reading)

    running = await api.background.start(
        RunningResponse(turn_request.caller, turn, info, objects), release
    )
    structlog.contextvars.bind_contextvars(
        request_id=turn.request_id, **turn_request.hints.log_fields
    )
    headers = dict.fromkeys(REQUEST_IDS, turn.request_id)
    if not turn_request.body.stream:
        return reply(running.current_object, headers)
    events = FollowedReply(running.events(-1), objects("").failure)
    return await send_events(turn_request.request, api.settings, events, headers)


async def _conversation_turn(
    api: Api, turn_request: TurnRequest[ResponseBody], release: Callable[[], None]
) -> tuple[HttpTurn, ResponseInfo]:
    """Return the request's turn in its conversation, which the request holds.

    Args:
        api: the API's parts.
        turn_request: the request.
        release: releases the conversation.

    Raises:
        UnknownConversationError: the tenant has no such conversation.
        ConversationsFullError: the tenant has no room for the input.
        RequestError: the request does not allow the turn to be stored.
    """
    body, caller = turn_request.body, turn_request.caller
    next_turn = await find_next_turn(
        *(api, caller, body.conversation_id, body.input, body.instructions, body.offered),
        is_held=True,
    )
    turn, info = make_turn(api, turn_request, next_turn.messages, next_turn.instructions)
    if not turn.is_kept:
        raise RequestError(
            "a conversation is named, but store is false", "leave one of them out", "store"
        )
    input_items = with_ids(turn.response_id, objects_of(body.input))
    await api.store.conversations.check_room(caller.tenant, input_items, body.instructions)
    session_id = next_turn.place.session_id

    def make_answer_items(finished: Finished) -> Sequence[Mapping[str, Any]]:
        objects = ResponseObjects(turn.response_id, session_id, info, api.token_text, turn.reading)
        output: Sequence[Mapping[str, Any]] = objects.whole(
            [AnswerToken(0, finished.text)], finished
        )["output"]
        return output

    conversation = ConversationTurn(
        before=next_turn.before,
        at=next_turn.place.at,
        instructions=next_turn.instructions,
        input_items=input_items,
        make_answer_items=make_answer_items,
        release=release,
    )
    turn = replace(turn, session_id=session_id, conversation=conversation, is_final=False)
    return turn, info


class InputTokensBody(ResponseBody):
    """The body of POST /v1/responses/input_tokens, which need not name the model."""

    model: str = ""


async def count_input_tokens(api: Api, request: web.Request) -> web.Response:
    """Count the tokens of an input, and of the context that it follows."""
    body, caller = await api.read_body(request, InputTokensBody), caller_of(request)
    messages, history = await _read_input(api, caller, body)
    turn_input = chat_input(messages, body.tool_use.tools, body.template_arguments)
    num_tokens = len(await api.gateway.prompts.encode(turn_input, history))
    num_tokens += 0 if history is None else len(history.context.token_ids)
    return reply({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _read_input(
    api: Api, caller: Caller, body: InputTokensBody
) -> tuple[tuple[Message, ...], Transcript | None]:
    """Return the new messages of a response, and the transcript that it follows (None: none).

    Raises:
        UnknownPreviousError: the tenant has no such response.
        UnknownConversationError: the tenant has no such conversation.
    """
    if body.previous_response_id:
        with following(body.previous_response_id):
            stored = await find_stored(api, caller, body.previous_response_id, is_followed=True)
            history = await session_up_to(api, caller, body.previous_response_id, stored)
        return body.new_messages, history
    if not body.conversation_id:
        return body.conversation, None
    next_turn = await find_next_turn(
        api, caller, body.conversation_id, body.input, body.instructions, body.offered
    )
    session = await session_of(api, caller, next_turn.before) if next_turn.place.at else None
    if session is None or next_turn.place.at is None:
        return next_turn.messages, None
    return next_turn.messages, session.forked(next_turn.place.session_id, next_turn.place.at.turns)
