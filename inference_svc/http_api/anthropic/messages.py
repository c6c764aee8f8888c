"""POST /v1/messages, and POST /v1/messages/count_tokens."""

from aiohttp import web

from inference_svc.http_api.anthropic.bodies import MessagesBody, PromptBody
from inference_svc.http_api.anthropic.message_objects import MessageObjects
from inference_svc.http_api.api import Api
from inference_svc.http_api.replies import OneAnswer, reply, send_reply
from inference_svc.service.submissions import chat_input


async def create_message(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer a conversation's last message."""
    turn_request = await api.read(request, MessagesBody)
    body = turn_request.body
    turn = turn_request.turn(body.conversation)
    async with await api.answers.open(turn_request.caller, turn) as answer:
        objects = MessageObjects(
            message_id="msg_" + turn_request.chain.id_of("message", turn.request_id),
            session_id=answer.session_id,
            model=body.model,
            max_tokens=turn.sampling["max_tokens"],
            cache_ttl=body.cache_ttl,
            reading=turn.reading,
        )
        return await send_reply(turn_request, turn, OneAnswer(answer, objects))


async def count_tokens(api: Api, request: web.Request) -> web.Response:
    """Count the tokens of a conversation, and its tools, as they are read where it is new."""
    body = (await api.read(request, PromptBody)).body
    tools, arguments = body.tool_use.tools, body.template_arguments
    given = chat_input(body.conversation, tools, arguments, body.beginning)
    return reply({"input_tokens": len(await api.gateway.prompts.encode(given))})
