"""What the API knows survives any end of the service."""

import asyncio

import openai
import pytest

from tests.http_api.conftest import MODEL, name_of, next_messages
from tests.inference_processes import pause

pytestmark = pytest.mark.asyncio(loop_scope="session")

OPTIONS = {"model": MODEL, "max_tokens": 8}


async def before(api, opening):
    """Return a chat's answer and a response."""
    headers = {"Idempotency-Key": name_of(opening)}
    async with api.client() as client:
        create = client.chat.completions.create
        answer = await create(messages=opening, **OPTIONS, extra_headers=headers)
        response = await client.responses.create(model=MODEL, input=opening, max_output_tokens=8)
    await api.until_saved(answer)
    return answer, response


async def check_known(api, opening, first, response):
    """Check that histories, responses and repeats are known, and computed KV comes from kvd."""
    headers = {"Idempotency-Key": name_of(opening)}
    messages = next_messages(opening, first.choices[0].message.content)
    async with api.client() as client:
        create = client.chat.completions.create
        repeated = await create(messages=opening, **OPTIONS, extra_headers=headers)
        second = await create(messages=messages, **OPTIONS)
        read = await client.responses.retrieve(response.id)
        following = await client.responses.create(
            model=MODEL, input="And then?", previous_response_id=response.id, max_output_tokens=8
        )
    assert repeated.id == first.id
    assert second.model_extra["session_id"] == first.model_extra["session_id"]
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert read.output_text == response.output_text
    assert following.model_extra["session_id"] == response.model_extra["session_id"]


async def test_a_drain_and_a_restart(api, opening):
    """A stream is finished, new requests are refused meanwhile, and all is known again."""
    known = await before(api, opening)
    async with api.client() as client:
        create = client.chat.completions.create
        extra = {"ignore_eos": True}
        long = {"model": MODEL, "messages": opening, "max_tokens": 400, "extra_body": extra}
        stream = await create(**long, stream=True)
        chunks = [await anext(stream)]
        stopping = asyncio.create_task(api.service.stop())
        refused = None
        while refused is None:  # until the signal has arrived
            try:
                await create(messages=opening, **OPTIONS, store=False)
            except openai.APIError as error:
                refused = error
        chunks += [chunk async for chunk in stream]
    await stopping
    assert chunks[-1].choices[0].finish_reason == "length"
    if isinstance(refused, openai.APIStatusError):  # otherwise the service no longer listens
        assert (refused.status_code, refused.code) == (503, "draining")
    await api.start()
    await check_known(api, opening, *known)


@pytest.mark.long
async def test_a_kill_during_turns(api, opening):
    """Completed turns are known; a fork made for an unfinished turn is deleted."""
    known = await before(api, opening)
    messages = next_messages(opening, known[0].choices[0].message.content)
    extra = {"ignore_eos": True}
    long = {"model": MODEL, "messages": messages, "max_tokens": 1500, "extra_body": extra}
    async with api.client() as client:
        stream = await client.chat.completions.create(**long, stream=True, store=False)
        fork = (await anext(stream)).model_extra["session_id"]
        assert await api.num_turns(fork) == 1
        await api.service.kill()
    await api.start()
    async with asyncio.timeout(60):
        while await api.num_turns(fork) != -1:
            await pause()
    await check_known(api, opening, *known)
