"""Calls that a model makes unprompted beside its text, by the official clients.

A begun call is kept to its format, and the client gets the arguments as they are generated.
"""

import json

import openai
import pytest
import pytest_asyncio

from tests.http_api.conftest import MODEL, ApiService
from tests.http_api.test_messages import LOOK_UP, WAIT, as_function, client_of, returning
from tests.scripted_model import build_scripted_model, last_of_prompt
from tests.tool_templates import FAMILIES, tokenizer_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAMILY = FAMILIES["qwen"]
ANSWER = [
    "I'll look",
    " twice.",
    "\n<tool_call>\n",
    '{"name": "look_up",',
    ' "arguments": {"word"',
    ': "K',
    'V"}}',
    "\n</tool_call>",
    " and\n",
    "<tool_call>",
    '{"name": "wait", "argu',
    'ments": {}}',
    "</tool_call>\n",
]
KINDS = ["text", "tool_use", "text", "tool_use"]
PROMPT = {"system": "Be brief.", "messages": [{"role": "user", "content": "What is KV? " * 60}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted(tmp_path_factory):
    """Run the pair with a model that always gives this answer."""
    directory = tmp_path_factory.mktemp("scripted")
    tokenizer = tokenizer_of(FAMILY)
    script = {last_of_prompt(tokenizer): ANSWER}
    model = build_scripted_model(directory / MODEL, tokenizer, script, FAMILY.ends[-1])
    service = ApiService(model, directory)
    await service.kvd.start()
    try:
        await service.start()
        yield service
    finally:
        await service.service.stop()
        await service.kvd.stop()


def asking(prompt, **members):
    return {"model": MODEL, "max_tokens": 60, "tools": [LOOK_UP, WAIT], **prompt, **members}


def parts_of(message):
    """Return the texts and calls of an answer, in order."""
    return [
        block.text if block.type == "text" else (block.name, block.input)
        for block in message.content
    ]


async def test_texts_and_calls_keep_their_order(scripted):
    """Streamed as whole; sent back, they are the session's history."""
    async with client_of(scripted) as client:
        whole = await client.messages.create(**asking(PROMPT))
        longer = returning(PROMPT, whole, "Well?")
        async with client.messages.stream(**asking(longer)) as stream:
            streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == KINDS
    assert parts_of(whole)[1::2] == [("look_up", {"word": "KV"}), ("wait", {})]
    assert parts_of(streamed) == parts_of(whole)
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    session_id = whole.model_extra["session_id"]
    assert streamed.model_extra["session_id"] == session_id
    assert streamed.usage.cache_read_input_tokens >= whole.usage.input_tokens
    assert await scripted.num_turns(session_id) == 2


async def test_a_client_that_joins_the_texts_finds_the_session(scripted):
    """Its message has one content beside the calls; the history is the same."""
    async with client_of(scripted) as client, scripted.client() as other:
        first = await other.chat.completions.create(
            model=MODEL,
            max_tokens=60,
            messages=[{"role": "system", "content": PROMPT["system"]}, *PROMPT["messages"]],
            tools=list(map(as_function, (LOOK_UP, WAIT))),
        )
        said = first.choices[0].message
        calls = [
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.function.name,
                "input": json.loads(call.function.arguments),
            }
            for call in said.tool_calls
        ]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "Found."}
            for call in calls
        ]
        answer = [{"type": "text", "text": said.content}, *calls]
        messages = [
            *PROMPT["messages"],
            {"role": "assistant", "content": answer},
            {"role": "user", "content": results},
        ]
        second = await client.messages.create(**asking({**PROMPT, "messages": messages}))
    assert second.model_extra["session_id"] == first.model_extra["session_id"]
    assert second.usage.cache_read_input_tokens >= first.usage.prompt_tokens


@pytest.mark.parametrize(
    ("choice", "kinds", "reason"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, KINDS[:3], "tool_use"),
        ({"type": "none"}, ["text"], "end_turn"),
    ],
)
async def test_fewer_calls_than_generated(scripted, choice, kinds, reason):
    """Only the first call counts, or would-be calls are text."""
    async with client_of(scripted) as client:
        message = await client.messages.create(**asking(PROMPT, tool_choice=choice))
    assert [block.type for block in message.content] == kinds
    assert message.stop_reason == reason


PIECES = ['{"word": ', '"K', 'V"}']  # of the first call's arguments, as they come
CHAT = {
    "model": MODEL,
    "messages": [{"role": "system", "content": PROMPT["system"]}, *PROMPT["messages"]],
    "tools": list(map(as_function, (LOOK_UP, WAIT))),
}
RESPONSE = {
    "model": MODEL,
    "input": CHAT["messages"],
    "tools": [{"type": "function", **tool["function"]} for tool in CHAT["tools"]],
}


async def test_arguments_are_streamed_as_generated(scripted):
    """In all three APIs, for each call, with the text before and between."""
    async with client_of(scripted) as client, scripted.client() as other:
        async with client.messages.stream(**asking(PROMPT)) as stream:
            said = [
                (event.index, event.delta)
                async for event in stream
                if event.type == "content_block_delta"
            ]
        assert [d.partial_json for i, d in said if i == 1 and d.partial_json] == PIECES
        assert "".join(d.partial_json for i, d in said if i == 3) == "{}"
        assert "".join(d.text for i, d in said if i == 0).strip() == "I'll look twice."
        chunks = await other.chat.completions.create(max_tokens=60, stream=True, **CHAT)
        deltas = [choice.delta async for chunk in chunks for choice in chunk.choices]
        calls = [part for delta in deltas for part in delta.tool_calls or ()]
        assert [part.function.name for part in calls if part.id] == ["look_up", "wait"]
        written = [part.function.arguments for part in calls if part.index == 0]
        assert [piece for piece in written if piece] == PIECES
        events = await other.responses.create(max_output_tokens=60, stream=True, **RESPONSE)
        kind = "response.function_call_arguments.delta"
        found = [event async for event in events if event.type == kind]
        assert [event.delta for event in found][: len(PIECES)] == PIECES
        assert {event.output_index for event in found} == {1, 3}


async def test_a_call_that_is_cut(scripted):
    """At max_tokens: its beginning is shown, whole and streamed, and may be sent back."""
    num_tokens = ANSWER.index(': "K') + 1
    async with client_of(scripted) as client, scripted.client() as other:
        whole = await other.chat.completions.create(max_tokens=num_tokens, **CHAT)
        (choice,) = whole.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "length"
        assert call.function.arguments == "".join(PIECES[:2])
        result = {"role": "tool", "tool_call_id": call.id, "content": "Found."}
        messages = [*CHAT["messages"], choice.message.model_dump(exclude_none=True), result]
        after = await other.chat.completions.create(**{**CHAT, "messages": messages}, max_tokens=1)
        assert after.model_extra["session_id"] == whole.model_extra["session_id"]
        chunks = await other.chat.completions.create(max_tokens=num_tokens, stream=True, **CHAT)
        deltas = [choice.delta async for chunk in chunks for choice in chunk.choices]
        parts = [part.function.arguments for d in deltas for part in d.tool_calls or ()]
        assert [part for part in parts if part] == PIECES[:2]
        response = await other.responses.create(max_output_tokens=num_tokens, **RESPONSE)
        assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
        assert response.output[-1].arguments == call.function.arguments
        assert (await other.responses.retrieve(response.id)).output == response.output
        message = await client.messages.create(**asking(PROMPT, max_tokens=num_tokens))
    assert (message.stop_reason, message.content[-1].input) == ("max_tokens", {})


@pytest.mark.parametrize(
    ("stop", "num_calls", "text"),
    [
        (['"K', "}", "V"], 2, "I'll look twice. and"),
        (["\n<tool_call>"], 0, "I'll look twice."),
        ([" and"], 1, "I'll look twice."),
    ],
)
async def test_stop_strings_apply_to_text_only(scripted, stop, num_calls, text):
    """They do not cut a call that has begun."""
    async with scripted.client() as client:
        answer = await client.chat.completions.create(max_tokens=60, stop=stop, **CHAT)
    (choice,) = answer.choices
    assert len(choice.message.tool_calls or ()) == num_calls
    assert " ".join(choice.message.content.split()) == text


def strict_chat(**schema):
    """Return the same request with a strict tool of this schema."""
    parameters = {
        "type": "object",
        "properties": {"word": {"enum": ["SSD", "NVMe"]}},
        "required": ["word"],
        "additionalProperties": False,
        **schema,
    }
    function = {"name": "look_up", "parameters": parameters, "strict": True}
    return {**CHAT, "max_tokens": 60, "tools": [{"type": "function", "function": function}]}


async def test_a_strict_tool_follows_its_schema(scripted):
    """With any model; a schema that no grammar supports is refused."""
    async with scripted.client() as client:
        answer = await client.chat.completions.create(**strict_chat())
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["word"] in {"SSD", "NVMe"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**strict_chat(propertyNames={"maxLength": 1}))
    assert refused.value.code == "invalid_grammar"
