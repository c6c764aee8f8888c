"""The input of a response as messages."""

import pytest
from openai.types.responses import ResponseItem

from inference_svc.core.chat import Message, ToolCall
from inference_svc.http_api.bodies.body import decode
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.responses.input_items import objects_of, with_ids
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from tests.inference_svc.http_api.as_clients_read import strict

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "4"}
MESSAGE = {"type": "message"}
LOOK = ToolCall("look", '{"a": 1}', "c1")


def text_part(text):
    return {"type": "input_text", "text": text}


def read(*items):
    return decode(ResponseBody, {"model": "m", "input": list(items)}).conversation


def test_items_of_an_answer_are_one_message():
    """However many there are; thoughts are dropped."""
    other = {**CALL, "call_id": "c2", "arguments": "", "id": "fc_1", "status": "completed"}
    said = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    }
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    parts = [{"type": "input_text", "text": "5"}]
    assert read(
        {"role": "user", "content": "?"},
        *(thought, said, CALL, other, RESULT, {**RESULT, "call_id": "c2", "output": parts}),
    ) == (
        Message("user", "?"),
        Message("assistant", "I look.", (LOOK, ToolCall("look", "{}", "c2"))),
        Message("tool", "4", tool_call_id="c1", name="look"),
        Message("tool", "5", tool_call_id="c2", name="look"),
    )


def test_answers_without_calls_stay_separate():
    """As they were sent."""
    one = {"role": "assistant", "content": "a"}
    assert read(one, one, {"role": "user", "content": "?"})[:2] == (Message("assistant", "a"),) * 2


def test_items_in_the_clients_format():
    """One for one, with all members, but without thoughts."""
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        *(thought, {"role": "assistant", "content": "I look."}),
        *({**CALL, "namespace": "at"}, RESULT, {**RESULT, "output": parts}),
    ]
    objects = objects_of(decode(ResponseBody, {"model": "m", "input": given}).input)
    items = [strict(ResponseItem, item).to_dict() for item in with_ids("resp_ab", objects)]
    texts = [text_part(text) for text in "ab"]
    said = {"type": "output_text", "text": "I look.", "annotations": []}
    assert items == [
        {"id": f"{prefix}_ab_in_{index}", "status": "completed", **item}
        for index, (prefix, item) in enumerate(
            [
                ("msg", {**MESSAGE, "role": "system", "content": [text_part("Be brief.")]}),
                ("msg", {**MESSAGE, "role": "user", "content": texts}),
                ("msg", {**MESSAGE, "role": "assistant", "content": [said]}),
                ("fc", {**CALL, "namespace": "at"}),
                ("fco", RESULT),
                ("fco", {**RESULT, "output": texts}),
            ]
        )
    ]


def test_messages_of_a_chat_are_items_too():
    """An answer with calls is several."""
    called = {"id": "c1", "function": {"name": "look", "arguments": ""}}
    given = [
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "So.", "tool_calls": [called]},
        {"role": "assistant"},
    ]
    objects = objects_of(decode(ResponseBody, {"model": "m", "input": given}).input)
    kinds = [strict(ResponseItem, item).type for item in with_ids("resp_ab", objects)]
    call, result, message = "function_call", "function_call_output", "message"
    assert kinds == [call, result, message, call, message]


def test_a_result_alone():
    """Its call is in the response that it follows."""
    assert read(RESULT) == (Message("tool", "4", tool_call_id="c1"),)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({**CALL, "arguments": "[1]"}, "input[0].arguments"),
        ({**CALL, "arguments": '{"a": NaN}'}, "input[0].arguments"),
        ({**CALL, "name": "two words"}, "input[0].name"),
        ({**CALL, "call_id": None}, "input[0].call_id"),
        ({**CALL, "output": "4"}, "input[0].output"),
        ({**RESULT, "output": None}, "input[0].output"),
        ({**RESULT, "output": [{"type": "input_image"}]}, "input[0].output[0].type"),
        ({"type": "reasoning", "text": "x"}, "input[0].text"),
        ({"type": ["message"]}, "input[0].type"),
    ],
)
def test_invalid_items(item, param):
    """The error has their place, without the kind of the item."""
    with pytest.raises(RequestError) as refused:
        read(item)
    assert refused.value.param == param
