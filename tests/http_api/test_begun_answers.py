"""Answers that the client has begun (prefill), by the official clients and the real pair."""

import asyncio

import openai
import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.http_api.conftest import MODEL
from tests.http_api.test_chat import LENGTH, ask, text_of
from tests.http_api.test_messages import ask as ask_anthropic
from tests.http_api.test_messages import client_of, going_on, prompt_of, prompt_tokens
from tests.http_api.test_messages import text_of as said_by

pytestmark = pytest.mark.asyncio(loop_scope="session")

BEGUN = "The blocks are "
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}


def assistant(text):
    return {"role": "assistant", "content": text}


async def continue_answer(client, messages, beginning=BEGUN, **options):
    """Request an answer that continues a given beginning."""
    extra_body = {**GOES_ON, **options.pop("extra_body", {})}
    return await ask(client, [*messages, assistant(beginning)], extra_body=extra_body, **options)


async def test_the_next_request_finds_the_whole_answer(api, opening):
    """The answer is what follows its beginning; both together are the history for all clients."""
    async with api.client() as client, client_of(api) as other:
        first = await continue_answer(client, opening)
        assert not text_of(first).startswith(BEGUN)
        whole = assistant(BEGUN + text_of(first))
        asked = {"role": "user", "content": "And then?"}
        second = await ask(client, [*opening, whole, asked])
        prompt = prompt_of(opening)
        said = [*prompt["messages"], whole, asked]
        third = await ask_anthropic(other, {**prompt, "messages": said})
    session_id = first.model_extra["session_id"]
    assert second.model_extra["session_id"] == session_id
    assert await api.num_turns(session_id) == 2
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // 2
    assert second.usage.prompt_tokens < first.usage.total_tokens + 40
    assert said_by(third) == text_of(second)  # in a fork with the same history


async def test_an_answer_continues_its_exact_tokens(api, opening):
    """Greedy, whole and streamed: the answer equals continuing the raw tokens."""
    async with api.client() as client:
        answer = await continue_answer(client, opening)
        chunks = [chunk async for chunk in await continue_answer(client, opening, stream=True)]
        url = api.url.removesuffix("/v1") + "/tokenize"
        body = {"messages": [*opening, assistant(BEGUN)], **GOES_ON}
        prompt = (await client.post(url, body=body, cast_to=object))["tokens"]
        raw = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=LENGTH, extra_body={"ignore_eos": True}
        )
    assert answer.usage.prompt_tokens == len(prompt)
    assert text_of(answer) == raw.choices[0].text
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == text_of(answer)


async def test_several_answers_have_one_beginning(api, opening):
    """With several answers the client may continue with any of them."""
    async with api.client() as client:
        answer = await continue_answer(client, opening, n=2, temperature=1, seed=7)
        assert len(answer.choices) == 2
        for choice in answer.choices:
            whole = assistant(BEGUN + choice.message.content)
            following = [*opening, whole, {"role": "user", "content": "And then?"}]
            second = await ask(client, following)
            assert second.model_extra["session_id"] == choice.model_extra["session_id"]


async def test_a_format_applies_to_the_continuation(api, opening):
    """The format applies to the continuation only, and a forced call cannot follow."""
    wanted = {"structured_outputs": {"choice": ["red", "blue"]}, "ignore_eos": False}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    async with api.client() as client:
        answer = await continue_answer(client, opening, extra_body=wanted)
        assert text_of(answer) in {"red", "blue"}
        with pytest.raises(
            openai.BadRequestError, match="that continues a message cannot be a tool call"
        ) as refused:
            await continue_answer(client, opening, tools=[tool], tool_choice="required")
        assert refused.value.param == "tool_choice"
        offered = await continue_answer(client, opening, tools=[tool])
        assert text_of(offered)


async def test_a_cut_answer_is_continued_in_a_fork(api, opening):
    """The continuation is in a fork; the cut session stays as it was."""
    async with api.client() as client:
        first = await ask(client, opening)
        longer = [*opening, assistant(text_of(first)), {"role": "user", "content": "More?"}]
        cut = await ask(client, longer)
        rest = await continue_answer(client, longer, text_of(cut))
        whole = assistant(text_of(cut) + text_of(rest))
        final = await ask(client, [*longer, whole, {"role": "user", "content": "Thanks."}])
    session_id = rest.model_extra["session_id"]
    assert session_id != cut.model_extra["session_id"] == first.model_extra["session_id"]
    assert final.model_extra["session_id"] == session_id
    assert await api.num_turns(session_id) == 3
    assert await api.num_turns(cut.model_extra["session_id"]) == 2


async def test_without_the_flag_a_final_answer_is_a_complete_message(api, opening):
    """Without the flag the final assistant message is complete: another answer follows it."""
    async with api.client() as client:
        answer = await ask(client, [*opening, assistant(BEGUN)])
        more = await continue_answer(client, opening)
        assert answer.usage.prompt_tokens > more.usage.prompt_tokens
        for messages, said in (
            (opening, "the last message has role 'user'"),
            ([*opening, assistant(BEGUN)], "exclude each other"),
        ):
            told = {"continue_final_message": True, "add_generation_prompt": messages != opening}
            told["add_generation_prompt"] = told["add_generation_prompt"] or None
            with pytest.raises(openai.BadRequestError, match=said):
                await ask(client, messages, extra_body=told)
        with pytest.raises(
            openai.BadRequestError, match="could not be told apart from the messages"
        ):
            await ask(client, opening, extra_body={"add_generation_prompt": False})


async def test_anthropic_requests_ending_with_an_answer_continue_it(api, opening):
    """Whole and streamed; token counts match what is read."""
    prompt = prompt_of(opening)
    begins = {**prompt, "messages": [*prompt["messages"], assistant(BEGUN)]}
    async with client_of(api) as client:
        first = await ask_anthropic(client, begins)
        counted = await client.messages.count_tokens(model=MODEL, **begins)
        whole = {**prompt, "messages": [*prompt["messages"]]}
        whole["messages"].append(assistant(BEGUN + said_by(first)))
        whole["messages"].append({"role": "user", "content": "And then?"})
        second = await ask_anthropic(client, whole)
        body = {"ignore_eos": True, "temperature": 0}
        async with client.messages.stream(
            model=MODEL, max_tokens=LENGTH, extra_body=body, **begins
        ) as stream:
            streamed = "".join([text async for text in stream.text_stream])
    assert prompt_tokens(first.usage) == counted.input_tokens
    assert streamed == said_by(first)
    assert second.model_extra["session_id"] == first.model_extra["session_id"]
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage) // 2
    assert going_on(prompt, first)["messages"][-1] == whole["messages"][-1]


async def test_grpc_continues_begun_answers(api, opening):
    """gRPC gives the same answer for the same beginning, and stores the whole answer."""
    messages = [pb.ChatMessage(**one) for one in opening]
    sampling = pb.Sampling(max_tokens=LENGTH, ignore_eos=True)
    options = {"tenant": "globex", "sampling": sampling}
    async with api.service.client() as grpc_client, api.client() as client:
        request = turn_request(messages, chat=pb.ChatMessages(beginning=BEGUN), **options)
        turn, answer = await asyncio.gather(
            grpc_client.submit(request), continue_answer(client, opening)
        )
        assert turn.text == text_of(answer)
        session_id = turn.accepted.session_id
        asked = [pb.ChatMessage(role="user", content="And then?")]
        after = await grpc_client.submit(turn_request(asked, session_id, **options))
        whole = assistant(BEGUN + text_of(answer))
        following = [*opening, whole, {"role": "user", "content": "And then?"}]
        assert text_of(await ask(client, following)) == after.text
