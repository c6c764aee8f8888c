"""What a new user does with the official clients: steps, each with the methods it tries."""

import asyncio
import json
from typing import Literal

import anthropic
import openai
import pytest
from anthropic import beta_async_tool
from pydantic import BaseModel

OPENAI_WALK = []
ANTHROPIC_WALK = []
TOKENS = 400  # enough for a document with all optional blanks
FEW = 16  # for members that may be any text
STOP = {"extra_body": {"stop": [" "]}}  # after a word: helpers treat a cut stream as an error
ASKED = [{"role": "user", "content": "What is kept?"}]


class Weather(BaseModel):
    kind: Literal["sun", "rain"]
    days: Literal[1, 2]


PARAMETERS = {
    "type": "object",
    "properties": {"word": {"enum": ["tier", "turn"]}},
    "required": ["word"],
    "additionalProperties": False,
}
LOOK_UP = {"name": "look_up", "description": "Looks a word up.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": LOOK_UP}]
FLAT_TOOLS = [{"type": "function", **LOOK_UP}]
ANTHROPIC_TOOLS = [{"name": "look_up", "description": "Looks up.", "input_schema": PARAMETERS}]


def step(walk, *methods):
    """Register a function as a step that tries these methods."""

    def add(function):
        function.methods = methods
        walk.append(function)
        return function

    return add


def of_openai(*methods):
    return step(OPENAI_WALK, *methods)


def of_anthropic(*methods):
    return step(ANTHROPIC_WALK, *methods)


# ------------------------------------------------------------------------------------------ chats


@of_openai("chat.completions.create", "beta.chat.completions.create")
async def chat(client, model):
    for completions in (client.chat.completions, client.beta.chat.completions):
        answer = await completions.create(model=model, messages=ASKED, max_tokens=8)
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage.completion_tokens <= 8


@of_openai("chat.completions.create")
async def chat_streamed(client, model):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = await client.chat.completions.create(
        model=model, messages=ASKED, max_completion_tokens=8, **options
    )
    assert [chunk async for chunk in stream][-1].usage.total_tokens > 0


@of_openai("chat.completions.stream", "beta.chat.completions.stream")
async def chat_stream_helper(client, model):
    for completions in (client.chat.completions, client.beta.chat.completions):
        async with completions.stream(model=model, messages=ASKED, stop=" ") as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert "chunk" in kinds
        assert final.choices[0].finish_reason in {"stop", "length"}


@of_openai("chat.completions.parse", "beta.chat.completions.parse")
async def chat_parsed(client, model):
    for completions in (client.chat.completions, client.beta.chat.completions):
        answer = await completions.parse(
            model=model, messages=ASKED, response_format=Weather, max_tokens=TOKENS
        )
        assert answer.choices[0].message.parsed.days in {1, 2}


@of_openai("chat.completions.stream")
async def chat_parsed_in_a_stream(client, model):
    async with client.chat.completions.stream(
        model=model, messages=ASKED, response_format=Weather, max_tokens=TOKENS
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed.kind in {"sun", "rain"}


@of_openai("chat.completions.create")
async def chat_json(client, model):
    for response_format, most in (
        ({"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS}}, TOKENS),
        ({"type": "text"}, FEW),
    ):
        answer = await client.chat.completions.create(
            model=model, messages=ASKED, response_format=response_format, max_tokens=most
        )
        if response_format["type"] != "text":
            assert json.loads(answer.choices[0].message.content)["word"] in {"tier", "turn"}


@of_openai("chat.completions.create")
async def chat_with_tools(client, model):
    options = {"model": model, "tools": TOOLS, "max_tokens": TOKENS}
    first = await client.chat.completions.create(messages=ASKED, tool_choice="required", **options)
    (call,) = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["word"] in {"tier", "turn"}
    said = [*ASKED, first.choices[0].message]
    said.append({"role": "tool", "tool_call_id": call.id, "content": "A word."})
    named = {"type": "function", "function": {"name": "look_up"}}
    for choice, most in (("auto", FEW), ("none", FEW), (named, TOKENS)):
        options["max_tokens"] = most
        assert (
            await client.chat.completions.create(messages=said, tool_choice=choice, **options)
        ).choices


@of_openai("chat.completions.stream")
async def chat_with_tools_in_a_stream(client, model):
    tool = openai.pydantic_function_tool(Weather, name="tell")
    async with client.chat.completions.stream(
        model=model, messages=ASKED, tools=[tool], tool_choice="required", max_tokens=TOKENS
    ) as stream:
        deltas = [event async for event in stream if event.type.startswith("tool_calls.")]
        final = await stream.get_final_completion()
    assert deltas[-1].type == "tool_calls.function.arguments.done"
    (call,) = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments.days in {1, 2}


@of_openai("chat.completions.create")
async def chat_n_and_logprobs(client, model):
    answer = await client.chat.completions.create(
        model=model, messages=ASKED, n=2, logprobs=True, top_logprobs=2, max_tokens=4, seed=1
    )
    assert len(answer.choices) == 2
    assert all(len(row.top_logprobs) == 2 for row in answer.choices[0].logprobs.content)


@of_openai("chat.completions.create")
async def chat_sampled(client, model):
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "developer", "content": "Be brief."}, *ASKED],
        max_tokens=8,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"5": -100},
        stop=["\n\n"],
        seed=7,
        user="ann",
        metadata={"a": "b"},
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        parallel_tool_calls=None,
    )
    assert answer.choices[0].finish_reason in {"stop", "length"}


@of_openai("chat.completions.create")
async def chat_predicted(client, model):
    answer = await client.chat.completions.create(
        model=model,
        messages=ASKED,
        prediction={"type": "content", "content": "Keys and values."},
        max_tokens=8,
    )
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None


@of_openai(
    *(
        f"{where}chat.completions.{name}"
        for where in ("", "beta.")
        for name in ("retrieve", "list", "update", "delete", "messages.list")
    )
)
async def chats_that_are_stored(client, model):
    for completions in (client.chat.completions, client.beta.chat.completions):
        made = await completions.create(model=model, messages=ASKED, max_tokens=4, store=True)
        assert (await completions.retrieve(made.id)).id == made.id
        assert made.id in [one.id async for one in completions.list()]
        asked = [one.content async for one in completions.messages.list(made.id)]
        assert asked == ["What is kept?"]
        assert (await completions.update(made.id, metadata={"a": "b"})).metadata == {"a": "b"}
        assert (await completions.delete(made.id)).deleted


@of_openai("completions.create")
async def completions(client, model):
    for prompt in ("Once upon a time", ["One", "Two"], [1, 2, 3]):
        answer = await client.completions.create(
            model=model, prompt=prompt, max_tokens=4, logprobs=1
        )
        assert answer.choices[0].logprobs.tokens
    stream = await client.completions.create(model=model, prompt="One", max_tokens=4, stream=True)
    assert [chunk async for chunk in stream]


@of_openai("embeddings.create")
async def embeddings(client, model):
    for given in ("What is kept?", ["a", "b"], [1, 2]):
        made = await client.embeddings.create(model=model, input=given, dimensions=8)
        assert len(made.data[0].embedding) == 8


@of_openai("models.list", "models.retrieve")
async def models(client, model):
    assert (await client.models.retrieve(model)).id == model
    assert [one.id async for one in client.models.list()] == [model]


# -------------------------------------------------------------------------------------- responses


@of_openai(
    *(
        f"{where}responses.{name}"
        for where in ("", "beta.")
        for name in ("create", "retrieve", "delete", "input_items.list", "input_tokens.count")
    )
)
async def responses(client, model):
    for api in (client.responses, client.beta.responses):
        made = await api.create(
            model=model, input="Hello", instructions="Be brief.", max_output_tokens=8
        )
        assert made.status in {"completed", "incomplete"}
        after = await api.create(
            model=model, input="More", previous_response_id=made.id, max_output_tokens=8
        )
        assert (await api.retrieve(after.id)).output == after.output
        items = [item async for item in api.input_items.list(made.id)]
        assert items[0].content[0].text == "Hello"
        counted = await api.input_tokens.count(model=model, input="Hello")
        assert counted.input_tokens > 0
        await api.delete(after.id)
        with pytest.raises(openai.NotFoundError):
            await api.retrieve(after.id)


@of_openai("responses.create", "responses.stream")
async def responses_streamed(client, model):
    stream = await client.responses.create(
        model=model, input="Hello", max_output_tokens=8, stream=True
    )
    assert {event.type async for event in stream} >= {"response.created"}
    async with client.responses.stream(model=model, input="Hello", **STOP) as made:
        kinds = {event.type async for event in made}
        final = await made.get_final_response()
    assert "response.output_text.done" in kinds
    assert isinstance(final.output_text, str)
    async with client.responses.stream(response_id=final.id, starting_after=None) as again:
        assert (await again.get_final_response()).output_text == final.output_text


@of_openai("responses.parse", "responses.stream")
async def responses_parsed(client, model):
    options = {"model": model, "input": "Weather?", "max_output_tokens": TOKENS}
    parsed = await client.responses.parse(text_format=Weather, **options)
    assert parsed.output_parsed.days in {1, 2}
    async with client.responses.stream(text_format=Weather, **options) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed.kind in {"sun", "rain"}


@of_openai("responses.create", "responses.stream")
async def responses_with_tools(client, model):
    options = {"model": model, "tools": FLAT_TOOLS, "max_output_tokens": TOKENS}
    async with client.responses.stream(
        input="Look it up.", tool_choice="required", **options
    ) as stream:
        deltas = [event async for event in stream if event.type.endswith("arguments.delta")]
        final = await stream.get_final_response()
    (call,) = final.output
    assert deltas[-1].snapshot == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "A word."}
    options["max_output_tokens"] = FEW
    after = await client.responses.create(input=[result], previous_response_id=final.id, **options)
    assert after.status in {"completed", "incomplete"}


@of_openai("responses.create")
async def responses_with_logprobs(client, model):
    made = await client.responses.create(
        model=model,
        input="Hello",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=4,
        reasoning={"effort": "low"},
        truncation="auto",
        metadata={"a": "b"},
    )
    assert made.metadata == {"a": "b"}


@of_openai("responses.cancel", "beta.responses.cancel")
async def responses_in_the_background(client, model):
    for api in (client.responses, client.beta.responses):
        made = await api.create(model=model, input="Hello", max_output_tokens=8, background=True)
        while made.status in {"queued", "in_progress"}:
            await asyncio.sleep(0.01)
            made = await api.retrieve(made.id)
        assert (await api.cancel(made.id)).status in {"completed", "incomplete"}
        long = await api.create(
            model=model,
            input="Hello",
            max_output_tokens=200,
            background=True,
            extra_body={"ignore_eos": True},
        )
        assert (await api.cancel(long.id)).status == "cancelled"


@of_openai("responses.compact", "beta.responses.compact")
async def responses_compacted(client, model):
    for api in (client.responses, client.beta.responses):
        compacted = await api.compact(model=model, input="Hello")
        said = [compacted.output[0].model_dump(exclude_none=True), *ASKED]
        assert (await api.create(model=model, input=said, max_output_tokens=4)).output


@of_openai(
    *(f"conversations.{name}" for name in ("create", "retrieve", "update", "delete")),
    *(f"conversations.items.{name}" for name in ("create", "list", "retrieve", "delete")),
)
async def conversations(client, model):
    made = await client.conversations.create(items=ASKED, metadata={"a": "b"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "b"}
    await client.conversations.update(made.id, metadata={"a": "c"})
    await client.responses.create(
        model=model, input="And?", conversation=made.id, max_output_tokens=4
    )
    more = await client.conversations.items.create(
        made.id, items=[{"role": "user", "content": "More"}]
    )
    item = more.data[0]
    assert (await client.conversations.items.retrieve(item.id, conversation_id=made.id)).id
    assert len([one async for one in client.conversations.items.list(made.id)]) == 4
    await client.conversations.items.delete(item.id, conversation_id=made.id)
    assert (await client.conversations.delete(made.id)).deleted


# ------------------------------------------------------------------------------- what a client is


@of_openai("chat.completions.create", "models.retrieve")
async def errors_of_openai(client, model):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-none", messages=ASKED)
    assert unknown.value.code == "model_not_found"
    for fields in (
        {"messages": []},
        {"messages": ASKED, "temperature": 9},
        {"messages": ASKED, "modalities": ["audio"], "audio": {"voice": "a", "format": "wav"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": ASKED, "functions": [LOOK_UP]},
        {"messages": ASKED, "web_search_options": {}},
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=model, **fields)
        assert ": " in refused.value.message
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-none")


@of_openai("chat.completions.create", "models.list")
async def ways_to_call_openai(client, model):
    options = {"model": model, "messages": ASKED, "max_tokens": 4}
    raw = await client.chat.completions.with_raw_response.create(**options)
    assert raw.headers["x-request-id"]
    assert raw.parse().choices
    async with client.chat.completions.with_streaming_response.create(**options) as streamed:
        assert [line async for line in streamed.iter_lines()]
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=1e-6).chat.completions.create(**options)
    again = client.with_options(max_retries=2)
    assert (await again.chat.completions.create(**options)).choices

    def blocking():
        with openai.OpenAI(api_key="any", base_url=client.base_url) as one:
            return one.chat.completions.create(**options)

    assert (await asyncio.to_thread(blocking)).choices
    key = {"extra_headers": {"Idempotency-Key": f"walk-{id(client)}"}}
    first, second = [await client.chat.completions.create(**options, **key) for _ in range(2)]
    assert first.id == second.id


# -------------------------------------------------------------------------------------- anthropic


@of_anthropic("messages.create", "beta.messages.create")
async def message(client, model):
    for api in (client.messages, client.beta.messages):
        made = await api.create(model=model, max_tokens=8, messages=ASKED, system="Be brief.")
        assert made.role == "assistant"
        assert made.usage.output_tokens <= 8


@of_anthropic("messages.create", "messages.stream", "beta.messages.stream")
async def message_streamed(client, model):
    options = {"model": model, "max_tokens": 8, "messages": ASKED}
    stream = await client.messages.create(stream=True, **options)
    assert [event.type async for event in stream][-1] == "message_stop"
    for api in (client.messages, client.beta.messages):
        async with api.stream(**options) as made:
            said = "".join([text async for text in made.text_stream])
            final = await made.get_final_message()
        assert said == "".join(block.text for block in final.content)


@of_anthropic("messages.parse", "beta.messages.parse")
async def message_parsed(client, model):
    for api in (client.messages, client.beta.messages):
        made = await api.parse(
            model=model, max_tokens=TOKENS, messages=ASKED, output_format=Weather
        )
        assert made.parsed_output.days in {1, 2}


@of_anthropic("messages.count_tokens", "beta.messages.count_tokens")
async def tokens_of_a_message(client, model):
    for api in (client.messages, client.beta.messages):
        counted = await api.count_tokens(model=model, messages=ASKED, tools=ANTHROPIC_TOOLS)
        assert counted.input_tokens > 0


@of_anthropic("messages.create", "messages.stream")
async def message_with_tools(client, model):
    options = {"model": model, "max_tokens": TOKENS, "tools": ANTHROPIC_TOOLS}
    async with client.messages.stream(
        messages=ASKED, tool_choice={"type": "any"}, **options
    ) as stream:
        pieces = [event async for event in stream if event.type == "input_json"]
        final = await stream.get_final_message()
    (block,) = final.content
    assert len(pieces) > 1
    assert pieces[-1].snapshot == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "A word."}
    said = [*ASKED, final.to_param(), {"role": "user", "content": [result]}]
    assert (await client.messages.create(messages=said, **options)).stop_reason


@of_anthropic("beta.messages.tool_runner")
async def message_by_a_tool_runner(client, model):
    @beta_async_tool
    async def look_up(word: str) -> str:
        """Look a word up."""
        return f"{word}: a word."

    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=8, messages=ASKED, tools=[look_up], max_iterations=2
    )
    assert [made async for made in runner]


@of_anthropic("beta.messages.thread")
async def message_in_a_thread(client, model):
    thread = client.beta.messages.thread(
        model=model,
        max_tokens=8,
        messages=ASKED,
        unsupported_request_behavior="continue_unthreaded",
    )
    assert (await thread.send()).stop_reason in {"end_turn", "max_tokens"}


@of_anthropic("messages.create")
async def message_that_is_cached(client, model):
    system = [{"type": "text", "text": "Keys. " * 99, "cache_control": {"type": "ephemeral"}}]
    made = await client.messages.create(
        model=model, max_tokens=4, messages=ASKED, system=system, stop_sequences=["\n\n"]
    )
    assert made.usage.cache_creation.ephemeral_5m_input_tokens > 0


@of_anthropic("models.list", "models.retrieve", "beta.models.list", "beta.models.retrieve")
async def models_of_anthropic(client, model):
    for api in (client.models, client.beta.models):
        assert [one.id async for one in api.list()] == [model]
        assert (await api.retrieve(model)).id == model


@of_anthropic("messages.create")
async def ways_to_call_anthropic(client, model):
    options = {"model": model, "max_tokens": 4, "messages": ASKED}
    raw = await client.messages.with_raw_response.create(**options)
    assert raw.headers["request-id"]
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**{**options, "model": "claude-none"})
    image = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.create(
            **{**options, "messages": [{"role": "user", "content": [image]}]}
        )
