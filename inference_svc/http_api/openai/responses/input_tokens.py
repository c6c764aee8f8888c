"""POST /v1/responses/input_tokens: how many tokens a response would read."""

from aiohttp import web

from inference_svc.core.chat import Message
from inference_svc.core.transcript_format import Transcript
from inference_svc.http_api.api import Api
from inference_svc.http_api.openai.responses.conversation_turns import going_on, session_of
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.openai.responses.stored_response import find_stored, session_up_to
from inference_svc.http_api.replies import reply
from inference_svc.http_api.requests import caller_of
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.service.submissions import chat_input


class InputTokensBody(ResponseBody):
    """The body of a request for a response, whose model need not be named."""

    model: str = ""


async def count_input_tokens(api: Api, request: web.Request) -> web.Response:
    """Count the tokens of an input, and of what it follows."""
    body, caller = await api.decoded(request, InputTokensBody), caller_of(request)
    messages, behind = await _read(api, caller, body)
    given = chat_input(messages, body.tool_use.tools, body.template_arguments)
    num_tokens = len(await api.gateway.encode(given, behind))
    num_tokens += 0 if behind is None else len(behind.context.token_ids)
    return reply({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _read(
    api: Api, caller: Caller, body: InputTokensBody
) -> tuple[tuple[Message, ...], Transcript | None]:
    """Return what a response reads anew, and the turns that it follows; None: it follows none.

    Raises:
        NotFoundError: what it follows is not there.
    """
    if body.previous_response_id:
        stored = await find_stored(api, caller, body.previous_response_id, is_followed=True)
        behind = await session_up_to(api, caller, body.previous_response_id, stored)
        return body.new_messages, behind
    if not body.conversation_id:
        return body.conversation, None
    going = await going_on(
        api, caller, body.conversation_id, body.input, body.instructions, body.offered
    )
    session = await session_of(api, caller, going.before) if going.place.at else None
    if session is None or going.place.at is None:
        return going.messages, None
    return going.messages, session.forked(going.place.session_id, going.place.at.turns)
