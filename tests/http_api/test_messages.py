"""/v1/messages, by the official client."""

import json

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.http_api.conftest import CLIENTS, MODEL, name_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 8  # tokens of an answer
BILLING = "x-anthropic-billing-header: cc_version=2.1.107; cc_entrypoint=cli; cch={};"

WORDS = {
    "type": "object",
    "properties": {"word": {"enum": ["KV", "SSD"]}},
    "required": ["word"],
    "additionalProperties": False,  # the model is random: its text has no meaning
}
LOOK_UP = {"name": "look_up", "description": "Look a word up.", "input_schema": WORDS}
WAIT = {"name": "wait", "input_schema": {"type": "object", "additionalProperties": False}}
SEARCH = {"type": "web_search_20260318", "name": "web_search"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "KV"}}


def client_of(api, name="acme", **options):
    """Return the official client, without retries."""
    url = api.url.removesuffix("/v1")
    return AsyncAnthropic(api_key=CLIENTS.get(name, name), base_url=url, max_retries=0, **options)


def prompt_of(opening):
    """Return the same conversation in Anthropic's form."""
    system, question = opening
    return {"system": system["content"], "messages": [question]}


def going_on(prompt, message, question="And then?"):
    """Return the conversation as the client has it, with the answer and the next question."""
    said = [message.to_param(), {"role": "user", "content": question}]
    return {**prompt, "messages": [*prompt["messages"], *said]}


def request_of(prompt, **options):
    """Request a greedy answer of its full length."""
    extra_body = {"ignore_eos": True, "temperature": 0, **options.pop("extra_body", {})}
    return {"model": MODEL, "max_tokens": LENGTH, **prompt, "extra_body": extra_body, **options}


async def ask(client, prompt, **options):
    return await client.messages.create(**request_of(prompt, **options))


def text_of(message):
    """Return an answer's text, which may be empty."""
    return "".join(block.text for block in message.content)


def prompt_tokens(usage):
    """Return the number of prompt tokens; the usage counts each once."""
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


async def test_a_conversation_continues_in_its_session(api, opening):
    """The client sends the whole conversation; computed tokens are read from the cache."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        first = await ask(client, prompt)
        longer = going_on(prompt, first)
        second = await ask(client, longer)
        counted = await client.messages.count_tokens(model=MODEL, **prompt)
    assert (first.stop_reason, first.usage.output_tokens) == ("max_tokens", LENGTH)
    assert first.usage.cache_read_input_tokens == 0
    assert prompt_tokens(first.usage) == counted.input_tokens
    session_id = first.model_extra["session_id"]
    assert second.model_extra["session_id"] == session_id
    assert await api.num_turns(session_id) == 2
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage) // 2
    assert second.usage.input_tokens < prompt_tokens(first.usage)


async def test_all_apis_share_one_session(api, opening):
    """A history is found by its content, in any API's form."""
    prompt = prompt_of(opening)
    async with client_of(api) as client, api.client() as other:
        first = await ask(client, prompt)
        text = text_of(first)
        said = [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
        second = await other.chat.completions.create(
            model=MODEL, messages=[*opening, *said], max_tokens=LENGTH
        )
    assert second.model_extra["session_id"] == first.model_extra["session_id"]
    assert second.usage.prompt_tokens_details.cached_tokens > 0


async def test_a_stream_equals_the_whole_message(api, opening):
    """Text, stop reason and usage; the client assembles the same message."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        whole = await ask(client, prompt, extra_body={"store": False})
        async with client.messages.stream(**request_of(prompt)) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
            request_id = stream.request_id
    assert "".join(texts) == text_of(whole) == text_of(streamed)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(streamed.usage) == prompt_tokens(whole.usage)
    assert request_id.startswith("r-")


async def test_a_stop_sequence_ends_the_answer(api, opening):
    """It is named and not part of the text; the same in a repeat of the request."""
    prompt = prompt_of(opening)
    headers = {"Idempotency-Key": name_of(opening)}
    async with client_of(api) as client:
        whole = text_of(await ask(client, prompt, extra_body={"store": False}))
        stop = whole[len(whole) // 2 :][:3]
        options = {"stop_sequences": ["#####", stop], "extra_headers": headers}
        messages = [await ask(client, prompt, **options) for _ in range(2)]
    for message in messages:
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        text = message.content[0].text if message.content else ""
        assert text == whole[: whole.index(stop)]
    assert messages[0].id == messages[1].id


async def test_a_block_that_differs_in_each_request_is_ignored(api, opening):
    """Claude Code's first block differs in each request; breakpoints are reported as kept."""
    kept = {"type": "ephemeral", "ttl": "1h"}
    system = {"type": "text", "text": opening[0]["content"], "cache_control": kept}

    def prompt(number):
        blocks = [{"type": "text", "text": BILLING.format(number)}, system]
        return {"system": blocks, "messages": [opening[1]]}

    async with client_of(api) as client:
        first = await ask(client, prompt(74943))
        second = await ask(client, going_on(prompt(86120), first))
    assert second.model_extra["session_id"] == first.model_extra["session_id"]
    assert second.usage.cache_read_input_tokens > 0
    assert first.usage.input_tokens == 0
    created = first.usage.cache_creation
    assert created.ephemeral_1h_input_tokens == first.usage.cache_creation_input_tokens > 0


def calling(prompt, choice=None, **options):
    """Return a request that forces a call."""
    choice = choice or {"type": "tool", "name": "look_up"}
    tools = {"tools": [LOOK_UP, WAIT], "tool_choice": choice}
    return {"model": MODEL, "max_tokens": 200, **prompt, **tools, **options}


def returning(prompt, message, *texts, **members):
    """Return the conversation with the results of all calls of an answer."""
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "Keys and values.", **members}
        for call in calls
    ]
    blocks = [*results, *({"type": "text", "text": text} for text in texts)]
    said = [message.to_param(), {"role": "user", "content": blocks}]
    return {**prompt, "messages": [*prompt["messages"], *said]}


async def test_a_result_continues_the_session_of_its_call(api, opening):
    """The turn with the result continues in the session of the call, from its cache."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        first = await client.messages.create(**calling(prompt))
        longer = returning(prompt, first)
        second = await ask(client, longer, tools=[LOOK_UP, WAIT])
        third = await ask(client, going_on(longer, second), tools=[LOOK_UP, WAIT])
    (call,) = first.content
    assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "look_up")
    assert call.id.startswith("toolu_")
    assert call.input["word"] in {"KV", "SSD"}
    session_id = first.model_extra["session_id"]
    assert await api.num_turns(session_id) == 3
    for message in (second, third):
        assert message.model_extra["session_id"] == session_id
        assert message.usage.cache_read_input_tokens >= prompt_tokens(first.usage) // 2


async def test_a_streamed_call_equals_the_whole_call(api, opening):
    """The client assembles the same call; its id leads to the same session."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        whole = await client.messages.create(**calling(prompt, extra_body={"store": False}))
        async with client.messages.stream(**calling(prompt)) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        second = await ask(client, returning(prompt, streamed, "Well?"), tools=[LOOK_UP, WAIT])
    assert [(block.name, block.input) for block in streamed.content] == [
        (block.name, block.input) for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
    assert "input_json" in events
    assert second.model_extra["session_id"] == streamed.model_extra["session_id"]


async def test_any_tool_may_be_called(api, opening):
    """The answer is a call of one of them, with arguments valid by its schema."""
    prompt = prompt_of(opening)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    async with client_of(api) as client:
        message = await client.messages.create(**calling(prompt, choice))
    (call,) = message.content
    assert call.name in {"look_up", "wait"}
    assert message.stop_reason == "tool_use"


async def test_a_conversation_with_tools_moves_between_clients(api, opening):
    """Calls, results and tools are the same in any API's form."""
    prompt = prompt_of(opening)
    async with client_of(api) as client, api.client() as other:
        first = await client.messages.create(**calling(prompt))
        (call,) = first.content
        function = {"name": call.name, "arguments": json.dumps(call.input)}
        result = {"role": "tool", "tool_call_id": call.id, "content": "Keys and values."}
        answer = {
            "role": "assistant",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        }
        second = await other.chat.completions.create(
            model=MODEL,
            messages=[*opening, answer, result],
            tools=list(map(as_function, (LOOK_UP, WAIT))),
            max_tokens=LENGTH,
        )
        longer = returning(prompt, first)
        said = {"role": "assistant", "content": second.choices[0].message.content}
        question = {"role": "user", "content": "And then?"}
        longer = {**longer, "messages": [*longer["messages"], said, question]}
        third = await ask(client, longer, tools=[LOOK_UP, WAIT])
    session_id = first.model_extra["session_id"]
    assert second.model_extra["session_id"] == third.model_extra["session_id"] == session_id
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert third.usage.cache_read_input_tokens > second.usage.prompt_tokens_details.cached_tokens
    assert await api.num_turns(session_id) == 3


def as_function(tool):
    """Return a tool in OpenAI's form."""
    said = {"name": tool["name"], "parameters": tool["input_schema"]}
    if "description" in tool:
        said["description"] = tool["description"]
    return {"type": "function", "function": said}


async def test_the_clients_tool_runner(api, opening):
    """It runs each called tool and sends its result, up to its limit."""
    looked_up = []

    @anthropic.beta_async_tool(name="look_up", description="Look a word up.", input_schema=WORDS)
    async def look_up(word):
        looked_up.append(word)
        return f"{word} is a word."

    options = prompt_of(opening) | {"tool_choice": {"type": "any"}, "extra_body": {"seed": 1}}
    async with client_of(api) as client:
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=100, tools=[look_up], max_iterations=3, **options
        )
        messages = [message async for message in runner]
    assert looked_up == [message.content[0].input["word"] for message in messages]
    assert len({message.model_extra["session_id"] for message in messages}) == 1
    assert await api.num_turns(messages[0].model_extra["session_id"]) == len(messages) == 3


async def test_other_tools_open_a_new_session(api, opening):
    """A session's tools are at its beginning: other tools open a new session."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        first = await ask(client, prompt, tools=[LOOK_UP])
        longer = going_on(prompt, first)
        others = [
            await ask(client, longer, **members)
            for members in ({"tools": [WAIT]}, {}, {"tools": [LOOK_UP]})
        ]
    sessions = [message.model_extra["session_id"] for message in (first, *others)]
    assert len(set(sessions)) == 3
    assert sessions[0] == sessions[3]
    assert [await api.num_turns(session_id) for session_id in sessions] == [2, 1, 1, 2]


async def test_a_failed_tool_continues_its_session(api, opening):
    """An error is a result: the answer continues the session."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        first = await client.messages.create(**calling(prompt))
        failed = returning(prompt, first, "Try again.", content=[], is_error=True)
        second = await client.messages.create(**calling(failed))
    assert second.model_extra["session_id"] == first.model_extra["session_id"]
    assert second.content[0].id != first.content[0].id


async def test_tools_are_counted(api, opening):
    """The count is what is read: tools, calls and results make a prompt longer."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        first = await client.messages.create(**calling(prompt))
        longer = returning(prompt, first)
        counted = [
            (await client.messages.count_tokens(model=MODEL, **members)).input_tokens
            for members in (
                prompt,
                {**prompt, "tools": [LOOK_UP]},
                {**prompt, "tools": [LOOK_UP, WAIT]},
                {**longer, "tools": [LOOK_UP, WAIT]},
            )
        ]
        foreign = await client.messages.count_tokens(model=MODEL, **prompt, tools=[SEARCH])
    assert sorted(set(counted)) == counted
    assert foreign.input_tokens == counted[0], "the model is not told of what nobody runs"
    assert counted[2] == prompt_tokens(first.usage)


async def test_models_are_listed(api):
    """The model and its aliases, in the client's own form."""
    async with client_of(api) as client:
        assert [model.id async for model in client.models.list()] == [MODEL, "gpt-4o"]
        assert (await client.models.retrieve("gpt-4o")).display_name == MODEL
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("claude")


async def test_either_header_identifies_the_client(api, opening):
    """By either header; unknown clients are refused, and others limited to their tenants."""
    prompt = prompt_of(opening)
    key = {"X-Api-Key": CLIENTS["globex"], "Authorization": anthropic.Omit()}
    async with client_of(api) as client:
        message = await ask(client, prompt, extra_headers=key)
    assert await api.num_turns(message.model_extra["session_id"], "globex") == 1
    async with client_of(api, "nobody") as client:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await ask(client, prompt)
    assert refused.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"model": "claude-opus-5"}, anthropic.NotFoundError, "send 'tiny' as the model"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"tools": [LOOK_UP] * 2}, anthropic.BadRequestError, "two tools have the name 'look_up'"),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "send tools too"),
        (
            {"tools": [LOOK_UP], "tool_choice": {"type": "tool", "name": "fly"}},
            anthropic.BadRequestError,
            "the tool 'fly' to call",
        ),
        (
            {"messages": [{"role": "user", "content": [CALL]}]},
            anthropic.BadRequestError,
            "with role 'user' cannot contain",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            anthropic.BadRequestError,
            "tool_use_id",
        ),
        ({"messages": []}, anthropic.BadRequestError, "send 1 to"),
        ({"extra_body": {"max_token": 8}}, anthropic.BadRequestError, "did you mean 'max_tokens'"),
    ],
)
async def test_bad_requests_are_refused(api, opening, options, kind, said):
    """In Anthropic's form, with a remedy."""
    async with client_of(api) as client:
        with pytest.raises(kind, match=said) as refused:
            await ask(client, prompt_of(opening), **options)
    body = refused.value.body
    assert (body["type"], set(body["error"])) == ("error", {"type", "message", "code"})


@pytest.mark.parametrize(
    ("method", "path", "content", "kind"),
    [
        ("GET", "/v1/messages", b"", "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", "not_found_error"),
        ("POST", "/v1/messages", b"{", "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", b"[]", "invalid_request_error"),
        ("POST", "/v1/messages", b" " * 200_001, "request_too_large"),
    ],
)
async def test_all_errors_have_the_same_form(api, method, path, content, kind):
    """Also before a body is read, and for unknown paths."""
    headers = {"x-api-key": CLIENTS["acme"]}
    address = api.url.removesuffix("/v1")
    async with (
        aiohttp.ClientSession(address, headers=headers) as session,
        session.request(method, path, data=content) as response,
    ):
        body = await response.json()
    assert response.status >= 400
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert ": " in body["error"]["message"], "there is a remedy"


async def test_kvd_is_killed_during_a_conversation(api, opening):
    """A conversation continues without kvd, and with it again."""
    prompt = prompt_of(opening)
    async with client_of(api) as client:
        first = await ask(client, prompt)
        await api.kvd.kill()
        longer = going_on(prompt, first)
        second = await ask(client, longer)
        await api.kvd.start()
        third = await ask(client, going_on(longer, second))
    assert third.model_extra["session_id"] == first.model_extra["session_id"]
    assert await api.num_turns(first.model_extra["session_id"]) == 3
