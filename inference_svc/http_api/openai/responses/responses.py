"""POST /v1/responses: a turn by its own id, which the next one may follow."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from aiohttp import web

from inference_svc.core.answers import AnswerToken
from inference_svc.core.chat import TOOL, Message, ToolCall, canonical
from inference_svc.core.truncation import REJECT
from inference_svc.core.turn_record import Finished
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.conversation import with_names
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.responses.background import Following
from inference_svc.http_api.openai.responses.conversation_turns import going_on
from inference_svc.http_api.openai.responses.input_items import objects_of, with_ids
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.openai.responses.stored_response import (
    find_stored,
    most_kept,
    recorded_turn,
)
from inference_svc.http_api.replies import OneAnswer, reply, send_events, send_reply
from inference_svc.http_api.requests import REQUEST_IDS, TurnRequest
from inference_svc.http_api.sessions.background import Running
from inference_svc.http_api.sessions.history_chain import HistoryChain, open_chain
from inference_svc.http_api.sessions.http_turn import HttpTurn
from inference_svc.http_api.sessions.lookup import ConversationTurn, ResponseInfo, StoredResponse

MAX_KEPT = 16384  # characters of instructions, or tools, that GET shows again

B = TypeVar("B", bound=ResponseBody)


async def create_response(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer an input: in a conversation, after another response, or as the first."""
    turn_request = await api.read(request, ResponseBody)
    body, tenant = turn_request.body, turn_request.caller.tenant
    with ExitStack() as held:
        if body.conversation_id:
            key = turn_request.repeat_key
            release = held.enter_context(api.holds.held(tenant, body.conversation_id, key))
            turn, info = await _going_on(api, turn_request, release)
        else:
            turn, info = await response_turn(api, turn_request)
        if body.background:
            return await _begin(api, turn_request, turn, info, held.pop_all().close)
        return await _answer(api, turn_request, turn, info)


async def response_turn(api: Api, turn_request: TurnRequest[B]) -> tuple[HttpTurn, ResponseInfo]:
    """Make the turn of a request that is of no conversation.

    Raises:
        UnknownResponseError: the response that it follows is not there.
        RequestError: the instructions are others than that has.
    """
    body = turn_request.body
    if body.previous_response_id:
        return await _following(api, turn_request)
    return _turn(api, turn_request, body.conversation, body.instructions)


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


async def _begin(
    api: Api,
    turn_request: TurnRequest[ResponseBody],
    turn: HttpTurn,
    info: ResponseInfo,
    release: Callable[[], None],
) -> web.StreamResponse:
    """Have a turn answered while nobody waits.

    Args:
        api: the API's parts.
        turn_request: the request.
        turn: its turn.
        info: of its response.
        release: called when it is over.
    """

    def objects(session_id: str) -> ResponseObjects:
        return ResponseObjects(turn.response_id, session_id, info, api.token_text, turn.reading)

    running = await api.background.start(Running(turn_request.caller, turn, info, objects), release)
    structlog.contextvars.bind_contextvars(request_id=turn.request_id, **turn_request.hints.told)
    headers = dict.fromkeys(REQUEST_IDS, turn.request_id)
    if not turn_request.body.stream:
        return reply(running.standing, headers)
    followed = Following(running.events(-1), objects("").failure)
    return await send_events(turn_request.request, api.settings, followed, headers)


async def _following(api: Api, turn_request: TurnRequest[B]) -> tuple[HttpTurn, ResponseInfo]:
    """Make the turn of a request that follows a response.

    Raises:
        UnknownResponseError: that is not there.
        RequestError: the instructions are others than it has.
    """
    body, caller = turn_request.body, turn_request.caller
    previous = await find_stored(api, caller, body.previous_response_id, is_followed=True)
    _check_instructions(api, turn_request, previous)
    calls: tuple[ToolCall, ...] = ()
    if any(message.role == TOOL for message in body.new_messages):
        record, reading = await recorded_turn(api, caller, body.previous_response_id, previous)
        calls = reading.whole(record.text).calls
    turn, info = _turn(api, turn_request, with_names(body.new_messages, calls), "")
    info = replace(
        info,
        instructions=previous.info.instructions,
        instructions_digest=previous.info.instructions_digest,
    )
    return replace(turn, previous=previous, info=info if body.store else None), info


def _check_instructions(api: Api, turn_request: TurnRequest[B], previous: StoredResponse) -> None:
    """Check that a session keeps the instructions that it began with.

    Raises:
        RequestError: others are given.
    """
    instructions = turn_request.body.instructions
    chains = (_open_chain(api, turn_request), turn_request.chain)  # an earlier release's digest
    digests = {chain.id_of("instructions", instructions) for chain in chains}
    if instructions and previous.info.instructions_digest not in digests:
        raise RequestError(
            "these instructions are not those of the conversation",
            "leave them out to go on with it, or send the conversation as input",
            "instructions",
        )


def _open_chain(api: Api, turn_request: TurnRequest[B]) -> HistoryChain:
    """Return what makes digests that another server compares: as of words that it has, too."""
    return open_chain(turn_request.caller.tenant, api.gateway.model)


async def _going_on(
    api: Api, turn_request: TurnRequest[ResponseBody], release: Callable[[], None]
) -> tuple[HttpTurn, ResponseInfo]:
    """Make the next turn of a conversation that is held.

    Args:
        api: the API's parts.
        turn_request: the request.
        release: releases the conversation.

    Raises:
        UnknownConversationError: it is not there.
        ConversationsFullError: the tenant has no room for the input.
        RequestError: nothing may be stored.
    """
    body, caller = turn_request.body, turn_request.caller
    going = await going_on(
        api, caller, body.conversation_id, body.input, body.instructions, body.offered
    )
    turn, info = _turn(api, turn_request, going.messages, going.instructions)
    if not turn.is_kept:
        raise RequestError(
            "a conversation is named that is not to be stored", "leave one out", "store"
        )
    brought = with_ids(turn.response_id, objects_of(body.input))
    await api.store.conversations.check_room(caller.tenant, brought, body.instructions)
    session_id = going.place.session_id

    def answered(finished: Finished) -> Sequence[Mapping[str, Any]]:
        objects = ResponseObjects(turn.response_id, session_id, info, api.token_text, turn.reading)
        output: Sequence[Mapping[str, Any]] = objects.whole(
            [AnswerToken(0, finished.text)], finished
        )["output"]
        return output

    conversation = ConversationTurn(
        before=going.before,
        at=going.place.at,
        instructions=going.instructions,
        brought=brought,
        answered=answered,
        release=release,
    )
    turn = replace(turn, session_id=session_id, conversation=conversation, is_final=False)
    return turn, info


def _turn(
    api: Api,
    turn_request: TurnRequest[B],
    messages: tuple[Message, ...],
    instructions: str,
) -> tuple[HttpTurn, ResponseInfo]:
    """Make the turn of a request, and the information about its response.

    Args:
        api: the API's parts.
        turn_request: the request.
        messages: what is new.
        instructions: that lead the conversation.
    """
    body, chain = turn_request.body, turn_request.chain
    overflow = api.gateway.defaults.overflow.name
    turn = turn_request.turn(messages, body.overflow(overflow))
    is_long = len(canonical(body.offered)) > MAX_KEPT
    brought = json.dumps(objects_of(body.input), ensure_ascii=False) if body.store else ""
    input_bytes = len(brought.encode())
    info = ResponseInfo(
        created_s=int(time.time()),
        model=body.model,
        instructions=instructions[:MAX_KEPT],
        instructions_digest=_open_chain(api, turn_request).id_of("instructions", instructions),
        previous_id=body.previous_response_id,
        max_output_tokens=body.max_output_tokens,
        temperature=turn.sampling["temperature"],
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation="disabled" if (turn.overflow or overflow) == REJECT else "auto",
        is_kept=body.store,
        top_logprobs=body.shown_logprobs or 0,
        metadata=body.metadata,
        text_format={"type": "text"} if body.text.format is None else body.text.format.shown,
        tools=[each.shown(is_long=is_long) for each in body.tools],
        tool_choice=body.shown_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        input_bytes=input_bytes,
        effort=body.effort,
        conversation_id=body.conversation_id,
        is_background=body.background,
    )
    response_id = "resp_" + chain.id_of("response", turn.request_id)
    if input_bytes > most_kept(turn_request.settings):
        brought = ""
    stored = info if body.store else None
    return replace(turn, response_id=response_id, info=stored, brought=brought), info
