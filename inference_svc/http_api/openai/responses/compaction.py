"""POST /v1/responses/compact: a summary of a conversation, as an item that replaces it.

The model is asked to sum up the conversation, in a fork that is deleted afterwards; so the
conversation's KV cache is reused. The result is one item. As input, the item stands for two
messages: the user's request for a summary, and the model's answer. So any chat template accepts
the messages after it.

The item's content is opaque to OpenAI's clients, but no secret: it is the client's own
conversation.

*Source:* OpenAI API reference, "Compact a response". There the users' messages are kept before
the item; here the model is asked to keep what matters of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from aiohttp import web

from inference_svc.core.chat import USER, ChoiceKind, Message, ToolUse
from inference_svc.http_api.api import Api
from inference_svc.http_api.bodies.body import Refused
from inference_svc.http_api.openai.responses.input_items import COMPACTION, PREFIXES, pack_summary
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.openai.responses.response_objects import response_usage
from inference_svc.http_api.openai.responses.response_turns import response_turn
from inference_svc.http_api.replies import reply
from inference_svc.http_api.requests import REQUEST_IDS

MAX_SUMMARY_TOKENS = 2048
WINDOW_SHARE = 4  # the summary may have at most one fourth of the window
ASKED = (
    "Sum up this conversation for somebody who goes on with it and has not read it: what was asked,"
    " what was found out, decided and done, with names and numbers as they are, and what is left"
    " to do. Write nothing else."
)


class CompactBody(ResponseBody):
    """The body of POST /v1/responses/compact, which need not name the model."""

    needs_input: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, Refused]] = {
        **ResponseBody.refused,
        "background": Refused((False,), "wait for the answer: a compaction is short"),
        "conversation": Refused((), "send the conversation's items as input"),
        "image": Refused((), "the service reads text only"),
        "session_id": Refused((), "send input, or previous_response_id"),
        "stream": Refused((False,), "a compaction is sent as a whole: leave it out"),
        "text": Refused((), "a compaction is plain text: leave it out"),
        "tool_choice": Refused(("none", "auto"), "a compaction calls no tools: leave it out"),
    }

    model: str = ""

    @property
    def tool_use(self) -> ToolUse:
        """The conversation's tools, of which the summary calls none."""
        return ToolUse(self.offered, ChoiceKind.NONE)


async def compact_response(api: Api, request: web.Request) -> web.Response:
    """Sum a conversation up."""
    turn_request = await api.read(request, CompactBody)
    turn, _ = await response_turn(api, turn_request)
    max_tokens = min(MAX_SUMMARY_TOKENS, max(1, api.model.context_window // WINDOW_SHARE))
    bound = min(max_tokens, turn.sampling.get("max_tokens", max_tokens))
    turn = replace(
        turn,
        messages=_with_request(turn.messages),
        sampling={**turn.sampling, "max_tokens": bound},
        is_kept=False,
        info=None,
    )
    async with await api.answers.open(turn_request.caller, turn) as answer:
        _, finished = await answer.whole()
    summary = turn.reading.whole(finished.text).content.strip()
    name = turn.response_id.removeprefix("resp_")
    compaction: dict[str, Any] = {
        "id": turn.response_id,
        "object": "response.compaction",
        "created_at": turn_request.created_s,
        "output": [
            {
                "id": f"{PREFIXES[COMPACTION]}_{name}",
                "type": COMPACTION,
                "encrypted_content": pack_summary(ASKED, summary),
            }
        ],
        "usage": response_usage(finished.usage),
    }
    return reply(compaction, dict.fromkeys(REQUEST_IDS, turn.request_id))


def _with_request(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Append the request for a summary.

    It is added to a user's last message: chat templates may refuse two user messages in a row.
    """
    if messages and messages[-1].role == USER:
        last = messages[-1]
        return (*messages[:-1], replace(last, content=f"{last.content}\n\n{ASKED}"))
    return (*messages, Message(USER, ASKED))
