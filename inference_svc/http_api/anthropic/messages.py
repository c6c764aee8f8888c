"""POST /v1/messages, whole and streamed, and POST /v1/messages/count_tokens.

The events of a stream come in this order:

    message_start, (content_block_start, content_block_delta…, content_block_stop)…,
    message_delta, message_stop | error

There is a block for each text, each tool call, and each thought, in the order of the answer. An
empty answer has no block.

*Source:* Anthropic API reference, "Messages" and "Streaming messages". `session_id` is this
service's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from aiohttp import web

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Part,
    Reasoning,
    with_whole_calls,
)
from inference_svc.core.turn_record import AnswerToken, Finished, FinishReason, Started
from inference_svc.http_api.answer_members import reuse_members
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.anthropic.blocks import CALL, TEXT, THINKING
from inference_svc.http_api.anthropic.bodies import MessagesBody, PromptBody
from inference_svc.http_api.anthropic.dialect import error_body
from inference_svc.http_api.api import Api
from inference_svc.http_api.replies import OneAnswer, reply, send_reply
from inference_svc.service.submissions import chat_input
from shared.types.errors import ReportedError


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
    """Count the tokens of a conversation and its tools, as a new session would read them."""
    body = (await api.read(request, PromptBody)).body
    tools, arguments = body.tool_use.tools, body.template_arguments
    turn_input = chat_input(body.conversation, tools, arguments, body.beginning)
    return reply({"input_tokens": len(await api.gateway.prompts.encode(turn_input))})


# The content of each type of block before its first delta.
_EMPTY: Mapping[str, Mapping[str, Any]] = {
    TEXT: {TEXT: ""},
    THINKING: {THINKING: ""},
    CALL: {"input": {}},
}


class MessageObjects:
    """Builds the object or the events of one answer.

    Args:
        message_id: the answer's id.
        session_id: the session of the turn.
        model: the model's name as the client wrote it.
        max_tokens: the client's bound of the answer; a cut answer with fewer tokens has filled
            the context window.
        cache_ttl: how long the client wants the prompt to be cached; "" if it does not say.
        reading: how the answer is parsed.
    """

    def __init__(
        self,
        message_id: str,
        session_id: str,
        model: str,
        max_tokens: int,
        cache_ttl: str,
        reading: Reading,
    ) -> None:
        self._id = message_id
        self._session_id = session_id
        self._model = model
        self._max_tokens = max_tokens
        self._cache_ttl = cache_ttl
        self._reader = reading.reader()
        self._index = 0  # index of the open block, or else of the next one
        self._open = ""  # type of the open block; "" if there is none

    def whole(self, _tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Build the message of a request that is not streamed."""
        parts = [*self._reader.push_text(finished.text), *self._reader.end()]
        content: list[dict[str, Any]] = []
        shown = _blocks(with_whole_calls(parts))
        for kind, blocks in groupby(shown, key=lambda block: block["type"]):
            found = list(blocks)
            if kind != CALL:
                found = [{**found[0], kind: "".join(block[kind] for block in found)}]
            content += found
        return self._message(content, self._usage_of(finished)) | self._stop_reason(finished)

    def opening(self, started: Started) -> Iterator[dict[str, Any]]:
        """Build the first event: an empty message, with the usage of the prompt."""
        usage = self._usage(started.history_tokens + started.new_tokens, started.reused_tokens, 0)
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message}

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Build the events of the next tokens; there are none if they show nothing."""
        yield from self._events(self._reader.push(tokens))

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Build the events of the end: held-back text, stop reason and usage."""
        yield from self._events(self._reader.end())
        yield from self._close_block()
        delta, usage = self._stop_reason(finished), self._usage_of(finished)
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, error: ReportedError) -> dict[str, Any]:
        """Build the event of an answer that failed."""
        return error_body(error)

    def _events(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Build the events of parts; consecutive texts of one type are one block."""
        for part in parts:
            if isinstance(part, CallBegun):
                yield from self._close_block()
                yield self._open_block({"type": CALL, "id": part.call_id, "name": part.name})
            elif isinstance(part, CallArguments):
                delta = {"type": "input_json_delta", "partial_json": part.text}
                yield self._event("content_block_delta", delta=delta)
            elif isinstance(part, CallEnded):
                yield from self._close_block()
            else:
                yield from self._text_events(part)

    def _text_events(self, part: Part) -> Iterator[dict[str, Any]]:
        """Build the events of a text; open a block for it if none of its type is open."""
        for block in _blocks([part]):
            kind = block["type"]
            if kind != self._open:
                yield from self._close_block()
                yield self._open_block(block)
            delta = {"type": f"{kind}_delta", kind: block[kind]}
            yield self._event("content_block_delta", delta=delta)

    def _open_block(self, block: dict[str, Any]) -> dict[str, Any]:
        """Open a block, and build its event."""
        self._open = block["type"]
        return self._event("content_block_start", content_block={**block, **_EMPTY[self._open]})

    def _close_block(self) -> Iterator[dict[str, Any]]:
        """Close the open block, if there is one, and build its event."""
        if self._open:
            yield self._event("content_block_stop")
            self._open = ""
            self._index += 1

    def _event(self, kind: str, **members: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._index, **members}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": usage,
            "session_id": self._session_id,
        }

    def _stop_reason(self, finished: Finished) -> dict[str, Any]:
        """Return the members that say why the answer ended."""
        reason = "tool_use" if self._reader.num_calls else "end_turn"
        if finished.stop_string:
            reason = "stop_sequence"
        if finished.finish_reason == FinishReason.LENGTH:
            is_bounded = finished.usage.output_tokens >= self._max_tokens
            reason = "max_tokens" if is_bounded else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": finished.stop_string or None}

    def _usage_of(self, finished: Finished) -> dict[str, Any]:
        usage = finished.usage
        prompt_tokens = usage.history_tokens + usage.new_tokens
        counted = self._usage(prompt_tokens, usage.reused_tokens, usage.output_tokens)
        return {**counted, **reuse_members(usage)}

    def _usage(self, prompt_tokens: int, reused_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Return the usage object.

        All computed tokens are cached; they count as cache writes if the client asked for caching.
        """
        computed_tokens = prompt_tokens - reused_tokens
        kept = {ttl: computed_tokens if ttl == self._cache_ttl else 0 for ttl in ("5m", "1h")}
        return {
            "input_tokens": 0 if self._cache_ttl else computed_tokens,
            "cache_creation_input_tokens": sum(kept.values()),
            "cache_read_input_tokens": reused_tokens,
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": n for ttl, n in kept.items()},
            "output_tokens": output_tokens,
            "service_tier": "standard",
        }


def _blocks(parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
    """Yield a block for each part that is not empty."""
    for part in parts:
        if isinstance(part, ToolCall):
            yield {"type": CALL, "id": part.call_id, "name": part.name, "input": part.values}
        elif isinstance(part, Reasoning) and part.text:
            yield {"type": THINKING, THINKING: part.text, "signature": ""}
        elif isinstance(part, Content) and part.text:
            yield {"type": TEXT, TEXT: part.text, "citations": None}
