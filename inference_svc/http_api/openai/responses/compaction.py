"""POST /v1/responses/compact: a conversation in a few words, which takes its place as an item.

The model is asked to sum the conversation up, in a fork that goes when it has: so what was computed
of it is not computed again. What comes back is one item. As input it is what was asked and what
the model said, a user's message and its answer, so that any chat template takes what follows.

Its content is opaque to OpenAI's clients, and no secret: it is the client's own conversation.

*Source:* OpenAI API reference, "Compact a response"; there the users' messages stand before the
item, here the model is asked to keep what matters of them.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from aiohttp import web

from inference_svc.core.chat import USER, ChoiceKind, Message, ToolUse
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import Refused
from inference_svc.http_api.openai.responses.input_items import COMPACTION, PREFIXES, packed
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.openai.responses.response_objects import response_usage
from inference_svc.http_api.openai.responses.response_turns import response_turn
from inference_svc.http_api.replies import reply
from inference_svc.http_api.requests import REQUEST_IDS

MAX_SUMMARY_TOKENS = 2048
OF_WINDOW = 4  # the summary has so much of the window at most: its fourth part
ASKED = (
    "Sum up this conversation for somebody who goes on with it and has not read it: what was asked,"
    " what was found out, decided and done, with names and numbers as they are, and what is left"
    " to do. Write nothing else."
)


class CompactBody(ResponseBody):
    """The body of POST /v1/responses/compact, whose model need not be named."""

    needs_input: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, Refused]] = {
        **ResponseBody.refused,
        "background": Refused((False,), "wait for it: it is short"),
        "conversation": Refused((), "send its items as input"),
        "image": Refused((), "the service reads text only"),
        "session_id": Refused((), "send the input, or previous_response_id"),
        "stream": Refused((False,), "it comes whole"),
        "text": Refused((), "it is plain text"),
        "tool_choice": Refused(("none", "auto"), "nothing is called: leave it out"),
    }

    model: str = ""

    @property
    def tool_use(self) -> ToolUse:
        """The tools of the conversation, which the summary does not call."""
        return ToolUse(self.offered, ChoiceKind.NONE)


async def compact_response(api: Api, request: web.Request) -> web.Response:
    """Sum a conversation up."""
    turn_request = await api.read(request, CompactBody)
    turn, _ = await response_turn(api, turn_request)
    most = min(MAX_SUMMARY_TOKENS, max(1, api.model.context_window // OF_WINDOW))
    bound = min(most, turn.sampling.get("max_tokens", most))
    turn = replace(
        turn,
        messages=_asking(turn.messages),
        sampling={**turn.sampling, "max_tokens": bound},
        is_kept=False,
        info=None,
    )
    async with await api.answers.open(turn_request.caller, turn) as answer:
        _, finished = await answer.whole()
    summary = turn.reading.whole(finished.text).content.strip()
    name = turn.response_id.removeprefix("resp_")
    made: dict[str, Any] = {
        "id": turn.response_id,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [
            {
                "id": f"{PREFIXES[COMPACTION]}_{name}",
                "type": COMPACTION,
                "encrypted_content": packed(ASKED, summary),
            }
        ],
        "usage": response_usage(finished.usage),
    }
    return reply(made, dict.fromkeys(REQUEST_IDS, turn.request_id))


def _asking(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages that end with the question: templates may refuse two of a user's in a row."""
    if messages and messages[-1].role == USER:
        last = messages[-1]
        return (*messages[:-1], replace(last, content=f"{last.content}\n\n{ASKED}"))
    return (*messages, Message(USER, ASKED))
