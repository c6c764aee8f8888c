"""Streamed calls, parsed by clients of each API: joined pieces equal the whole."""

import json
from itertools import groupby

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from inference_svc.core.json_stream import close_object
from inference_svc.http_api.answer_members import TokenText
from inference_svc.http_api.anthropic.messages import MessageObjects
from inference_svc.http_api.openai.chats import ChatChoice
from inference_svc.http_api.openai.choices import Choices, Envelope
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.sessions.lookup import ResponseInfo
from tests.inference_svc.http_api.as_clients_read import STARTED, ScriptedAnswer, strict
from tests.inference_svc.http_api.scripted_calls import FORCED, FORCED_TEXT, HEADS, forced_tokens

WHOLE = {"a": [1, "é\n"], "b": 1.5}
WRITTEN = json.dumps(WHOLE, ensure_ascii=False)
HEAD = len(HEADS["see"])
ENVELOPE = Envelope("chat.completion", "chat.completion.chunk", "chatcmpl-1", 1, "tiny", "f")
# Every fifth place, and the ends; `make test-long` has all.
cuts = pytest.mark.parametrize(
    "cut",
    [
        pytest.param(cut, marks=() if cut % 5 == 0 or cut == len(FORCED_TEXT) else pytest.mark.long)
        for cut in range(len(FORCED_TEXT) + 1)
    ],
)


def chat(tokens, end):
    answers = [ScriptedAnswer(tokens, end)]
    return Choices(ENVELOPE, answers, lambda: [ChatChoice(0, TokenText(None), FORCED)], 1)


@cuts
async def test_in_a_chat(cut):
    """The name comes first; a cut call is shown in part, and ends by length."""
    whole = strict(ChatCompletion, await chat(*forced_tokens(cut)).whole()).choices[0]
    state = ChatCompletionStreamState()
    deltas = []
    async for made in chat(*forced_tokens(cut)).events():
        chunk = strict(ChatCompletionChunk, made)
        state.handle_chunk(chunk)
        deltas += [part for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    streamed = state.current_completion_snapshot.choices[0]
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.content or None) == (whole.message.content or None)
    if cut < HEAD:
        assert whole.message.content == FORCED_TEXT[:cut]
        assert not deltas
        assert not (whole.message.tool_calls)
        return
    (call,) = whole.message.tool_calls
    assert (call.function.name, whole.message.content) == ("see", None)
    assert WRITTEN.startswith(call.function.arguments)
    (joined,) = streamed.message.tool_calls
    assert (joined.id, joined.function.arguments) == (call.id, call.function.arguments)
    assert (deltas[0].function.name, deltas[0].function.arguments) == ("see", "")
    assert all(delta.id is None for delta in deltas[1:])
    is_all = cut == len(FORCED_TEXT)
    assert whole.finish_reason == ("tool_calls" if is_all else "length")
    if is_all:
        assert json.loads(call.function.arguments) == WHOLE
        assert len(deltas) > 10


def response():
    return ResponseObjects("resp_1", "s-1", ResponseInfo(1, "m"), TokenText(None), FORCED)


@cuts
def test_in_a_response(cut):
    """Its item is incomplete, as the response is, if its arguments are."""
    tokens, end = forced_tokens(cut)
    objects = response()
    events = [*objects.opening(STARTED), *(e for t in tokens for e in objects.piece([t]))]
    events = [strict(ResponseStreamEvent, one) for one in [*events, *objects.closing(end)]]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = strict(Response, response().whole(tokens, end))
    assert events[-1].response == whole
    if cut < HEAD:
        assert whole.output_text == FORCED_TEXT[:cut]
        return
    (item,) = whole.output
    kinds = [kind for kind, _ in groupby(event.type for event in events[2:-1])]
    called = "response.function_call_arguments"
    deltas = [event.delta for event in events if event.type == f"{called}.delta"]
    assert kinds == [
        "response.output_item.added",
        *([f"{called}.delta"] if deltas else []),
        f"{called}.done",
        "response.output_item.done",
    ]
    assert "".join(deltas) == item.arguments
    assert WRITTEN.startswith(item.arguments)
    assert item.status == ("completed" if item.arguments == WRITTEN else "incomplete")
    assert whole.status == ("completed" if cut == len(FORCED_TEXT) else "incomplete")


def message():
    return MessageObjects("msg_1", "s-1", "tiny", 1, "", FORCED)


@cuts
def test_in_a_message(cut):
    """A cut call has its complete members."""
    tokens, end = forced_tokens(cut)
    objects = message()
    events = [*objects.opening(STARTED), *(e for t in tokens for e in objects.piece([t]))]
    snapshot, pieces, buffers = None, [], {}
    for event in [*events, *objects.closing(end)]:
        read = strict(RawMessageStreamEvent, event)
        snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
        if read.type == "content_block_delta" and read.delta.type == "input_json_delta":
            pieces.append(read.delta.partial_json)
    whole = strict(Message, message().whole(tokens, end))
    assert snapshot.stop_reason == whole.stop_reason
    if cut < HEAD:
        assert whole.content == [] or whole.content[0].text == FORCED_TEXT[:cut]
        return
    (block,) = whole.content
    assert (block.type, block.name) == ("tool_use", "see")
    said = "".join(pieces)
    assert WRITTEN.startswith(said)
    assert block.input == json.loads(close_object(said))
    assert whole.stop_reason == ("tool_use" if cut == len(FORCED_TEXT) else "max_tokens")
    if said == WRITTEN:
        assert snapshot.content[0].input == block.input == WHOLE
