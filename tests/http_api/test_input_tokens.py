"""POST /v1/responses/input_tokens: the count equals what a response then reads."""

import openai
import pytest

from tests.http_api.conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


async def read(client, **asked):
    """Return how many tokens a response reads, by its usage."""
    answer = await client.responses.create(model=MODEL, max_output_tokens=4, **asked)
    return answer, answer.usage.input_tokens


async def count(client, **asked):
    return (await client.responses.input_tokens.count(**asked)).input_tokens


async def test_an_input_without_history(api, opening):
    """With instructions and tools; the model may be left out."""
    async with api.client() as client:
        for more in ({}, {"instructions": "Be brief."}, {"tools": [TOOL]}):
            _, num_read = await read(client, input=opening, **more)
            assert await count(client, input=opening, **more) == num_read
            assert await count(client, input=opening, model=MODEL, **more) == num_read


async def test_an_input_that_follows_a_response(api, opening):
    """The response may be in the middle of its session."""
    async with api.client() as client:
        first, _ = await read(client, input=opening)
        asked = {"input": "And then?", "previous_response_id": first.id}
        counted = await count(client, **asked)
        second, num_read = await read(client, **asked)
        assert num_read == counted == await count(client, **asked)
        longer = await count(client, input="And then?", previous_response_id=second.id)
        assert longer > counted


async def test_an_input_of_a_conversation(api, opening):
    """Added items are counted, too."""
    async with api.client() as client:
        talk = await client.conversations.create(items=opening)
        for question in ("What is kept?", "And then?"):
            asked = {"input": question, "conversation": talk.id}
            counted = await count(client, **asked)
            _, num_read = await read(client, **asked)
            assert counted == num_read


async def test_unknown_responses_and_conversations_are_refused(api, opening):
    async with api.client() as client:
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            await count(client, input=opening, previous_response_id="resp_none")
        with pytest.raises(openai.NotFoundError):
            await count(client, input=opening, conversation="conv_none")
        with pytest.raises(openai.BadRequestError, match="input is missing"):
            await count(client)
        with pytest.raises(openai.NotFoundError, match="model"):
            await count(client, input=opening, model="other")
