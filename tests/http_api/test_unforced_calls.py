"""A model that calls tools by itself, beside what it says, by the official clients."""

import json

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
    ' "arguments": {"word": "KV"}}',
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
    """The pair, with a model that always gives this answer."""
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


def shown(message):
    """What an answer says and calls, in order."""
    return [
        block.text if block.type == "text" else (block.name, block.input)
        for block in message.content
    ]


async def test_texts_and_calls_in_order(scripted):
    """Streamed as whole; sent back, they are the history that the session has."""
    async with client_of(scripted) as client:
        whole = await client.messages.create(**asking(PROMPT))
        longer = returning(PROMPT, whole, "Well?")
        async with client.messages.stream(**asking(longer)) as stream:
            streamed = await stream.get_final_message()
    assert [block.type for block in whole.content] == KINDS
    assert shown(whole)[1::2] == [("look_up", {"word": "KV"}), ("wait", {})]
    assert shown(streamed) == shown(whole)
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    session_id = whole.model_extra["session_id"]
    assert streamed.model_extra["session_id"] == session_id
    assert streamed.usage.cache_read_input_tokens >= whole.usage.input_tokens
    assert await scripted.num_turns(session_id) == 2


async def test_another_client_puts_the_texts_together(scripted):
    """It has one content beside the calls: the history is the same."""
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
async def test_fewer_calls_are_wanted(scripted, choice, kinds, reason):
    """The first one counts; or what would be calls is text."""
    async with client_of(scripted) as client:
        message = await client.messages.create(**asking(PROMPT, tool_choice=choice))
    assert [block.type for block in message.content] == kinds
    assert message.stop_reason == reason
