"""Turns of responses: the turn that a request asks for, and the turns of stored responses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from inference_svc.core.chat import TOOL, Message, ToolCall, canonical
from inference_svc.core.transcript_format import Transcript
from inference_svc.core.truncation import REJECT
from inference_svc.core.turn_record import TurnRecord
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.conversation import with_names
from inference_svc.http_api.errors import (
    RequestError,
    UnknownResponseError,
    unanswered_response,
    unfinished_response,
    unknown_previous,
    unknown_response,
)
from inference_svc.http_api.openai.responses.input_items import objects_of
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.requests import TurnRequest
from inference_svc.http_api.sessions.history_chain import HistoryChain, open_chain
from inference_svc.http_api.sessions.http_turn import Caller, HttpTurn
from inference_svc.http_api.sessions.lookup import CANCELLED, ResponseInfo, StoredResponse
from inference_svc.openai_settings import OpenAISettings
from shared.types.errors import NotFoundError

MAX_KEPT = 16384  # characters of instructions, and of tools, that are stored
MAX_INPUT_BYTES = 256 * 1024  # a longer input is not stored

B = TypeVar("B", bound=ResponseBody)


async def response_turn(api: Api, turn_request: TurnRequest[B]) -> tuple[HttpTurn, ResponseInfo]:
    """Return the turn of a request that names no conversation, and its response's members.

    Raises:
        UnknownPreviousError: the tenant does not have the response that it follows.
        RequestError: its instructions differ from those of that response.
    """
    body = turn_request.body
    if body.previous_response_id:
        with following(body.previous_response_id):
            return await _turn_after(api, turn_request)
    return make_turn(api, turn_request, body.conversation, body.instructions)


@contextmanager
def following(response_id: str) -> Iterator[None]:
    """Refuse a request if the response that it follows turns out to be unknown.

    Raises:
        UnknownPreviousError: it is.
    """
    try:
        yield
    except UnknownResponseError as error:
        raise unknown_previous(response_id) from error


async def _turn_after(api: Api, turn_request: TurnRequest[B]) -> tuple[HttpTurn, ResponseInfo]:
    """Return the turn of a request that follows a response, and its response's members.

    Raises:
        UnknownResponseError: the tenant does not have that response.
        RequestError: its instructions differ from those of that response.
    """
    body, caller = turn_request.body, turn_request.caller
    previous = await find_stored(api, caller, body.previous_response_id, is_followed=True)
    _check_instructions(api, turn_request, previous)
    calls: tuple[ToolCall, ...] = ()
    if any(message.role == TOOL for message in body.new_messages):
        record, reading = await recorded_turn(api, caller, body.previous_response_id, previous)
        calls = reading.whole(record.text).calls
    turn, info = make_turn(api, turn_request, with_names(body.new_messages, calls), "")
    info = replace(
        info,
        instructions=previous.info.instructions,
        instructions_digest=previous.info.instructions_digest,
    )
    return replace(turn, previous=previous, info=info if body.store else None), info


def _check_instructions(api: Api, turn_request: TurnRequest[B], previous: StoredResponse) -> None:
    """Check that a session keeps the instructions that it began with.

    Raises:
        RequestError: the request has other instructions.
    """
    instructions = turn_request.body.instructions
    # The second is the chain of earlier releases, which keyed this digest with the secret.
    chains = (_open_chain(api, turn_request), turn_request.chain)
    digests = {chain.id_of("instructions", instructions) for chain in chains}
    if instructions and previous.info.instructions_digest not in digests:
        raise RequestError(
            "these instructions differ from those of the conversation",
            "leave them out to continue it, or send the whole conversation as input",
            "instructions",
        )


def _open_chain(api: Api, turn_request: TurnRequest[B]) -> HistoryChain:
    """Return the chain of digests that other servers can compare, too."""
    return open_chain(turn_request.caller.tenant, api.gateway.model)


def make_turn(
    api: Api,
    turn_request: TurnRequest[B],
    messages: tuple[Message, ...],
    instructions: str,
) -> tuple[HttpTurn, ResponseInfo]:
    """Return the turn of a request, and the members of its response.

    Args:
        api: the API's parts.
        turn_request: the request.
        messages: the messages that the turn reads.
        instructions: the conversation's instructions.
    """
    body, chain = turn_request.body, turn_request.chain
    overflow = api.gateway.defaults.overflow.name
    turn = turn_request.turn(messages, body.overflow(overflow))
    is_long = len(canonical(body.offered)) > MAX_KEPT
    stored_input = json.dumps(objects_of(body.input), ensure_ascii=False) if body.store else ""
    input_bytes = len(stored_input.encode())
    info = ResponseInfo(
        created_s=turn_request.created_s,
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
    if input_bytes > max_stored_input(turn_request.settings):
        stored_input = ""
    stored = info if body.store else None
    return replace(turn, response_id=response_id, info=stored, stored_input=stored_input), info


def max_stored_input(settings: OpenAISettings) -> int:
    """Return the most bytes of an input that is stored."""
    return min(MAX_INPUT_BYTES, settings.kept_input_bytes)


async def find_stored(
    api: Api, caller: Caller, response_id: str, *, is_followed: bool = False
) -> StoredResponse:
    """Return a stored response of the caller's tenant; one of another server is copied here.

    Args:
        api: the API's parts.
        caller: the client and its tenant.
        response_id: id of the response.
        is_followed: whether a turn follows it: then the object store is not asked whether another
            server has deleted a response that is here.

    Raises:
        UnknownResponseError: the tenant has none of that id.
        UnfinishedResponseError: it has no answer yet.
        UnansweredResponseError: a turn is to follow it, and it has ended without an answer.
        TranscriptUnavailableError: it is not here, and the object store does not answer.
    """
    if api.background.find(caller.tenant, response_id) is not None:
        raise unfinished_response(response_id)
    is_ours = response_id.isascii() and response_id.startswith("resp_")
    responses = api.completion.responses
    stored = await responses.find(caller, response_id, is_followed=is_followed) if is_ours else None
    if stored is not None:
        return stored
    found = await api.store.find_unanswered(caller.tenant, response_id) if is_followed else None
    if found is not None:
        raise unanswered_response(response_id, is_cancelled=found.state == CANCELLED)
    raise unknown_response(response_id)


async def recorded_turn(
    api: Api, caller: Caller, response_id: str, stored: StoredResponse
) -> tuple[TurnRecord, Reading]:
    """Return the turn's record of a stored response, and how its answer is parsed.

    Raises:
        UnknownResponseError: its session is gone.
    """
    record = (await session_up_to(api, caller, response_id, stored)).turns[-1]
    gateway = api.gateway
    use = stored.info.tool_use
    call_id = stored.info.call_id_by(api.completion.chain(caller).call_ids(stored.at.request_id))
    reading = Reading(
        *(gateway.text.tool_format, use, call_id, gateway.text.thoughts),
        heads=gateway.heads_of_calls(use),
        is_bound=stored.info.is_free and gateway.binds_calls(use),
    )
    return record, reading


async def session_up_to(
    api: Api, caller: Caller, response_id: str, stored: StoredResponse
) -> Transcript:
    """Return the transcript of a stored response's session, up to its turn.

    Raises:
        UnknownResponseError: the session is gone.
    """
    at = stored.at
    try:
        key = api.gateway.key(caller.identity, caller.tenant, at.session_id)
        session, _ = await api.gateway.turns.sessions.get(key)
    except NotFoundError as error:
        raise unknown_response(response_id) from error
    if not at.is_in(session):
        raise unknown_response(response_id)
    return session.forked(at.session_id, at.turns)
