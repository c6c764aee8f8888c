"""Tools by the official client against the real pair: offered, called and answered.

The model's template has no tools, so they are described in texts; forced calls follow a grammar,
since this model generates random text.
"""

import json

import jsonschema
import openai
import pytest

from tests.http_api.conftest import MODEL, name_of

LOOK_UP = {
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {
        "type": "object",
        "properties": {
            "word": {"type": "string", "maxLength": 8},
            "depth": {"type": "integer", "minimum": 1, "maximum": 3},
        },
        "required": ["word", "depth"],
        "additionalProperties": False,
    },
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CHAT_TOOLS = [{"type": "function", "function": tool} for tool in (LOOK_UP, ADD)]
TOOLS = [{"type": "function", **tool} for tool in (LOOK_UP, ADD)]
BLOCK = 128  # tokens
THE_ONE = {"type": "function", "function": {"name": "look_up"}}


def is_valid(call):
    """Whether a call is valid by the schema of its tool."""
    jsonschema.validate(json.loads(call.arguments), LOOK_UP["parameters"])
    return call.name == "look_up"


def return_results(messages, message, result="It is a word."):
    """Return the conversation with an answer that calls, and the tools' results."""
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result} for call in message.tool_calls
    ]
    return [*messages, message.model_dump(exclude_none=True), *results]


async def test_a_chat_that_calls_a_tool(api, opening):
    """The call is valid by its schema; the result continues the session from its cache."""
    client = api.client()
    options = {"model": MODEL, "tools": CHAT_TOOLS}
    first = await client.chat.completions.create(
        messages=opening, tool_choice=THE_ONE, max_tokens=80, **options
    )
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert is_valid(call.function)
    messages = return_results(opening, choice.message)
    second = await client.chat.completions.create(
        messages=messages, tool_choice="none", max_tokens=8, **options
    )
    assert second.session_id == first.session_id
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].message.content is not None  # the answer may be empty
    assert await api.num_turns(first.session_id) == 2


async def test_a_streamed_call_equals_the_whole_call(api, opening):
    """The client's stream assembles it; with the same seed it is the same call."""
    client = api.client()
    options = {"model": MODEL, "tools": CHAT_TOOLS, "tool_choice": "required", "max_tokens": 90}
    whole = await client.chat.completions.create(messages=opening, store=False, **options)
    deltas = []
    async with client.chat.completions.stream(messages=opening, **options) as stream:
        async for event in stream:
            if event.type == "chunk":
                deltas += [choice.delta for choice in event.chunk.choices]
        streamed = await stream.get_final_completion()
    (wanted,), (call,) = (one.choices[0].message.tool_calls for one in (whole, streamed))
    assert (call.function.name, call.function.arguments) == (
        wanted.function.name,
        wanted.function.arguments,
    )
    assert streamed.choices[0].finish_reason == "tool_calls"
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert [bool(part.id) for part in parts] == [True, *[False] * (len(parts) - 1)]
    assert len(parts) > 3  # as written: it is certain to be a call


async def test_a_call_that_is_cut(api, opening):
    """At max_tokens: its beginning is shown and may be sent back, which continues the session."""
    client = api.client()
    options = {"model": MODEL, "tools": CHAT_TOOLS[:1]}
    for max_tokens in range(16, 64, 3):
        cut = await client.chat.completions.create(
            messages=opening, tool_choice="required", max_tokens=max_tokens, **options
        )
        (choice,) = cut.choices
        if choice.message.tool_calls and choice.message.tool_calls[0].function.arguments:
            break
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length"
    with pytest.raises(ValueError, match=r"."):
        json.loads(call.function.arguments)
    after = await client.chat.completions.create(
        messages=return_results(opening, choice.message),
        tool_choice="none",
        max_tokens=4,
        **options,
    )
    assert after.session_id == cut.session_id
    assert await api.num_turns(cut.session_id) == 2


async def test_other_tools_begin_another_session(api, opening):
    """Tools are at its beginning; a named session keeps those it began with."""
    client = api.client()
    options = {"model": MODEL, "tool_choice": "required", "max_tokens": 90}
    first = await client.chat.completions.create(messages=opening, tools=CHAT_TOOLS, **options)
    messages = return_results(opening, first.choices[0].message)
    other = await client.chat.completions.create(messages=messages, tools=CHAT_TOOLS[:1], **options)
    assert other.session_id != first.session_id
    named = {"session_id": name_of(opening)}
    await client.chat.completions.create(
        messages=opening, tools=CHAT_TOOLS, extra_body=named, **options
    )
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            messages=opening[1:], tools=CHAT_TOOLS[:1], extra_body=named, **options
        )
    assert "session began with" in refused.value.message


async def test_offered_tools_need_not_be_called(api, opening):
    """Unforced output of the model is text, streamed and whole."""
    client = api.client()
    options = {"model": MODEL, "messages": opening, "tools": CHAT_TOOLS, "max_tokens": 24}
    whole = await client.chat.completions.create(store=False, **options)
    assert whole.choices[0].message.tool_calls is None
    assert whole.choices[0].finish_reason in {"stop", "length"}
    chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **options)]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content


async def test_a_response_that_calls_a_tool(api, opening):
    """Whole, by its id; its result is the next input, after the response or with all before."""
    client = api.client()
    options = {"model": MODEL, "tools": TOOLS, "max_output_tokens": 80}
    choice = {"type": "function", "name": "look_up"}
    first = await client.responses.create(input=opening, tool_choice=choice, **options)
    (call,) = first.output
    assert (first.status, call.type) == ("completed", "function_call")
    assert is_valid(call)
    assert first.tools[0].name == "look_up"
    assert (await client.responses.retrieve(first.id)).output == first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is a word."}
    options |= {"max_output_tokens": 8, "tool_choice": "none"}
    after = await client.responses.create(input=[result], previous_response_id=first.id, **options)
    assert after.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    await api.until_saved(first)
    whole = await client.responses.create(
        input=[*opening, call.model_dump(exclude_none=True), result], **options
    )
    assert whole.output_text == after.output_text
    assert whole.usage.input_tokens == after.usage.input_tokens
    assert whole.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - BLOCK


async def test_a_streamed_response_that_calls(api, opening):
    """The client's stream accepts every event; the last one has the whole."""
    client = api.client()
    options = {"model": MODEL, "input": opening, "tools": TOOLS, "tool_choice": "required"}
    async with client.responses.stream(max_output_tokens=90, **options) as stream:
        kinds = [event.type.removeprefix("response.") async for event in stream]
        final = await stream.get_final_response()
    (call,) = final.output
    assert json.loads(call.arguments) is not None
    num_deltas = kinds.count("function_call_arguments.delta")
    assert num_deltas > 1  # as written: it is certain to be a call
    assert kinds[2:-1] == [
        "output_item.added",
        *["function_call_arguments.delta"] * num_deltas,
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds[-1] == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CHAT_TOOLS[0]] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, None),
        ({"tools": CHAT_TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": CHAT_TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "fly"}},
            },
            "tool_choice",
        ),
        (
            {
                "tools": CHAT_TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
    ],
)
async def test_bad_tools_are_refused(api, opening, fields, param):
    """The error names the member."""
    with pytest.raises(openai.BadRequestError) as refused:
        await api.client().chat.completions.create(model=MODEL, messages=opening, **fields)
    assert param is None or refused.value.param == param


async def test_schemas_that_no_grammar_supports(api, opening):
    """It matters only where a tool's schema must be followed entirely."""
    parameters = {**ADD["parameters"], "propertyNames": {"maxLength": 1}}
    loose = {"name": "f", "parameters": parameters}
    strict = {"name": "g", "parameters": parameters, "strict": True}
    loose, strict = ([{"type": "function", "function": tool}] for tool in (loose, strict))
    create = api.client().chat.completions.create
    options = {"model": MODEL, "messages": opening, "max_tokens": 60}
    assert (await create(tools=loose, **options)).choices
    assert (await create(tools=strict, tool_choice="none", **options)).choices
    for choice in ("auto", "required"):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(tools=[*loose, *strict], tool_choice=choice, **options)
        assert refused.value.code == "invalid_grammar"
    called = await create(tools=loose, tool_choice="required", **options)
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["a"] in {1, 2}
