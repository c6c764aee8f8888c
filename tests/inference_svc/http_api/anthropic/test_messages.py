"""Messages and their events, parsed by the official client."""

import json
from dataclasses import replace

import pytest
from anthropic.types import Message, RawMessageStreamEvent

from inference_svc.core.chat import Tool, ToolUse
from inference_svc.core.errors import SessionBusyError
from inference_svc.core.tools.formats import FORMATS
from inference_svc.core.turn_record import AnswerToken
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.anthropic.messages import MessageObjects
from tests.inference_svc.http_api.as_clients_read import STARTED, TOKENS, make_finished, strict

USE = ToolUse((Tool("look_up"), Tool("go")))
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "é", "n": 1.50}}\n</tool_call>'
OTHER = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
THOUGHT = (
    "<|channel|>analysis<|message|>Which word?<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.go<|message|>{}<|call|>"
    "<|start|>assistant<|channel|>analysis<|message|>Now?<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
)


def objects(cache_ttl="", max_tokens=2, reading=None):
    return MessageObjects("msg_1", "s-1", "tiny", max_tokens, cache_ttl, reading or Reading())


def reading(name, use=USE):
    return Reading(FORMATS[name], use, "toolu_{}".format)


def saying(text, reason="stop", stop_string=""):
    return replace(make_finished(reason), text=text, stop_string=stop_string)


def put_together(events):
    """Return the content of a streamed message from its events; check each one's place."""
    content = []
    is_open = False
    for event in events:
        read = strict(RawMessageStreamEvent, event)
        if read.type == "content_block_start":
            assert not is_open
            assert read.index == len(content)
            content.append(read.content_block)
            is_open, written = True, ""
        elif read.type == "content_block_delta":
            assert is_open
            assert read.index == len(content) - 1
            block, delta = content[-1], read.delta
            if delta.type == "input_json_delta":
                assert block.input == {}
                written += delta.partial_json
            else:
                kind = block.type
                assert delta.type == f"{kind}_delta"
                setattr(block, kind, getattr(block, kind) + getattr(delta, kind))
        elif read.type == "content_block_stop":
            assert is_open
            assert read.index == len(content) - 1
            is_open = False
            if content[-1].type == "tool_use":
                content[-1].input = json.loads(written)
    assert not is_open
    return content


def test_a_whole_message():
    """Its usage counts every token of the prompt once."""
    message = strict(Message, objects().whole(TOKENS, make_finished()))
    assert (message.id, message.role, message.content[0].text) == ("msg_1", "assistant", "Hello")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (7, 28, 2)
    assert usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize(("ttl", "minutes", "hours"), [("5m", 7, 0), ("1h", 0, 7)])
def test_computed_tokens_are_reported_as_cached_if_requested(ttl, minutes, hours):
    """They are stored in any case; clients that asked for it are told so."""
    usage = strict(Message, objects(ttl).whole(TOKENS, make_finished())).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (0, 7)
    created = usage.cache_creation
    assert created.ephemeral_5m_input_tokens == minutes
    assert created.ephemeral_1h_input_tokens == hours


@pytest.mark.parametrize(
    ("reason", "stop_string", "max_tokens", "shown"),
    [
        ("stop", "", 2, ("end_turn", None)),
        ("stop", "###", 2, ("stop_sequence", "###")),
        ("length", "", 2, ("max_tokens", None)),
        ("length", "", 9, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_for_the_end_of_an_answer(reason, stop_string, max_tokens, shown):
    """One with fewer tokens than allowed has filled the window."""
    over = replace(make_finished(reason), stop_string=stop_string)
    message = strict(Message, objects(max_tokens=max_tokens).whole(TOKENS, over))
    assert (message.stop_reason, message.stop_sequence) == shown


def test_a_streamed_message():
    """Its events, in order; the last but one equals the whole message."""
    made = objects()
    events = [*made.opening(STARTED)]
    for token in TOKENS:
        events += made.piece([token])
    events += made.closing(make_finished())
    read = [strict(RawMessageStreamEvent, event) for event in events]
    assert [event.type for event in read] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert read[0].message.usage.cache_read_input_tokens == 28
    assert "".join(event.delta.text for event in read[2:4]) == "Hello"
    whole = strict(Message, objects().whole(TOKENS, make_finished()))
    assert read[-2].delta.stop_reason == whole.stop_reason
    assert read[-2].usage.input_tokens == whole.usage.input_tokens
    assert read[-2].usage.output_tokens == whole.usage.output_tokens


def test_an_answer_without_text_has_no_block():
    """A client that sends the message back must not send an empty block."""
    made, nothing = objects(), [AnswerToken(1, "")]
    events = [*made.opening(STARTED), *made.piece(nothing), *made.closing(make_finished())]
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    silent = replace(make_finished(), text="")
    assert strict(Message, objects().whole(nothing, silent)).content == []


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("hermes", f"Hello\n{CALL}", ["text", "tool_use"]),
        ("hermes", f"{CALL}\n{OTHER}", ["tool_use", "tool_use"]),
        ("hermes", f"I {CALL} and {OTHER} go", ["text", "tool_use", "text", "tool_use", "text"]),
        ("hermes", f"Hello {CALL[:40]}", ["text"]),
        ("hermes", CALL.replace("look_up", "fly"), ["text"]),
        ("gpt-oss", THOUGHT, ["thinking", "text", "tool_use", "thinking", "text"]),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_streamed_and_whole_answers_have_the_same_blocks(name, text, shown, step):
    """In their order, whatever the pieces of text are."""
    whole = strict(Message, objects(reading=reading(name)).whole([], saying(text)))
    made = objects(reading=reading(name))
    events = [*made.opening(STARTED)]
    for at in range(0, len(text), step):
        events += made.piece([AnswerToken(1, text[at : at + step])])
    events += made.closing(saying(text))
    assert [block.type for block in whole.content] == shown
    assert put_together(events) == whole.content
    assert events[-2]["delta"]["stop_reason"] == whole.stop_reason


def test_a_call_is_shown_in_the_clients_format():
    """With an id, and its arguments as an object; it ends before the next block begins."""
    made = objects(reading=reading("hermes"))
    message = strict(Message, objects(reading=reading("hermes")).whole([], saying(CALL)))
    (call,) = message.content
    assert (call.id, call.name, call.input) == ("toolu_0", "look_up", {"word": "é", "n": 1.5})
    events = list(made.piece([AnswerToken(1, CALL)]))
    assert [event["type"] for event in events] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]


@pytest.mark.parametrize(
    ("over", "shown"),
    [
        (saying(CALL), "tool_use"),
        (saying(f"{CALL} and ", stop_string="###"), "stop_sequence"),
        (saying(f"{CALL} and ", "length"), "max_tokens"),
        (saying("No."), "end_turn"),
        (saying(CALL.replace("look_up", "fly")), "end_turn"),
    ],
)
def test_the_stop_reason_with_tools(over, shown):
    """It is a call only if the answer ended by itself."""
    assert objects(reading=reading("hermes")).whole([], over)["stop_reason"] == shown


def test_the_number_of_shown_calls_is_limited():
    """The others are dropped."""
    use = replace(USE, most_calls=1)
    message = objects(reading=reading("hermes", use)).whole([], saying(CALL + OTHER))
    assert [block["name"] for block in message["content"]] == ["look_up"]


def test_an_answer_that_fails_during_its_stream():
    """The last event is the error."""
    made = objects().failure(SessionBusyError("busy", "wait"))
    assert (made["type"], made["error"]["type"]) == ("error", "conflict_error")
    assert made["error"]["message"] == "busy: wait"
