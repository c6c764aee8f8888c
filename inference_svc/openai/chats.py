"""POST /v1/chat/completions."""

import time

from aiohttp import web

from inference_svc.core.turn_record import Tokens
from inference_svc.openai.api import Api
from inference_svc.openai.chat_objects import ChatObjects
from inference_svc.openai.chat_request import decode_chat
from inference_svc.openai.event_stream import DONE, EventStream
from inference_svc.openai.live_answer import LiveAnswer
from inference_svc.openai.replies import answer_headers, broken_stream, reply
from inference_svc.openai.requests import caller_of, wanted_turn


async def create_chat(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer a chat's last message."""
    caller = caller_of(request)
    body = await api.places.read(request)
    chat = decode_chat(body.values, api.settings.temperature)
    api.model.check(chat.asked.model)
    chain = api.endings.chain(caller)
    wanted = wanted_turn(
        request, body, chat.asked, chat.asked.messages, chain, api.front.defaults.overflow
    )
    async with await api.answers.open(caller, wanted) as answer:
        objects = ChatObjects(
            completion_id="chatcmpl-" + chain.id_of("completion", wanted.request_id),
            created=int(time.time()),
            model=chat.asked.model,
            fingerprint=api.model.fingerprint,
            session_id=answer.session_id,
            token_text=api.token_text,
            top_logprobs=chat.asked.top_logprobs,
            includes_usage=chat.includes_usage,
        )
        headers = answer_headers(answer.session_id, wanted.request_id)
        if chat.asked.is_streamed:
            return await _stream(api, request, answer, objects, headers)
        return reply(objects.whole(*await answer.whole()), headers)


async def _stream(
    api: Api,
    request: web.Request,
    answer: LiveAnswer,
    objects: ChatObjects,
    headers: dict[str, str],
) -> web.StreamResponse:
    stream = EventStream(request, api.settings.write_s)
    await stream.open(headers)
    try:
        await stream.send(objects.opening())
        async for event in answer.events():
            if isinstance(event, Tokens):
                chunk = objects.piece(event.tokens)
                if chunk is not None:
                    await stream.send(chunk)
                continue
            for chunk in objects.closing(event):
                await stream.send(chunk)
    except Exception as error:  # noqa: BLE001  # the status is sent: it is told as an event
        await stream.send({"error": broken_stream(error)})
    await stream.end(DONE)
    return stream.response
