"""/v1/responses: a turn by its own id, which the next one may follow."""

import time
from contextlib import suppress
from dataclasses import replace

from aiohttp import web

from inference_svc.core.turn_record import Finished, Tokens
from inference_svc.openai.api import Api
from inference_svc.openai.errors import RequestError, unknown_response
from inference_svc.openai.event_stream import EventStream
from inference_svc.openai.history_chain import HistoryChain
from inference_svc.openai.known import KnownResponse
from inference_svc.openai.live_answer import LiveAnswer
from inference_svc.openai.places import Caller
from inference_svc.openai.replies import answer_headers, broken_stream, reply
from inference_svc.openai.requests import Body, caller_of, wanted_turn
from inference_svc.openai.response_events import ResponseEvents, finished_response
from inference_svc.openai.response_objects import ResponseFacts
from inference_svc.openai.response_request import ResponseRequest, decode_response
from inference_svc.openai.wanted_turn import WantedTurn
from shared.types.errors import NotFoundError

MAX_KEPT_INSTRUCTIONS = 16384  # characters that GET shows again; longer ones are compared only


async def create_response(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer an input, as the next turn after another response or as the first."""
    caller = caller_of(request)
    body = await api.places.read(request)
    asked = decode_response(body.values, api.settings.temperature)
    api.model.check(asked.asked.model)
    chain = api.endings.chain(caller)
    previous = None
    if asked.previous_id:
        previous = await _known(api, caller, asked.previous_id)
        _check_instructions(asked, previous, chain)
    wanted = _wanted(api, request, body, asked, previous, chain)
    async with await api.answers.open(caller, wanted) as answer:
        assert wanted.facts is not None  # noqa: S101  # just made
        events = ResponseEvents(
            wanted.response_id,
            answer.session_id,
            wanted.facts,
            api.token_text,
            asked.asked.top_logprobs,
        )
        headers = answer_headers(answer.session_id, wanted.request_id)
        if asked.asked.is_streamed:
            return await _stream(api, request, answer, events, headers)
        return reply(events.whole(*await answer.whole()), headers)


async def show_response(api: Api, request: web.Request) -> web.Response:
    """A response that was stored."""
    caller, response_id = caller_of(request), request.match_info["id"]
    if request.query.get("stream", "false") == "true":
        raise RequestError("a stored response cannot be streamed", "leave stream out", "stream")
    known = await _known(api, caller, response_id)
    at = known.at
    try:
        session, _ = await api.front.get_session(caller.identity, caller.tenant, at.session_id)
    except NotFoundError as error:
        raise unknown_response(response_id) from error
    record = session.turns[at.turns - 1] if len(session.turns) >= at.turns else None
    if record is None or record.request_id != at.request_id:
        raise unknown_response(response_id)
    finished = Finished(record.finish_reason, record.text, record.usage, at.turns)
    return reply(finished_response(response_id, at.session_id, known.facts, finished))


async def delete_response(api: Api, request: web.Request) -> web.Response:
    """Forget a response; its session goes with the last one, if nobody named it."""
    caller, response_id = caller_of(request), request.match_info["id"]
    known = await _known(api, caller, response_id)
    session_id = known.at.session_id
    others = await api.remembered.count_responses(caller.tenant, session_id) - 1
    if not others and not known.at.is_named:  # first what may be refused: a turn may be under way
        with suppress(NotFoundError):
            await api.front.delete(caller.identity, caller.tenant, session_id)
    await api.remembered.forget_response(caller.tenant, response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


async def _known(api: Api, caller: Caller, response_id: str) -> KnownResponse:
    """The caller's response.

    Raises:
        UnknownResponseError: it has none of that id.
    """
    is_ours = response_id.isascii() and response_id.startswith("resp_")
    known = await api.remembered.find_response(caller.tenant, response_id) if is_ours else None
    if known is None:
        raise unknown_response(response_id)
    return known


def _check_instructions(
    asked: ResponseRequest, previous: KnownResponse, chain: HistoryChain
) -> None:
    """A session has the instructions that it began with, and keeps them.

    Raises:
        RequestError: others are given.
    """
    digest = chain.id_of("instructions", asked.instructions)
    if asked.instructions and digest != previous.facts.instructions_digest:
        raise RequestError(
            "these instructions are not those of the conversation",
            "leave them out to go on with it, or send the conversation as input",
            "instructions",
        )


def _wanted(
    api: Api,
    request: web.Request,
    body: Body,
    asked: ResponseRequest,
    previous: KnownResponse | None,
    chain: HistoryChain,
) -> WantedTurn:
    overflow = api.front.defaults.overflow
    messages = asked.asked.messages if previous else asked.messages
    wanted = wanted_turn(request, body, asked.asked, messages, chain, overflow)
    sampling = asked.asked.sampling
    is_rigid = (wanted.overflow or overflow.name) == "reject"
    facts = ResponseFacts(
        created_s=int(time.time()),
        model=asked.asked.model,
        instructions=asked.instructions[:MAX_KEPT_INSTRUCTIONS],
        instructions_digest=chain.id_of("instructions", asked.instructions),
        previous_id=asked.previous_id,
        max_output_tokens=asked.max_output_tokens,
        temperature=round(sampling.temperature, 6),
        top_p=round(sampling.top_p, 6) if sampling.HasField("top_p") else 1.0,
        truncation="disabled" if is_rigid else "auto",
        is_kept=asked.asked.is_kept,
        top_logprobs=asked.asked.top_logprobs or 0,
        metadata=asked.metadata,
    )
    if previous is not None and not asked.instructions:
        facts = replace(
            facts,
            instructions=previous.facts.instructions,
            instructions_digest=previous.facts.instructions_digest,
        )
    response_id = "resp_" + chain.id_of("response", wanted.request_id)
    return replace(wanted, previous=previous, response_id=response_id, facts=facts)


async def _stream(
    api: Api,
    request: web.Request,
    answer: LiveAnswer,
    events: ResponseEvents,
    headers: dict[str, str],
) -> web.StreamResponse:
    stream = EventStream(request, api.settings.write_s)
    await stream.open(headers)
    try:
        for event in events.opening():
            await stream.send_named(event)
        async for news in answer.events():
            made = events.piece(news.tokens) if isinstance(news, Tokens) else events.closing(news)
            for event in made:
                await stream.send_named(event)
    except Exception as error:  # noqa: BLE001  # the status is sent: it is told as an event
        await stream.send_named(events.failure(broken_stream(error)))
    await stream.end()
    return stream.response
