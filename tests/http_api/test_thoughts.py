"""Reasoning models: thoughts are kept apart from answers, in all APIs.

Each is served for real, and always gives the same answer.
"""

import json

import httpx2
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.http_api.test_listening import local_client
from tests.inference_processes import InferenceProcess
from tests.sampled import sampled
from tests.scripted_model import build_scripted_model, last_of_prompt
from tests.tool_templates import FAMILIES, tokenizer_of

THOUGHT, SAID = "Two words.", "Hello there."
WORDS, ANSWER = ["\nTwo ", "words.\n"], ["\n\nHello ", "there."]
ANSWERS = {  # in tokens, as models of the family write them; no token comes twice
    "qwen3": ["<think>", *WORDS, "</think>", *ANSWER],
    "qwen3_thinking": [*WORDS, "</think>", *ANSWER],  # the prompt begins the thought
    "mistral_thinking": ["[THINK]", *WORDS, "[/THINK]", *ANSWER],  # special tokens
}
QUESTION = [{"role": "user", "content": "What is a tüür?"}]
OPTIONS = {"model": "model", "temperature": 0}


def serve(directory, name, socket):
    """Run the service of a family's model."""
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family)
    script = {last_of_prompt(tokenizer): ANSWERS[name]}
    model = build_scripted_model(directory / "model", tokenizer, script, family.ends[-1])
    return InferenceProcess(model, directory, None, ["--openai", f"unix:{socket}"])


def anthropic_client(socket):
    """Return Anthropic's client, using a socket."""
    http = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(socket)))
    return AsyncAnthropic(api_key="anything", base_url="http://localhost", http_client=http)


@pytest.mark.parametrize("name", sampled(list(ANSWERS), 1, seed=1))
async def test_a_thought_is_shown_apart(short_dir, name):
    """Whole and streamed, with its tokens counted; the conversation continues in its session."""
    socket = short_dir / "openai.sock"
    num_thought = len(ANSWERS[name]) - len(ANSWER)
    async with serve(short_dir, name, socket), local_client(socket) as client:
        await check_chats(client, num_thought)
        await check_responses(client, num_thought)
        await check_conversations(client)
        async with anthropic_client(socket) as other:
            await check_messages(other)


async def check_chats(client, num_thought):
    """Check that the thought is `reasoning_content`, and that sending it back is optional."""
    first = await client.chat.completions.create(messages=QUESTION, **OPTIONS)
    (choice,) = first.choices
    assert choice.message.content == SAID
    assert choice.message.model_extra["reasoning_content"] == THOUGHT
    assert first.usage.completion_tokens_details.reasoning_tokens == num_thought
    answered = choice.message.to_dict()
    session_id = first.model_extra["session_id"]
    for sent_back in (answered, {"role": "assistant", "content": SAID}):
        messages = [*QUESTION, sent_back, {"role": "user", "content": "And two?"}]
        second = await client.chat.completions.create(messages=messages, **OPTIONS)
        assert second.usage.prompt_tokens > first.usage.total_tokens  # the thought is still there
        assert second.choices[0].message.content == SAID
        if sent_back is answered:  # the other one is answered in a fork
            assert second.model_extra["session_id"] == session_id
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            messages=QUESTION, stream=True, stream_options={"include_usage": True}, **OPTIONS
        )
    ]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    thought = [delta.model_extra.get("reasoning_content", "") for delta in deltas]
    assert "".join(thought) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == num_thought
    cut = await client.chat.completions.create(messages=QUESTION, max_tokens=2, **OPTIONS)
    assert cut.choices[0].message.content == ""
    assert cut.choices[0].finish_reason == "length"
    assert THOUGHT.startswith(cut.choices[0].message.model_extra["reasoning_content"])


async def check_responses(client, num_thought):
    """Check that the thought is an item, also of a retrieved response."""
    first = await client.responses.create(input=QUESTION, **OPTIONS)
    thought, said = first.output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
    assert said.content[0].text == SAID
    assert first.usage.output_tokens_details.reasoning_tokens == num_thought
    assert await client.responses.retrieve(first.id) == first
    again = [*QUESTION, *(item.to_dict() for item in first.output), *QUESTION]
    for more in ({"input": QUESTION, "previous_response_id": first.id}, {"input": again}):
        second = await client.responses.create(**more, **OPTIONS)
        assert second.usage.input_tokens > first.usage.total_tokens
    async with client.responses.stream(input=QUESTION, **OPTIONS) as stream:
        streamed = await stream.get_final_response()
    assert [item.type for item in streamed.output] == ["reasoning", "message"]
    assert streamed.output_text == SAID
    assert streamed.usage.output_tokens_details.reasoning_tokens == num_thought


async def check_conversations(client):
    """Check that the thought is an item of its conversation, and is not read again.

    A response that is not stored adds its items all the same.
    """
    made = await client.conversations.create()
    first = await client.responses.create(
        input=QUESTION, conversation=made.id, store=False, **OPTIONS
    )
    page = await client.conversations.items.list(made.id, order="asc")
    items = [item.to_dict() for item in page.data]
    assert items[1:] == [item.to_dict() for item in first.output]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    second = await client.responses.create(input=QUESTION, conversation=made.id, **OPTIONS)
    assert second.usage.input_tokens > first.usage.total_tokens  # the thought is still there
    for item in items:
        await client.conversations.items.delete(item["id"], conversation_id=made.id)
    third = await client.responses.create(input=QUESTION, conversation=made.id, **OPTIONS)
    said = {"role": "assistant", "content": SAID}
    alike = await client.responses.create(input=[*QUESTION, said, *QUESTION], **OPTIONS)
    assert third.usage.input_tokens == alike.usage.input_tokens
    assert third.output_text == SAID


async def check_messages(client):
    """Check that the thought is a block."""
    options = {"model": "model", "max_tokens": 50, "extra_body": {"temperature": 0}}
    first = await client.messages.create(messages=QUESTION, **options)
    assert [block.type for block in first.content] == ["thinking", "text"]
    assert (first.content[0].thinking, first.content[1].text) == (THOUGHT, SAID)
    answer = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    second = await client.messages.create(messages=[*QUESTION, answer, *QUESTION], **options)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    async with client.messages.stream(messages=QUESTION, **options) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert (streamed.content[0].thinking, streamed.content[1].text) == (THOUGHT, SAID)


async def test_an_answer_by_a_grammar_has_no_thought(short_dir):
    """It begins at once, whatever the prompt has begun; raw text is never split."""
    socket = short_dir / "openai.sock"
    async with serve(short_dir, "qwen3_thinking", socket), local_client(socket) as client:
        asked = {"structured_outputs": {"choice": ["red", "blue"]}}
        for stream in (False, True):
            made = await client.chat.completions.create(
                messages=QUESTION, extra_body=asked, stream=stream, **OPTIONS
            )
            chunks = [chunk async for chunk in made] if stream else []
            deltas = [chunk.choices[0].delta for chunk in chunks] or [made.choices[0].message]
            assert "".join(delta.content or "" for delta in deltas) in {"red", "blue"}
            assert not any("reasoning_content" in delta.model_extra for delta in deltas)
        raw = await client.completions.create(prompt="<think>\n", **OPTIONS)
        assert raw.choices[0].text == "".join(ANSWERS["qwen3_thinking"])
        assert raw.usage.completion_tokens_details.reasoning_tokens == 0


async def test_a_call_follows_a_thought(short_dir):
    """Both are parsed, and the tool's result continues the session."""
    socket = short_dir / "openai.sock"
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    call = ["<tool_call>", '{"name": "look_up", "arguments": {}}', "</tool_call>"]
    family = FAMILIES["qwen3"]
    tokenizer = tokenizer_of(family)
    script = {last_of_prompt(tokenizer): [*ANSWERS["qwen3"][:4], *call]}
    model = build_scripted_model(short_dir / "model", tokenizer, script, family.ends[-1])
    flags = ["--openai", f"unix:{socket}"]
    async with InferenceProcess(model, short_dir, None, flags), local_client(socket) as client:
        first = await client.chat.completions.create(messages=QUESTION, tools=[tool], **OPTIONS)
        message = first.choices[0].message
        assert message.model_extra["reasoning_content"] == THOUGHT
        assert (message.content, len(message.tool_calls)) == (None, 1)
        called = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": called.id, "content": json.dumps("a word")}
        second = await client.chat.completions.create(
            messages=[*QUESTION, message.to_dict(), result], tools=[tool], **OPTIONS
        )
        assert second.model_extra["session_id"] == first.model_extra["session_id"]
        assert second.choices[0].message.tool_calls
